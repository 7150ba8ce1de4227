"""Things of which one process can hold one: a vendor's runtime, a driver lock, PyTorch's one out-of-tree backend.

A manifest names them (`process_exclusive`). Two *platforms* that name the same one cannot be open in one process; two
devices of one platform share what their plugin holds. What a process holds is a fact of the process, so this is the one
record that is kept beside the objects that callers pass around.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from hardpoint_platforms.device import Device
from hardpoint_platforms.discovery import PlatformEntry
from hardpoint_platforms.errors import DeviceUnavailable


@dataclass
class ProcessClaims:
    """Who holds what: per token the devices that hold it, and the distribution that they came from."""

    _lock: threading.RLock = field(default_factory=threading.RLock)
    _holders: dict[str, tuple[PlatformEntry, set[int]]] = field(default_factory=dict)

    @contextmanager
    def opening(self, entry: PlatformEntry) -> Iterator[None]:
        """While a device of this platform is opened: one at a time.

        Raises DeviceUnavailable if another platform holds something that this one needs for itself.
        """
        with self._lock:
            for token in _tokens(entry):
                held = self._holders.get(token)
                if held is not None and _owner(held[0]) != _owner(entry):
                    raise DeviceUnavailable(
                        f"platform {entry.name!r} ({entry.distribution}) needs {token!r} for itself, and one process "
                        f"has it once; {held[0].name!r} ({held[0].distribution}) holds it here",
                        hint=f"give the {held[0].name} device back with close_device() first (its own close() alone "
                        "does not let go), or run the two in processes of their own",
                    )
            yield

    def hold(self, entry: PlatformEntry, device: Device) -> None:
        """Note that an opened device holds its platform's tokens, until `release` or its end."""
        tokens = _tokens(entry)
        if not tokens:
            return
        with self._lock:
            for token in tokens:
                self._holders.setdefault(token, (entry, set()))[1].add(id(device))
        weakref.finalize(device, self._forget, id(device))

    def release(self, device: Device) -> None:
        """The device is closed."""
        self._forget(id(device))

    def _forget(self, key: int) -> None:
        with self._lock:
            for token, (_, devices) in list(self._holders.items()):
                devices.discard(key)
                if not devices:
                    del self._holders[token]


def _tokens(entry: PlatformEntry) -> tuple[str, ...]:
    return entry.manifest.process_exclusive if entry.manifest is not None else ()


def _owner(entry: PlatformEntry) -> tuple[str, str]:
    return entry.distribution, entry.name


#: Of this process.
CLAIMS = ProcessClaims()
