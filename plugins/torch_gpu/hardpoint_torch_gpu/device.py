"""A device over torch's GPU API: memory, transfers, streams, graphs. Platforms derive from it and add their facts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hardpoint_platforms.capabilities import Capabilities
from hardpoint_platforms.ceilings import Ceilings
from hardpoint_platforms.communication import Communicator, Mesh
from hardpoint_platforms.device import Device, DeviceInfo, MemoryInfo
from hardpoint_platforms.ops.provider import OpProvider
from hardpoint_platforms.program import EagerBuilder, ProgramBuilder, SamplingShape
from hardpoint_platforms.reference.communication import TIMEOUT_SECONDS
from hardpoint_platforms.state_cache import StateCache
from hardpoint_platforms.streams import Readback, Stream
from hardpoint_torch_gpu.ceilings import measure
from hardpoint_torch_gpu.collectives import GpuCommunicator
from hardpoint_torch_gpu.compiles import LateCompiles
from hardpoint_torch_gpu.fused_reference import fused_references
from hardpoint_torch_gpu.graphs import GraphBuilder
from hardpoint_torch_gpu.measured import GpuTimer, Measurements, file_for
from hardpoint_torch_gpu.pages import GpuStateCache
from hardpoint_torch_gpu.providers import triton_providers
from hardpoint_torch_gpu.streams import GpuStream
from hardpoint_torch_gpu.transfers import EventReadback, Sender, Uploader


class TorchGpuDevice(Device):
    """One GPU. `graphs`: whether decode steps are captured; `largest_graph`: requests of the largest one; `float8`:
    whether its tensor cores multiply float8_e4m3fn; `measure`: whether kernels are timed where no time is on disk;
    `record`: "all" sizes before serving, or "first" those that are needed most, the others while serving; `fuse`:
    whether ops without a kernel are compiled by torch."""

    def __init__(
        self,
        info: DeviceInfo,
        capabilities: Capabilities,
        *,
        graphs: bool = True,
        largest_graph: int = 512,
        float8: bool = True,
        measure: bool = False,
        record: str = "all",
        fuse: bool = False,
    ) -> None:
        self._info = info
        self._capabilities = capabilities
        self._torch_device = torch.device("cuda", info.index)
        self._graphs, self._largest, self._record = graphs, largest_graph, record
        self._uploader = Uploader(self._torch_device)
        self._sender = Sender(self._torch_device)
        timer = GpuTimer(self._torch_device) if measure else None
        #: Which of several kernels is fastest here, as far as that was measured.
        self.measurements = Measurements(file_for(self._torch_device), timer)
        self._providers = triton_providers(self, float8, self.measurements) + (fused_references() if fuse else ())
        self._late = LateCompiles()
        torch.cuda.set_device(self._torch_device)

    @property
    def info(self) -> DeviceInfo:
        return self._info

    @property
    def torch_device(self) -> torch.device:
        return self._torch_device

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def memory(self) -> MemoryInfo:
        """What torch's allocator keeps for later counts as free."""
        free, total = torch.cuda.mem_get_info(self._torch_device)
        kept = torch.cuda.memory_reserved(self._torch_device) - torch.cuda.memory_allocated(self._torch_device)
        return MemoryInfo(free + kept, total)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._torch_device)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._sender.send(tensor)

    def upload(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        if torch.cuda.current_device() != self._torch_device.index:
            torch.cuda.set_device(self._torch_device)  # each host thread has a current device of its own
        return self._uploader.upload(tensors)

    def read_back(self, tensors: Sequence[torch.Tensor]) -> Readback:
        return EventReadback(tensors)

    def providers(self) -> Sequence[OpProvider]:
        return self._providers

    def state_cache(self) -> StateCache:
        return GpuStateCache(self)

    def stream(self) -> Stream:
        return GpuStream(self._torch_device)

    def programs(self) -> ProgramBuilder:
        if not self._graphs:
            return EagerBuilder()
        shapes = (SamplingShape.GREEDY, SamplingShape.DRAW)
        first = self._record == "first"
        return GraphBuilder(self._torch_device, shapes, self._largest, self._late, put_off=first)

    def communicator(self, mesh: Mesh, rank: int, rendezvous: str) -> Communicator:
        if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
            return super().communicator(mesh, rank, rendezvous)
        return GpuCommunicator(mesh, rank, rendezvous, self._torch_device, TIMEOUT_SECONDS)

    def ceilings(self) -> Ceilings | None:
        return measure(self._torch_device)

    def close(self) -> None:
        self.synchronize()
        self._late.close()
        torch.cuda.empty_cache()
