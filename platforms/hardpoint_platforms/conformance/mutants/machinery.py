"""Faults in memory, state, programs, collectives, and in how the plugin loads."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hardpoint_platforms import ceilings
from hardpoint_platforms.capabilities import BatchLimits
from hardpoint_platforms.communication import Communicator
from hardpoint_platforms.conformance.mutants.platform import INFO, SOUND, Fault, MutantDevice
from hardpoint_platforms.device import DeviceInfo, MemoryInfo
from hardpoint_platforms.errors import OutOfDeviceMemory
from hardpoint_platforms.platform import ProbeResult
from hardpoint_platforms.program import (
    Bucket,
    Program,
    ProgramBuilder,
    SamplingShape,
    StepFunction,
    StepInputs,
    StepOutputs,
)
from hardpoint_platforms.reference.communication import GlooCommunicator
from hardpoint_platforms.state_cache import CacheLayout, CanonicalPages, DenseStateCache, State

Right = Callable[..., Any]


def _leaks(device: MutantDevice, right: Right, *arguments: Any) -> Any:
    made = right(*arguments)
    vars(device).setdefault("_kept", []).append(made)
    return made


def _dirty(device: MutantDevice, right: Right, shape: Sequence[int], dtype: torch.dtype) -> Any:
    made = right(shape, dtype)
    if made.numel() > 3:
        made.view(-1)[-1] = 1
    return made


def _swallows(device: MutantDevice, right: Right, *arguments: Any) -> Any:
    try:
        return right(*arguments)
    except OutOfDeviceMemory:
        return torch.zeros(1, dtype=arguments[-1])


def _through_float(device: MutantDevice, right: Right, tensor: torch.Tensor) -> Any:
    return right(tensor).to(torch.float32).to(tensor.dtype) * 1 if tensor.dtype == torch.bool else right(tensor).float()


def _ignores_strides(device: MutantDevice, right: Right, tensor: torch.Tensor) -> Any:
    if tensor.is_contiguous() or tensor.dim() != 2:
        return right(tensor)
    size, start = tensor.numel(), tensor.storage_offset()
    flat = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    return flat[start : start + size].reshape(tensor.shape) if start + size <= len(flat) else flat[:size].clone()


class WrongCache(DenseStateCache):
    """A state cache with one fault, by name."""

    def __init__(self, device: MutantDevice, fault: str) -> None:
        super().__init__(device)
        self._fault = fault
        self._one: dict[CacheLayout, State] = {}

    def page_bytes(self, layout: CacheLayout) -> int:
        size = super().page_bytes(layout)
        return size // 2 if self._fault == "page_bytes" else size

    def allocate(self, layout: CacheLayout, num_pages: int) -> State:
        if self._fault == "oom swallowed":
            try:
                return super().allocate(layout, num_pages)
            except OutOfDeviceMemory:
                return super().allocate(layout, 2)
        state = super().allocate(layout, num_pages)
        if self._fault == "not zeroed":
            state[1][0][3].fill_(7.0)
        if self._fault == "shared":
            return self._one.setdefault(layout, state)
        return state

    def copy_pages(self, state: State, sources: Sequence[int], targets: Sequence[int]) -> State:
        if self._fault == "one layer":
            super().copy_pages(state[:1], sources, targets)
            return state
        if self._fault == "copies":
            return super().copy_pages(tuple(tuple(p.clone() for p in parts) for parts in state), sources, targets)
        if self._fault == "no state":
            super().copy_pages(state, sources, targets)
            return None
        return super().copy_pages(state, sources, targets)

    def export_pages(self, state: State, layout: CacheLayout, page_ids: Sequence[int]) -> CanonicalPages:
        ids = sorted(page_ids) if self._fault == "sorted" else page_ids
        return dataclasses.replace(super().export_pages(state, layout, ids), page_ids=tuple(page_ids))

    def import_pages(self, state: State, page_ids: Sequence[int], pages: CanonicalPages) -> State:
        if self._fault == "rounds":
            data = tuple(tuple(part.to(torch.bfloat16).to(part.dtype) for part in parts) for parts in pages.data)
            pages = dataclasses.replace(pages, data=data)
        return super().import_pages(state, page_ids, pages)


def _state(name: str, fault: str, **more: Any) -> Fault:
    return Fault(name, ("state",), device={"state_cache": lambda device, right: WrongCache(device, fault)}, **more)


class WrongProgram(Program):
    """A captured program with one fault, by name."""

    def __init__(self, step: StepFunction, fault: str) -> None:
        self._step, self._fault = step, fault
        self._plans: dict[tuple[int, int], tuple[Any, ...]] = {}
        self._ids: dict[tuple[int, ...], torch.Tensor] = {}

    def run(self, inputs: StepInputs, state: State, weights: Any) -> tuple[StepOutputs, State]:
        with torch.inference_mode():
            key = (len(inputs.token_ids), len(inputs.logits_index))
            if self._fault == "plans":
                inputs = dataclasses.replace(inputs, plans=self._plans.setdefault(key, inputs.plans))
            if self._fault == "seeds" and not inputs.sampling.all_greedy:
                fixed = dataclasses.replace(inputs.sampling, seeds=torch.zeros_like(inputs.sampling.seeds))
                inputs = dataclasses.replace(inputs, sampling=fixed)
            if self._fault == "index":
                inputs = dataclasses.replace(inputs, logits_index=torch.zeros_like(inputs.logits_index))
            outputs, state = self._step(inputs, state, weights)
            if self._fault == "buffers":
                ids = self._ids.setdefault(tuple(outputs.sample.token_ids.shape), outputs.sample.token_ids.clone())
                ids.copy_(outputs.sample.token_ids)
                outputs = dataclasses.replace(outputs, sample=dataclasses.replace(outputs.sample, token_ids=ids))
            return outputs, state

    def begin(self, inputs: StepInputs, state: State, weights: Any) -> None:
        if self._fault == "early page":
            _spoil_page(state)

    def prepare(self, inputs: StepInputs, state: State, weights: Any) -> State:
        if self._fault == "no state":
            super().prepare(inputs, state, weights)
            return None
        if self._fault == "warm page":
            _spoil_page(state)
        return super().prepare(inputs, state, weights)


def _spoil_page(state: State) -> None:
    with torch.inference_mode():
        for part in (part for parts in state for part in parts):
            part[1:2] = 0.0


class WrongBuilder(ProgramBuilder):
    """Builds faulty programs."""

    def __init__(self, fault: str) -> None:
        self._fault = fault

    def buckets(self, max_tokens: int, max_requests: int) -> tuple[Bucket, ...]:
        if self._fault == "small buckets":
            return (Bucket(max_tokens // 2, max_requests),)
        if self._fault == "no filters":
            return (Bucket(max_tokens, max_requests, 0, SamplingShape.GREEDY),)
        return ()

    def build(self, step: StepFunction, bucket: Bucket) -> Program:
        return WrongProgram(step, self._fault)

    def fingerprint(self) -> str:
        return str(time.perf_counter_ns()) if self._fault == "fingerprint" else "mutant"


def _program(name: str, fault: str, group: str = "programs") -> Fault:
    return Fault(name, (group,), device={"programs": lambda device, right: WrongBuilder(fault)})


class WrongCommunicator(GlooCommunicator):
    """Collectives with one fault each."""

    fault = ""

    def all_reduce(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        return x if self.fault == "reduce" else super().all_reduce(x, axis)

    def all_gather(self, x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
        whole = super().all_gather(x, axis, dim)
        if self.fault != "gather":
            return whole
        return torch.cat(whole.chunk(self.mesh.size(axis), dim)[::-1], dim)

    def reduce_scatter(self, x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
        return super().reduce_scatter(x.flip(dim) if self.fault == "scatter" else x, axis, dim)

    def broadcast(self, x: torch.Tensor, axis: str, root: int = 0) -> torch.Tensor:
        return super().broadcast(x, axis, 0 if self.fault == "broadcast" else root)


def _collective(name: str, fault: str, pattern: str) -> Fault:
    kind = type("WrongCommunicator", (WrongCommunicator,), {"fault": fault})

    def made(device: MutantDevice, right: Right, *arguments: Any) -> Communicator:
        communicator: Communicator = kind(*arguments)
        return communicator

    return Fault(name, ("collectives",), (f"collectives/*/{pattern}",), device={"communicator": made})


def _patches(platform: Any, index: int) -> Any:
    """Replaces a class of the SPI by its own, as monkeypatching plugins do."""
    ceilings.Ceilings = type("Ceilings", (ceilings.Ceilings,), {})  # type: ignore[misc, assignment]
    return MutantDevice(SOUND)


def _any_index(platform: Any, index: int) -> Any:
    return MutantDevice(SOUND)


def _other_each_time(device: MutantDevice, right: Right) -> Any:
    return dataclasses.replace(right(), step_tokens=1 + time.perf_counter_ns() % 100_000)


def _closes_once(device: MutantDevice, right: Right) -> None:
    if vars(device).setdefault("_closed", False):
        raise RuntimeError("closed already")
    vars(device)["_closed"] = True


FAULTS: tuple[Fault, ...] = (
    Fault("zeros leaks", ("memory",), ("memory/accounting/*",), device={"zeros": _leaks}),
    Fault("zeros leaves something", ("memory",), ("memory/zeros/*",), device={"zeros": _dirty}),
    Fault("running out of memory is swallowed", ("memory",), ("memory/accounting/*",), device={"zeros": _swallows}),
    Fault("copies go through float32", ("memory",), ("memory/copies/*",), device={"to_device": _through_float}),
    Fault("copies ignore strides", ("memory",), ("memory/copies/*",), device={"to_device": _ignores_strides}),
    Fault("more memory is free than there is", ("memory",), ("memory/accounting/free*",),
          device={"memory": lambda device, right: MemoryInfo(2 << 30, 1 << 30)}),
    _state("a page's bytes are too few", "page_bytes"),
    _state("running out of pages is swallowed", "oom swallowed"),
    _state("fresh pages are not zero", "not zeroed"),
    _state("two states are one", "shared"),
    _state("pages are copied in one layer", "one layer"),
    _state("the state is copied behind the core's back", "copies"),
    _state("copy_pages returns nothing", "no state"),
    _state("export gives pages in ascending order", "sorted"),
    _state("import rounds", "rounds"),
    _state("in place, though declared functional", "", facts={"functional_state": True}),
    _program("replays read the page tables of the capture", "plans"),
    _program("replays draw with the seeds of the capture", "seeds"),
    _program("replays take the first token's logits", "index"),
    _program("results lie in a buffer of the program", "buffers"),
    _program("fingerprint changes", "fingerprint"),
    _program("preparing writes into a page in use", "warm page"),
    _program("beginning writes into a page in use", "early page"),
    _program("preparing returns no state", "no state"),
    _program("no bucket takes the largest step", "small buckets", "load"),
    _program("buckets for greedy steps alone", "no filters", "load"),
    _collective("all_reduce returns its input", "reduce", "all_reduce-of-2*"),
    _collective("all_gather in reverse rank order", "gather", "all_gather-of-2*"),
    _collective("reduce_scatter gives another's share", "scatter", "reduce_scatter-of-2*"),
    _collective("broadcast from rank 0 always", "broadcast", "broadcast-of-2*"),
    Fault("opening patches the SPI", ("load",), platform={"open": _patches}),
    Fault("open gives a device for any index", ("load",), platform={"open": _any_index}),
    Fault("probe finds devices of another platform", ("load",),
          platform={"probe": lambda: ProbeResult((DeviceInfo("other", 0, "not mine"),))}),
    Fault("probe takes three seconds", ("load",), ("load/probe/*",), platform={"probe": lambda: _slow_probe()}),
    Fault("capabilities change", ("load",), device={"capabilities": _other_each_time}),
    Fault("no compute dtype", ("load",), facts={"compute_dtypes": ()}),
    Fault("a page of no tokens", ("load",), facts={"page_tokens": (0,)}),
    Fault("limits under which nothing runs", ("load",), facts={"limits": BatchLimits(max_requests=0)}),
    Fault("closing twice raises", ("load",), device={"close": _closes_once}),
)  # fmt: skip


def _slow_probe() -> ProbeResult:
    time.sleep(2.05)
    return ProbeResult((INFO,))
