"""The platform `strict`: the reference as a static-shape chip with a whole-program compiler would have it.

State is functional and donated buffers are overwritten; a bucket's program is traced once and runs on one form of
arguments; a step reads nothing back, makes no shape out of data, draws from no generator, and writes into nothing that
is not its own. Whatever breaks here would break such a chip. Tests run models and engines on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hardpoint_platforms.capabilities import BatchLimits, Capabilities, ExecutionMode
from hardpoint_platforms.device import Device, DeviceInfo, MemoryInfo
from hardpoint_platforms.errors import DeviceUnavailable
from hardpoint_platforms.hookspecs import hookimpl
from hardpoint_platforms.ops.provider import OpProvider
from hardpoint_platforms.platform import Platform, ProbeResult
from hardpoint_platforms.program import ProgramBuilder, SamplingShape
from hardpoint_platforms.state_cache import StateCache
from hardpoint_platforms.strict.journal import Journal
from hardpoint_platforms.strict.ledger import Ledger
from hardpoint_platforms.strict.program import StrictBuilder
from hardpoint_platforms.strict.providers import strict_providers
from hardpoint_platforms.strict.state import StrictStateCache
from hardpoint_platforms.strict.static.buckets import SAMPLING_SHAPES, shapes_for

_INFO = DeviceInfo("strict", 0, "plain PyTorch under the rules of a static-shape chip")
_DTYPES = (torch.float32, torch.bfloat16)
_LIMITS = BatchLimits(
    max_tokens=1024,
    max_requests=16,
    mixed=False,
    max_prefill_requests=1,
    prefill_chunk_multiple=16,
    token_buckets=(1, 4, 16, 64, 256, 1024),
    request_buckets=(1, 4, 16),
)
_CAPABILITIES = Capabilities(
    compute_dtypes=_DTYPES,
    step_tokens=256,
    kv_dtypes=_DTYPES,
    page_tokens=(16, 8, 32, 64),
    mode=ExecutionMode.COMPILE,
    functional_state=True,
    limits=_LIMITS,
    verified=True,
)


class StrictDevice(Device):
    """Memory of its own, in that every copy is one and every byte is counted."""

    info = _INFO
    torch_device = torch.device("cpu")

    def __init__(
        self, memory_bytes: int, trace: bool = True, shapes: tuple[SamplingShape, ...] = SAMPLING_SHAPES
    ) -> None:
        """trace: whether programs are traced; shapes: of sampling, each of them a program per size."""
        self._trace, self._shapes = trace, shapes
        self._journal, self._ledger = Journal(), Ledger(str(_INFO), memory_bytes)

    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    def memory(self) -> MemoryInfo:
        return MemoryInfo(max(0, self._ledger.limit - self._ledger.held()), self._ledger.limit)

    def synchronize(self) -> None:
        """Ops have finished when they return."""

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = dtype.itemsize
        for length in shape:
            size *= length
        self._ledger.require(size, f"{tuple(shape)} of {dtype}")
        return self._ledger.hold(super().zeros(shape, dtype))

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._ledger.hold(tensor.clone(memory_format=torch.contiguous_format))

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone(memory_format=torch.contiguous_format)

    def providers(self) -> Sequence[OpProvider]:
        return strict_providers(self.torch_device, self._journal, self._ledger)

    def state_cache(self) -> StateCache:
        return StrictStateCache(self, self._ledger)

    def programs(self) -> ProgramBuilder:
        return StrictBuilder(_LIMITS, self._journal, self._ledger, self._trace, self._shapes)


class StrictPlatform(Platform):
    """Always there; never chosen by `auto`, being of kind test."""

    def probe(self) -> ProbeResult:
        return ProbeResult((_INFO,))

    def open(self, index: int, options: Mapping[str, Any]) -> Device:
        if index != 0:
            raise DeviceUnavailable(f"there is no strict:{index}, only strict:0")
        shapes = shapes_for(options.get("shapes", "each"))
        return StrictDevice(int(options["memory_mib"]) << 20, bool(options.get("trace", True)), shapes)


@hookimpl
def hardpoint_platform() -> Platform:
    """For the entry point `strict`."""
    return StrictPlatform()
