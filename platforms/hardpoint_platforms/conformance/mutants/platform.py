"""A platform that is the reference but for one fault."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from hardpoint_platforms.capabilities import Capabilities
from hardpoint_platforms.communication import Communicator, Mesh
from hardpoint_platforms.device import Device, DeviceInfo, MemoryInfo
from hardpoint_platforms.errors import DeviceUnavailable
from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed, Weight
from hardpoint_platforms.ops.provider import AttentionPlanner, OpProvider, Support
from hardpoint_platforms.platform import Platform, ProbeResult
from hardpoint_platforms.program import ProgramBuilder
from hardpoint_platforms.reference.platform import ReferenceDevice
from hardpoint_platforms.reference.providers import reference_providers
from hardpoint_platforms.state_cache import StateCache

NAME, DISTRIBUTION = "mutant", "mutant-hardpoint"
INFO = DeviceInfo(NAME, 0, "the reference with a fault")

Made = TypeVar("Made")
#: (the reference's provider, instance) -> the faulty kernel.
BuildFault = Callable[[OpProvider, OpInstance], Kernel]


@dataclass(frozen=True)
class Fault:
    """One thing wrong.

    Attributes:
        name: what is wrong, in words; groups: those of the kit that must catch it; cases: patterns that are enough.
        kernels: per op, what `build` gives instead; planner: wraps the shared planner.
        supports: replaces the answer of every provider.
        device: members of the device that are replaced, name -> function(device, ...).
        platform: members of the platform that are replaced.
        facts: capabilities that are declared otherwise.
        patience: seconds after which a check counts as hung.
    """

    name: str
    groups: tuple[str, ...]
    cases: tuple[str, ...] = ()
    kernels: Mapping[str, BuildFault] = field(default_factory=dict)
    planner: Callable[[AttentionPlanner], AttentionPlanner] | None = None
    supports: Callable[[OpProvider, OpInstance], Any] | None = None
    device: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    platform: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    patience: float | None = None


class MutantProvider(OpProvider):
    """A reference provider with another kernel, planner or answer."""

    name = "mutant"

    def __init__(self, right: OpProvider, fault: Fault, planner: AttentionPlanner | None) -> None:
        self.op, self.version = right.op, right.version
        self._right, self._fault, self._planner = right, fault, planner

    def supports(self, instance: OpInstance) -> Support:
        if self._fault.supports is not None:
            answer: Support = self._fault.supports(self._right, instance)
            return answer
        return self._right.supports(instance)

    def build(self, instance: OpInstance) -> Kernel:
        wrong = self._fault.kernels.get(self.op)
        return self._right.build(instance) if wrong is None else wrong(self._right, instance)

    def pack(self, instance: OpInstance, weights: Mapping[str, Weight]) -> Packed:
        return self._right.pack(instance, weights)

    def planner(self) -> AttentionPlanner | None:
        return self._planner if self._right.planner() is not None else None


class MutantDevice(ReferenceDevice):
    """The reference device with providers of its own, and one fault."""

    info = INFO

    def __init__(self, fault: Fault) -> None:
        rights = reference_providers()
        shared = next(planner for right in rights if (planner := right.planner()) is not None)
        if fault.planner is not None:
            shared = fault.planner(shared)
        self._providers = tuple(MutantProvider(right, fault, shared) for right in rights)
        self._faulty = fault.device
        self._facts = dataclasses.replace(
            super().capabilities(), **{"compute_dtypes": (torch.float32,), "kv_dtypes": (torch.float32,), **fault.facts}
        )

    def providers(self) -> Sequence[OpProvider]:
        return self._providers

    def capabilities(self) -> Capabilities:
        return self._replaced("capabilities", lambda: self._facts)

    def memory(self) -> MemoryInfo:
        return self._replaced("memory", super().memory)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._replaced("zeros", super().zeros, shape, dtype)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._replaced("to_device", super().to_device, tensor)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._replaced("to_host", super().to_host, tensor)

    def close(self) -> None:
        return self._replaced("close", super().close)

    def state_cache(self) -> StateCache:
        return self._replaced("state_cache", super().state_cache)

    def programs(self) -> ProgramBuilder:
        return self._replaced("programs", super().programs)

    def communicator(self, mesh: Mesh, rank: int, rendezvous: str) -> Communicator:
        return self._replaced("communicator", super().communicator, mesh, rank, rendezvous)

    def _replaced(self, name: str, right: Callable[..., Made], *arguments: Any) -> Made:
        wrong = self._faulty.get(name)
        made: Made = right(*arguments) if wrong is None else wrong(self, right, *arguments)
        return made


class MutantPlatform(Platform):
    """Opens the faulty device."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def probe(self) -> ProbeResult:
        wrong = self.fault.platform.get("probe")
        return ProbeResult((INFO,)) if wrong is None else wrong()

    def open(self, index: int, options: Mapping[str, Any]) -> Device:
        wrong = self.fault.platform.get("open")
        if wrong is not None:
            device: Device = wrong(self, index)
            return device
        if index != 0:
            raise DeviceUnavailable(f"there is no {NAME}:{index}")
        return MutantDevice(self.fault)


#: The reference under the mutant's name: what the kit must find nothing wrong with.
SOUND = Fault("nothing", ())
