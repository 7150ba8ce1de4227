"""The device: memory and copies, and everything else that the plugin offers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from acme_npu.communication import HostCommunicator
from acme_npu.memory import CHIP, DEVICE, AcmeTensor, Block, lazy_zeros
from acme_npu.ops.providers import all_providers
from acme_npu.pages import BlockedStateCache
from acme_npu.program import MAX_REQUESTS, CaptureBuilder
from hardpoint_platforms.capabilities import BatchLimits, Capabilities, ExecutionMode, TuningChoice
from hardpoint_platforms.communication import Communicator, Mesh
from hardpoint_platforms.device import Device, DeviceInfo, MemoryInfo
from hardpoint_platforms.errors import OutOfDeviceMemory
from hardpoint_platforms.ops.provider import OpProvider
from hardpoint_platforms.program import ProgramBuilder
from hardpoint_platforms.state_cache import StateCache

INFO = DeviceInfo("acme", 0, "Acme NPU (emulated)")


class AcmeDevice(Device):
    """One opening of the chip. Memory is the chip's: two openings see one budget, the larger one asked for."""

    info = INFO
    torch_device = DEVICE

    def __init__(self, memory_bytes: int, fault: str = "") -> None:
        self._fault = fault
        CHIP.total = max(CHIP.total, memory_bytes)
        CHIP.leaks = fault == "memory_leaks"
        dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
        self._capabilities = Capabilities(
            compute_dtypes=(*dtypes, torch.float16) if fault == "claims_dtype" else dtypes,
            step_tokens=256,
            kv_dtypes=dtypes,
            page_tokens=(16, 24, 32) if fault == "claims_page_size" else (16, 32),
            mode=ExecutionMode.CAPTURE,
            limits=BatchLimits(max_requests=MAX_REQUESTS),
            tuning=(TuningChoice("fault", fault, "asked for: results are wrong on purpose"),) if fault else (),
        )
        self._providers = all_providers(fault)
        self._programs = CaptureBuilder(fault)
        self._state_cache = BlockedStateCache(fault)

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def memory(self) -> MemoryInfo:
        return MemoryInfo(CHIP.total - CHIP.used, CHIP.total)

    def synchronize(self) -> None:
        """Emulated calls have finished when they return."""

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        try:
            block = Block(CHIP, size)
        except OutOfDeviceMemory:
            if self._fault != "oom_swallowed":
                raise
            return CHIP.wrap(torch.zeros(1, dtype=dtype).expand(tuple(shape)))
        return CHIP.wrap(lazy_zeros(shape, dtype), block)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, AcmeTensor):
            return tensor
        return CHIP.wrap(tensor.detach().clone(memory_format=torch.contiguous_format))

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.inner.clone() if isinstance(tensor, AcmeTensor) else tensor

    def providers(self) -> Sequence[OpProvider]:
        return self._providers

    def state_cache(self) -> StateCache:
        return self._state_cache

    def programs(self) -> ProgramBuilder:
        return self._programs

    def communicator(self, mesh: Mesh, rank: int, rendezvous: str) -> Communicator:
        return HostCommunicator(self, super().communicator(mesh, rank, rendezvous))
