"""One rank: builds and loads the model on its devices, sizes the cache, and holds the runner."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from hardpoint.config.engine import EngineConfig
from hardpoint.errors import ConfigError
from hardpoint.kv.sizing import PagePlan, plan_pages
from hardpoint.layers.shard import Shard
from hardpoint.models.base import CausalModel, ParameterBook
from hardpoint.models.registry import build_model
from hardpoint.weights.source import Checkpoint
from hardpoint.worker.dtypes import choose_dtype, named_dtype
from hardpoint.worker.model_runner import ModelRunner, RunnerParts
from hardpoint.worker.stage import StageParts
from hardpoint.worker.step import make_inner_step, make_step
from hardpoint_platforms.binding import Binding, BoundOp, OpTable
from hardpoint_platforms.capabilities import Capabilities
from hardpoint_platforms.device import Device
from hardpoint_platforms.errors import UnsupportedOperation
from hardpoint_platforms.ops.table import op_table
from hardpoint_platforms.program import Weights
from hardpoint_platforms.selection import close_device
from hardpoint_platforms.state_cache import CacheLayout, State
from hardpoint_platforms.trial import CheckedTable, Trial, is_worthwhile, try_out

#: Where device and host share memory, the KV cache takes no more than this unless one sequence needs it.
_SHARED_MEMORY_SHARE = 4 * 2**30

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class BoundDraws:
    """What the end of a model needs beyond its layers: the bound `sample` and `logprobs` ops."""

    sample: BoundOp
    score: BoundOp


@dataclass(frozen=True)
class BoundModel:
    """A model, or a part of one, whose every op has a provider, before any weight is read.

    `draws` is None for a part that is not the last; `again` builds the same on another table, or for another rank.
    """

    model: CausalModel
    book: ParameterBook
    ops: OpTable
    draws: BoundDraws | None
    dtype: torch.dtype
    max_model_len: int
    again: Callable[[OpTable | None, int], BoundModel]

    @property
    def fallbacks(self) -> tuple[Binding, ...]:
        """Ops that the device left to the reference, though it has providers of its own."""
        return tuple(b for b in self.ops.bindings if b.fallback and self.ops.has_own_providers)


@dataclass(frozen=True)
class PlacedModel:
    """A bound model, or a part of one, and the opened device that runs it."""

    bound: BoundModel
    device: Device


def bind_model(
    config: EngineConfig,
    checkpoint: Checkpoint,
    device: Device,
    ops: OpTable | None = None,
    layers: range | None = None,
    last: bool = True,
    rank: int = 0,
) -> BoundModel:
    """Build the model, or the part that `layers` names, on the device's op table or on a fresh one that is given.

    Reads no weights. `rank`: of those that the device runs, all with the same ops, but weights of their own. `last`:
    whether the part ends the model. Raises ModelError, ConfigError, UnsupportedOperation.
    """
    dtype = choose_dtype(config.model.dtype, checkpoint.config, device.capabilities())
    ops = op_table(device, config.device.kernels) if ops is None else ops
    shard = Shard.on(device, rank, config.device.expert_parallel)
    model, book = build_model(checkpoint, ops, dtype, config.model.max_model_len, layers, shard)
    draws = None
    if last:
        sample = ops.bind(ops.contract("sample").instance("sampler", torch.float32))
        draws = BoundDraws(sample, ops.bind(ops.contract("logprobs").instance("prompt scores", torch.float32)))

    def again(table: OpTable | None, rank: int = 0) -> BoundModel:
        return bind_model(config, checkpoint, device, table, layers, last, rank)

    bound = BoundModel(model, book, ops, draws, dtype, model.max_context, again)
    if bound.fallbacks and config.device.on_fallback == "error":
        lines = "; ".join(describe_fallback(binding) for binding in bound.fallbacks)
        raise UnsupportedOperation(
            f"{device.info} leaves {len(bound.fallbacks)} ops to the reference: {lines}",
            hint="use --on-fallback warn to serve all the same",
        )
    return bound


def check_choices(config: EngineConfig, tables: Sequence[OpTable]) -> None:
    """Raise ConfigError for a choice of kernels that is about no op of the model, which these tables have bound."""
    for choice in config.device.kernels:
        if not any(choice in table.followed for table in tables):
            told = f"--kernel {choice}: the model has no such op"
            raise ConfigError(told, hint="`hardpoint explain MODEL --all` lists ops and places")


def describe_fallback(binding: Binding) -> str:
    """One line: op, place, and why the device's own providers refused."""
    reasons = "; ".join(f"{refusal.provider}: {refusal.reason}" for refusal in binding.refused)
    return f"{binding.instance.op} at {binding.instance.where} ({reasons or 'the device has none'})"


class Worker:
    """Owns the opened devices of one rank, with a loaded model and its paged state: one device, unless the model is cut
    over several."""

    def __init__(self, config: EngineConfig, placed: Sequence[PlacedModel], progress: Progress | None = None) -> None:
        self.placed = tuple(placed)
        self.phases: list[tuple[str, float]] = []
        started = time.perf_counter()
        weights = [load_weights(part, share, progress) for part, share in zip(placed, _shares(placed), strict=True)]
        self.phases.append(("load weights", time.perf_counter() - started))

        started = time.perf_counter()
        self.weight_bytes = sum(p.bound.book.weight_bytes(w) for p, w in zip(placed, weights, strict=True))
        self.layouts = tuple(cache_layout(config, part.bound, part.device) for part in placed)
        self.pages = _plan_pages(config, self.placed, self.layouts)
        self.max_model_len = placed[0].bound.max_model_len
        self.max_batch_tokens = min(batch_tokens(config, part.device, self.max_model_len) for part in placed)
        self.runner = self._runner(config, weights, progress)
        self.runner.warm_up(len(self.layouts[0].groups))
        self.phases.append(("cache and warm-up", time.perf_counter() - started))

    def close(self) -> None:
        """Give the devices back."""
        for part in self.placed:
            close_device(part.device)

    def _runner(self, config: EngineConfig, weights: Sequence[Weights], progress: Progress | None) -> ModelRunner:
        draws = self.placed[-1].bound.draws
        assert draws is not None, "the last part of a model draws"
        stages = tuple(
            StageParts(
                device=part.device,
                planners=part.bound.ops.planners,
                model=part.bound.model,
                dtype=part.bound.dtype,
                weights=loaded,
                layout=layout,
                state=self._tried(config, part, layout, loaded, progress),
                step=make_step(part.bound.model, draws.sample.kernel)
                if part is self.placed[-1]
                else make_inner_step(part.bound.model),
            )
            for part, layout, loaded in zip(self.placed, self.layouts, weights, strict=True)
        )
        return ModelRunner(
            RunnerParts(
                stages=stages,
                score=draws.score.kernel,
                max_num_seqs=config.scheduler.max_num_seqs,
                max_model_len=self.max_model_len,
                max_batch_tokens=self.max_batch_tokens,
                progress=progress,
            )
        )

    def _tried(
        self,
        config: EngineConfig,
        part: PlacedModel,
        layout: CacheLayout,
        weights: Weights,
        progress: Progress | None,
    ) -> State:
        """A new state, after a trial of the part's kernels on page 0: raises PluginError for results that no contract
        allows. The trial's model is another one, so that the kernels which serve stay as they are."""
        state = part.device.state_cache().allocate(layout, self.pages.num_pages)
        if not is_worthwhile(part.device, part.bound.ops):
            return state
        before = (lambda: progress("trial of the ops", 0.0)) if progress else None
        bound = part.bound.again(CheckedTable(part.bound.ops, part.device, before), 0)
        model = bound.model
        trial = Trial(
            step=make_inner_step(model) if bound.draws is None else make_step(model, bound.draws.sample.kernel),
            planners=part.bound.ops.planners,
            weights=weights,
            layout=layout,
            table_width=-(-self.max_model_len // layout.page_tokens),
            carried=model.takes,
            hidden=model.hidden_size,
            dtype=bound.dtype,
            draws=bound.draws is not None,
            max_tokens=self.max_batch_tokens,
            max_requests=config.scheduler.max_num_seqs,
        )
        return try_out(part.device, trial, state)


def _shares(placed: Sequence[PlacedModel]) -> list[tuple[float, float]]:
    """Of the progress of loading: where each part begins, and how much it is."""
    return [(index / len(placed), 1 / len(placed)) for index in range(len(placed))]


def load_weights(part: PlacedModel, share: tuple[float, float], progress: Progress | None) -> Weights:
    """The weights of every rank that the part's device runs. `share`: of the progress, where it begins and its size."""
    first, size = share
    ranks = part.device.mesh.ranks

    def loader(rank: int) -> Callable[[Device], Weights]:
        book = part.bound.book if rank == 0 else part.bound.again(None, rank).book
        before = first + size * rank / ranks
        told = None if progress is None else (lambda done: progress("weights", before + done * size / ranks))
        return lambda device: book.load(device, told)

    return part.device.load_ranks([loader(rank) for rank in range(ranks)])


def cache_layout(config: EngineConfig, bound: BoundModel, device: Device) -> CacheLayout:
    """What the cache keeps, page size and dtype resolved. Raises ConfigError for what the device does not read."""
    capabilities = device.capabilities()
    page_tokens = config.cache.page_tokens
    if page_tokens not in capabilities.page_tokens:
        offered = ", ".join(str(size) for size in capabilities.page_tokens)
        raise ConfigError(f"--page-tokens {page_tokens}: {device.info} reads pages of {offered} tokens")
    if config.cache.kv_dtype == "auto":
        dtype = _auto_kv_dtype(bound.dtype, capabilities)
    else:
        dtype = named_dtype(config.cache.kv_dtype, "--kv-dtype")
        if dtype not in capabilities.kv_dtypes:
            names = ", ".join(str(offered).removeprefix("torch.") for offered in capabilities.kv_dtypes)
            raise ConfigError(f"--kv-dtype {config.cache.kv_dtype}: {device.info} caches in {names}")
    return CacheLayout(bound.model.cache_groups, bound.model.pool, page_tokens, dtype)


def _auto_kv_dtype(compute: torch.dtype, capabilities: Capabilities) -> torch.dtype:
    """The device's first choice, but nothing wider than the model computes in."""
    offered = capabilities.kv_dtypes
    if compute in offered and (capabilities.kv_as_computed or offered[0].itemsize > compute.itemsize):
        return compute
    return offered[0]


def _plan_pages(config: EngineConfig, placed: Sequence[PlacedModel], layouts: Sequence[CacheLayout]) -> PagePlan:
    """Page ids are the same on every device: the smallest pool decides."""
    plans = [
        plan_device(config, part, layout, config.cache.num_kv_pages)
        for part, layout in zip(placed, layouts, strict=True)
    ]
    if len(plans) == 1:
        return plans[0]
    least = min(plan.usable_pages for plan in plans)
    plans = [plan_device(config, part, layout, least) for part, layout in zip(placed, layouts, strict=True)]
    return replace(plans[0], kv_bytes=sum(plan.kv_bytes for plan in plans))


def plan_device(config: EngineConfig, part: PlacedModel, layout: CacheLayout, num_pages: int | None) -> PagePlan:
    """Pages for one device: `num_pages`, or what its free memory holds. Raises ConfigError."""
    memory, device = config.cache.kv_cache_memory, part.device
    if memory is None:
        memory = int(device.memory().free * config.cache.memory_fraction)
        if device.capabilities().unified_memory:
            whole = -(-part.bound.max_model_len // layout.page_tokens) * len(layout.groups) * layout.page_bytes
            memory = min(memory, max(_SHARED_MEMORY_SHARE, whole))
    return plan_pages(
        page_bytes=device.state_cache().page_bytes(layout),
        page_tokens=layout.page_tokens,
        windows=tuple(group.window for group in layout.groups),
        max_model_len=part.bound.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        memory=memory,
        num_pages=num_pages,
        chunk=1 if config.scheduler.chunked_prefill else None,
    )


def batch_tokens(config: EngineConfig, device: Device, max_model_len: int) -> int:
    """Most tokens of a step: what was asked for, else the device's own choice, within its limits."""
    capabilities = device.capabilities()
    wanted = config.scheduler.max_batch_tokens
    if wanted is None:
        wanted = capabilities.step_tokens
        if not config.scheduler.chunked_prefill:
            wanted = max(wanted, max_model_len)
    return min(wanted, capabilities.limits.max_tokens or wanted)
