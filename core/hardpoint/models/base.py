"""What the worker needs of a model, and how a model collects its weights while it is built."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from hardpoint.models.pieces import Pieces
from hardpoint.models.read_ahead import Load, ReadAhead
from hardpoint.weights.source import WeightSource
from hardpoint_platforms.binding import BoundOp
from hardpoint_platforms.device import Device
from hardpoint_platforms.ops.contract import Packed, Weight
from hardpoint_platforms.program import Weights
from hardpoint_platforms.quant import QuantTensor
from hardpoint_platforms.state_cache import CacheGroup, LayerCache, State

#: Elements from which a weight is converted on all threads.
_LARGE = 1 << 25


class CausalModel(ABC):
    """A decoder over a flat batch of tokens. Holds bound ops and weight slots, no weights and no state."""

    vocab_size: int
    max_context: int
    hidden_size: int
    #: Tensors [T, hidden_size] that it takes from the part before.
    takes: int = 0
    #: Groups of equally many layers, and what each pool layer keeps (see `state_cache`).
    cache_groups: tuple[CacheGroup, ...]
    pool: tuple[LayerCache, ...]

    @abstractmethod
    def advance(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        plans: tuple[Any, ...],
        state: State,
        weights: Weights,
        carried: tuple[torch.Tensor, ...],
    ) -> tuple[tuple[torch.Tensor, ...], State]:
        """Run the layers of this part of a model; most models are one part.

        token_ids, positions: int64 [T]. carried: what the part before returned, empty for the first. The last part
        returns the hidden states after the final norm, [T, hidden_size]; the others what the next one takes.
        """

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        plans: tuple[Any, ...],
        state: State,
        weights: Weights,
    ) -> tuple[torch.Tensor, State]:
        """Hidden states after the final norm of a model that is one part.

        token_ids, positions: int64 [T]. Returns [T, hidden_size] and the new state.
        """
        (hidden,), state = self.advance(token_ids, positions, plans, state, weights, ())
        return hidden, state

    @abstractmethod
    def logits(self, hidden: torch.Tensor, weights: Weights) -> torch.Tensor:
        """float32 [R, vocab_size] of hidden [R, hidden_size]."""


@dataclass(frozen=True)
class _LoadTask:
    slot: int
    bound: BoundOp
    parts: Mapping[str, Load]

    @property
    def elements(self) -> int:
        """Numbers in its largest weight."""
        return max(math.prod(spec.shape) for spec in self.bound.instance.weights.values())


class ParameterBook:
    """Slots of the flat weight tuple, in the order in which the model was built.

    Building adds a slot per bound op that has weights; `load` reads, moves and repacks them in order, so that host
    memory never holds more than a few weights twice.
    """

    def __init__(self, source: WeightSource) -> None:
        self.source = source
        self._tasks: list[_LoadTask] = []
        self._used: set[str] = set()

    def use(self, name: str) -> str:
        """Note that a checkpoint name is taken by the model; returns it. The rest is reported as unused."""
        self._used.add(name)
        return name

    def add(self, bound: BoundOp, parts: Mapping[str, Load]) -> int:
        """A slot for a bound op. `parts` load its weights, by the contract's argument names, in its order.

        The same callable in several slots is one weight (tied embeddings, rope tables).
        """
        slot = len(self._tasks)
        self._tasks.append(_LoadTask(slot, bound, parts))
        return slot

    def unused(self) -> list[str]:
        """Checkpoint names that no op took."""
        return sorted(set(self.source.names()) - self._used)

    def load(self, device: Device, progress: Callable[[float], None] | None = None) -> Weights:
        """Read everything. `progress` is called with the share done."""
        packed: list[Packed] = []
        uses = Counter(load for task in self._tasks for load in task.parts.values())
        shared: dict[Load, Weight] = {}

        def fetch(load: Load) -> Weight:
            """Loads that several slots share are read and moved once."""
            uses[load] -= 1
            weight = shared.pop(load) if load in shared else _to_device(device, read(load), shared=uses[load] > 0)
            if uses[load]:
                shared[load] = weight
            return weight

        loads = ((load, task.elements) for task in self._tasks for load in task.parts.values())
        with ReadAhead(loads, join=device.capabilities().unified_memory) as read:
            for task in self._tasks:
                with _host_threads(task.elements):
                    weights = {name: fetch(load) for name, load in task.parts.items()}
                    packed.append(task.bound.provider.pack(task.bound.instance, weights))
                if progress is not None:
                    progress((task.slot + 1) / len(self._tasks))
        return tuple(packed)

    def weight_bytes(self, weights: Weights) -> int:
        """Bytes of what `load` returned; memory in several slots counts once."""
        seen: dict[Hashable, int] = {}
        for task, packed in zip(self._tasks, weights, strict=True):
            seen.update(task.bound.provider.packed_bytes(packed))
        return sum(seen.values())


@dataclass(frozen=True)
class _SharedQuant(QuantTensor):
    """A quantized weight of several ops (tied embeddings): those that want it plain share one copy."""

    plain: dict[torch.dtype, torch.Tensor] = field(default_factory=dict, compare=False)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        if dtype not in self.plain:
            self.plain[dtype] = super().dequantize(dtype)
        return self.plain[dtype]


@contextmanager
def _host_threads(elements: int) -> Iterator[None]:
    """One thread for small weights: on a busy host, waking the others takes longer than the short passes."""
    before = torch.get_num_threads()
    if elements < _LARGE:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_QUANT_PARTS = ("values", "scales", "offsets", "super_scales", "super_offsets", "codebook")


def _to_device(device: Device, weight: Weight | Pieces, shared: bool) -> Weight:
    if isinstance(weight, Pieces):
        return weight.join(lambda piece: _to_device(device, piece, shared))
    if isinstance(weight, torch.Tensor):
        return device.to_device(weight)
    parts: dict[str, Any] = {name: getattr(weight, name) for name in _QUANT_PARTS}
    moved: dict[str, Any] = {n: None if part is None else device.to_device(part) for n, part in parts.items()}
    return (_SharedQuant if shared else QuantTensor)(scheme=weight.scheme, shape=weight.shape, **moved)
