"""`hardpoint bench kernels`: bytes and multiply-adds per second of every op of a model, beside the device's ceilings.

The model is built and loaded as for serving; then its step runs op by op on batches of several shapes, with every bound
kernel timed in its place (see `meter`). Few tokens are decodes, one per request, behind contexts of several lengths;
more of them are one prompt. The cache holds random numbers: pages that were never written would be read
from nowhere.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hardpoint.bench.costs import Attended, Call, Cost, attended, cost_of
from hardpoint.bench.meter import Key, Meter, Timing, WatchedTable, short_name
from hardpoint.config.engine import EngineConfig
from hardpoint.engine.devices import OpenedDevices
from hardpoint.errors import ConfigError
from hardpoint.scheduler.plan import StepPlan
from hardpoint.weights.checkpoint import open_checkpoint
from hardpoint.worker.batch_builder import HostBatch, build_host_batch
from hardpoint.worker.worker import BoundModel, bind_model, cache_layout, check_choices
from hardpoint_platforms.batch import SamplingInputs
from hardpoint_platforms.ceilings import Ceilings
from hardpoint_platforms.device import Device
from hardpoint_platforms.ops.contract import OpInstance
from hardpoint_platforms.program import ANY_SIZE, Weights
from hardpoint_platforms.state_cache import CacheLayout, CanonicalPages, State

#: More tokens than this are one prompt, fewer are a decode each.
DECODES = 32
#: Share of the free memory that the cache of the largest batch may take.
_CACHE_SHARE = 0.25
#: Pages of random numbers that are made at once.
_PAGES = 16
#: A quantized weight of fewer bytes than this per number is still one in the kernel's layout.
_STILL_QUANTIZED = 1.5


@dataclass(frozen=True)
class Shape:
    """A batch of equal requests: `new` tokens each, behind `context` cached ones."""

    requests: int
    new: int
    context: int

    @property
    def tokens(self) -> int:
        """Of the step."""
        return self.requests * self.new

    def __str__(self) -> str:
        return f"prompt {self.new}" if self.new > 1 else f"{self.requests} x {self.context}"


@dataclass(frozen=True)
class OpRate:
    """One kind of op in one shape of step.

    Attributes:
        op, name, provider: contract, name with sizes, who computes it.
        shape: of the step; tokens: rows of the op.
        calls: in one step.
        seconds: median of a call; call_seconds: with what it takes to call it from Python.
        bytes, multiply_adds: of a call, None where nothing is known of the op.
        kind: of numbers that are multiplied, None without a ceiling for them.
        memory_share, compute_share: of the ceilings, None where there is none.
    """

    op: str
    name: str
    provider: str
    shape: str
    tokens: int
    calls: int
    seconds: float
    call_seconds: float
    bytes: float | None = None
    multiply_adds: float | None = None
    kind: str | None = None
    memory_share: float | None = None
    compute_share: float | None = None

    @property
    def bound(self) -> str | None:
        """The ceiling that it comes closer to."""
        if self.memory_share is None:
            return None
        return "memory" if self.memory_share >= (self.compute_share or 0.0) else "compute"


@dataclass(frozen=True)
class KernelReport:
    """What was measured. skipped: shapes that were left out, with the reason; steps: (shape, seconds of all ops)."""

    device: str
    ceilings: Ceilings | None
    rates: tuple[OpRate, ...]
    steps: tuple[tuple[str, float], ...]
    skipped: tuple[str, ...] = ()


def run(
    config: EngineConfig,
    tokens: Sequence[int],
    contexts: Sequence[int],
    rounds: int = 5,
    on_shape: Callable[[str, float], None] | None = None,
) -> KernelReport:
    """Measure all shapes. `on_shape` is called before each, with the share done. Raises HardpointError."""
    devices = OpenedDevices(config.device)
    try:
        device = devices.only
        ceilings = device.ceilings()
        bench = _Bench(config, device)
        shapes, skipped = bench.fitting(_shapes(tokens, contexts))
        bench.allocate(shapes)
        rates: list[OpRate] = []
        steps: list[tuple[str, float]] = []
        seen: set[tuple[Key, int]] = set()
        for place, shape in enumerate(shapes):
            if on_shape is not None:
                on_shape(str(shape), place / len(shapes))
            timings = bench.measure(shape, rounds)
            found = {key: _rate(timing, shape, rounds, ceilings) for key, timing in timings.items()}
            steps.append((str(shape), sum(rate.seconds * rate.calls for rate in found.values())))
            # What does not attend does not know the context: once per number of tokens.
            fresh = {k: r for k, r in found.items() if timings[k].call.attended or (k, shape.tokens) not in seen}
            seen.update((key, shape.tokens) for key in fresh)
            rates.extend(fresh.values())
        return KernelReport(f"{device.info}: {device.info.name}", ceilings, tuple(rates), tuple(steps), skipped)
    finally:
        devices.close()


def _shapes(tokens: Sequence[int], contexts: Sequence[int]) -> Iterator[Shape]:
    for count in sorted(set(tokens)):
        if count > DECODES:
            yield Shape(1, count, 0)
        else:
            yield from (Shape(count, 1, context) for context in sorted(set(contexts)))


class _Bench:
    """A loaded model on an open device, and a cache for the largest batch."""

    def __init__(self, config: EngineConfig, device: Device) -> None:
        checkpoint = open_checkpoint(config.model)
        self._device = device
        self._meter = Meter(device)
        self._ops = WatchedTable(device, self._meter, config.device.kernels)
        self._bound: BoundModel = bind_model(config, checkpoint, device, self._ops)
        check_choices(config, [self._ops])
        self._weights: Weights = self._bound.book.load(device)
        checkpoint.weights.close()
        self._layout: CacheLayout = cache_layout(config, self._bound, device)
        self._cache = device.state_cache()
        self._memory = config.cache.kv_cache_memory or int(device.memory().free * _CACHE_SHARE)
        self._state: State = None
        self._random = np.random.default_rng(config.model.seed)

    def fitting(self, shapes: Iterator[Shape]) -> tuple[list[Shape], tuple[str, ...]]:
        """Shapes that can run, and why the others cannot. Raises ConfigError where none can."""
        good: list[Shape] = []
        skipped: list[str] = []
        longest = self._bound.max_model_len
        for shape in shapes:
            needed = self._pages(shape) * self._cache.page_bytes(self._layout)
            if shape.context + shape.new > longest:
                skipped.append(f"{shape}: the model takes {longest} tokens")
            elif needed > self._memory:
                skipped.append(f"{shape}: its cache would take {needed >> 20} MiB of {self._memory >> 20}")
            else:
                good.append(shape)
        if not good:
            raise ConfigError(f"no batch can be measured: {'; '.join(skipped)}", hint="give a smaller --context")
        return good, tuple(skipped)

    def allocate(self, shapes: Sequence[Shape]) -> None:
        """A cache for the largest of them, full of random numbers."""
        count = max(self._pages(shape) for shape in shapes)
        self._state = self._cache.allocate(self._layout, count)
        block = [
            tuple(
                torch.from_numpy(
                    self._random.standard_normal((_PAGES, self._layout.page_tokens, heads, width), np.float32)
                ).to(self._layout.dtype)
                for _, heads, width in layer.parts
            )
            for layer in self._layout.pool
        ]
        for first in range(0, count, _PAGES):
            ids = tuple(range(first, min(first + _PAGES, count)))
            data = tuple(tuple(part[: len(ids)] for part in parts) for parts in block)
            self._state = self._cache.import_pages(self._state, ids, CanonicalPages(self._layout, ids, data))

    def measure(self, shape: Shape, rounds: int) -> dict[Key, Timing]:
        """Timings of `rounds` steps by kind of op, after one step that does not count."""
        batch = build_host_batch(self._plan(shape), self._layout.page_tokens, ANY_SIZE, 0)
        timings: dict[Key, Timing] = {}

        def attended_by(instance: OpInstance) -> Attended:
            length, window = shape.context + shape.new, instance.attrs.get("window")
            item = self._layout.dtype.itemsize
            return attended([shape.new] * shape.requests, [length] * shape.requests, window, item)

        with torch.inference_mode():
            self._step(batch)
            with self._meter.measuring(timings, attended_by):
                for _ in range(rounds):
                    self._step(batch)
        return timings

    def _step(self, batch: HostBatch) -> None:
        """One step, op by op: the model, its logits, a greedy draw, and scores of what was drawn."""
        bound, put = self._bound, self._device.to_device
        ids = put(torch.from_numpy(self._random.integers(0, bound.model.vocab_size, len(batch.positions))))
        plans = tuple(planner.plan(batch.attention) for planner in self._ops.planners)
        positions, last = put(torch.from_numpy(batch.positions)), put(torch.from_numpy(batch.logits_index))
        hidden, self._state = bound.model.forward(ids, positions, plans, self._state, self._weights)
        logits = bound.model.logits(hidden.index_select(0, last), self._weights)
        assert bound.draws is not None, "a whole model draws"
        draw = bound.draws.sample.kernel(logits, _greedy(last))
        bound.draws.score.kernel(logits, draw.token_ids, 0)

    def _pages(self, shape: Shape) -> int:
        """Page 0 among them."""
        return 1 + shape.requests * self._pages_each(shape) * len(self._layout.groups)

    def _pages_each(self, shape: Shape) -> int:
        return -(-(shape.context + shape.new) // self._layout.page_tokens)

    def _plan(self, shape: Shape) -> StepPlan:
        """Every request and group has pages of its own, none of them side by side."""
        requests, each = shape.requests, self._pages_each(shape)
        pages = 1 + self._random.permutation(self._pages(shape) - 1).astype(np.int32)
        return StepPlan(
            step=0,
            released=(),
            new=(),
            rows=np.arange(requests, dtype=np.int32),
            query_lengths=np.full(requests, shape.new, np.int32),
            computed=np.full(requests, shape.context, np.int32),
            samples=np.ones(requests, np.bool_),
            page_tables=tuple(pages.reshape(len(self._layout.groups), requests, each)),
        )


def _greedy(like: torch.Tensor) -> SamplingInputs:
    zeros, ones = torch.zeros_like(like), torch.ones_like(like, dtype=torch.float32)
    return SamplingInputs(
        temperature=zeros.float(),
        top_k=zeros,
        top_p=ones,
        min_p=zeros.float(),
        seeds=zeros,
        positions=zeros,
        all_greedy=True,
        filters=False,
    )


def _rate(timing: Timing, shape: Shape, rounds: int, ceilings: Ceilings | None) -> OpRate:
    call, seconds = timing.call, statistics.median(timing.kernel_seconds)
    cost = cost_of(call)
    kind = None if cost is None or ceilings is None else number_kind(call, cost, ceilings)
    memory = compute = None
    if cost is not None and ceilings is not None:
        memory = cost.bytes / seconds / ceilings.bytes_per_second
        if kind is not None:
            compute = cost.multiply_adds / seconds / ceilings.multiply_adds_per_second[kind]
    return OpRate(
        op=call.instance.op,
        name=short_name(call.instance),
        provider=timing.provider,
        shape=str(shape),
        tokens=call.rows,
        calls=len(timing.call_seconds) // rounds,
        seconds=seconds,
        call_seconds=statistics.median(timing.call_seconds),
        bytes=None if cost is None else cost.bytes,
        multiply_adds=None if cost is None else cost.multiply_adds,
        kind=kind,
        memory_share=memory,
        compute_share=compute,
    )


def number_kind(call: Call, cost: Cost, ceilings: Ceilings) -> str | None:
    """The ceiling that a call's products are held against; None where it has none.

    Weights that stay quantized in the kernel's layout are taken to be multiplied as int8, all others as the
    activations.
    """
    if not cost.multiply_adds:
        return None
    quantized = [math.prod(spec.shape) for spec in call.instance.weights.values() if spec.scheme is not None]
    stays = bool(quantized) and call.weight_bytes < _STILL_QUANTIZED * sum(quantized)
    kind = "int8" if stays else str(call.instance.dtype).removeprefix("torch.")
    return kind if kind in ceilings.multiply_adds_per_second else None
