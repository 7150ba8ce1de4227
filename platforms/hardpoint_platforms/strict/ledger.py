"""How much of the device's memory is in use: every storage that it handed out, until it is freed."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hardpoint_platforms.errors import OutOfDeviceMemory

#: Entries after which the first sweep looks for storages that are gone.
_FIRST_SWEEP = 1024


class Ledger:
    """Counts the bytes of live storages against a limit. One per opened device."""

    def __init__(self, name: str, limit: int) -> None:
        """`name` is for messages; `limit` in bytes."""
        self.limit = limit
        self._name = name
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        self._sweep_at = _FIRST_SWEEP

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count the tensor's storage for as long as it lives; the same one counts once."""
        reference = StorageWeakRef(tensor.untyped_storage())
        known = self._held.get(reference.cdata)
        if known is None or known[0].expired():
            self._held[reference.cdata] = (reference, tensor.untyped_storage().nbytes())
        if len(self._held) > self._sweep_at:
            self.held()
            self._sweep_at = max(_FIRST_SWEEP, 2 * len(self._held))
        return tensor

    def held(self) -> int:
        """Bytes of the storages that live."""
        self._held = {key: entry for key, entry in self._held.items() if not entry[0].expired()}
        return sum(size for _, size in self._held.values())

    def require(self, size: int, what: str) -> None:
        """Raise OutOfDeviceMemory where `size` bytes more do not fit."""
        held = self.held()
        if held + size > self.limit:
            raise OutOfDeviceMemory(
                f"{self._name}: no room for {what}: {size} bytes wanted, {self.limit - held} of {self.limit} free",
                hint="give the KV cache less memory (--kv-cache-memory) or the device more (--option memory_mib=N)",
            )
