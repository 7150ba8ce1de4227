"""One rank: opens the device, builds and loads the model, sizes the cache, and holds the runner."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from hardpoint.config.engine import EngineConfig
from hardpoint.errors import ConfigError
from hardpoint.kv.sizing import PagePlan, plan_pages
from hardpoint.models.base import CausalModel, ParameterBook
from hardpoint.models.registry import build_model
from hardpoint.request.sampling import SamplingParams
from hardpoint.scheduler.plan import NewSequence, StepPlan
from hardpoint.weights.source import Checkpoint
from hardpoint.worker.dtypes import choose_dtype, named_dtype
from hardpoint.worker.model_runner import ModelRunner, RunnerParts
from hardpoint.worker.step import make_step
from hardpoint_platforms.binding import Binding, BoundOp, OpTable
from hardpoint_platforms.device import Device
from hardpoint_platforms.errors import UnsupportedOperation
from hardpoint_platforms.ops.table import op_table
from hardpoint_platforms.state_cache import CacheLayout

#: Where device and host share memory, the KV cache takes no more than this unless one sequence needs it.
_SHARED_MEMORY_SHARE = 4 * 2**30

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class BoundModel:
    """A model whose every op has a provider, before any weight is read."""

    model: CausalModel
    book: ParameterBook
    ops: OpTable
    sample: BoundOp
    score: BoundOp
    dtype: torch.dtype
    max_model_len: int

    @property
    def fallbacks(self) -> tuple[Binding, ...]:
        """Ops that the device left to the reference, though it has providers of its own."""
        return tuple(b for b in self.ops.bindings if b.fallback and self.ops.has_own_providers)


def bind_model(config: EngineConfig, checkpoint: Checkpoint, device: Device, ops: OpTable | None = None) -> BoundModel:
    """Build the model on the device's op table, or on a fresh one that is given. Reads no weights.

    Raises ModelError, ConfigError, UnsupportedOperation.
    """
    dtype = choose_dtype(config.model.dtype, checkpoint.config, device.capabilities())
    ops = op_table(device) if ops is None else ops
    model, book = build_model(checkpoint, ops, dtype, config.model.max_model_len)
    sample = ops.bind(ops.contract("sample").instance("sampler", torch.float32))
    score = ops.bind(ops.contract("logprobs").instance("prompt scores", torch.float32))
    bound = BoundModel(model, book, ops, sample, score, dtype, model.max_context)
    if bound.fallbacks and config.device.on_fallback == "error":
        lines = "; ".join(describe_fallback(binding) for binding in bound.fallbacks)
        raise UnsupportedOperation(
            f"{device.info} leaves {len(bound.fallbacks)} ops to the reference: {lines}",
            hint="use --on-fallback warn to serve all the same",
        )
    return bound


def describe_fallback(binding: Binding) -> str:
    """One line: op, place, and why the device's own providers refused."""
    reasons = "; ".join(f"{refusal.provider}: {refusal.reason}" for refusal in binding.refused)
    return f"{binding.instance.op} at {binding.instance.where} ({reasons or 'the device has none'})"


class Worker:
    """Owns one opened device with a loaded model and its paged state."""

    def __init__(
        self, config: EngineConfig, bound: BoundModel, device: Device, progress: Progress | None = None
    ) -> None:
        self.device = device
        self.bound = bound
        self.phases: list[tuple[str, float]] = []
        started = time.perf_counter()
        weights = bound.book.load(device, (lambda done: progress("weights", done)) if progress else None)
        self.phases.append(("load weights", time.perf_counter() - started))

        started = time.perf_counter()
        self.weight_bytes = bound.book.weight_bytes(weights)
        self.layout = cache_layout(config, bound, device)
        self.pages = _plan_pages(config, bound, device, self.layout)
        self.max_batch_tokens = _batch_tokens(config, device, bound.max_model_len)
        state = device.state_cache().allocate(self.layout, self.pages.num_pages)
        self.runner = ModelRunner(
            RunnerParts(
                device=device,
                ops=bound.ops,
                model=bound.model,
                weights=weights,
                layout=self.layout,
                state=state,
                step=make_step(bound.model, bound.sample.kernel),
                score=bound.score.kernel,
                max_num_seqs=config.scheduler.max_num_seqs,
                max_model_len=bound.max_model_len,
                max_batch_tokens=self.max_batch_tokens,
            )
        )
        self._warm_up()
        self.phases.append(("cache and warm-up", time.perf_counter() - started))

    def close(self) -> None:
        """Give the device back."""
        self.device.close()

    def _warm_up(self) -> None:
        """One prefill and one decode into page 0, so that a kernel that cannot run fails now."""
        length = min(8, self.bound.max_model_len - 1)
        width = length // self.layout.page_tokens + 1
        tables = tuple(np.zeros((1, width), np.int32) for _ in self.layout.groups)
        row = np.zeros(1, np.int32)
        sequence = NewSequence(0, "warm-up", np.zeros(length, np.int32), length, SamplingParams(temperature=0.0))
        for step, (new, query, computed, released) in enumerate(
            (((sequence,), length, 0, ()), ((), 1, length, ())), start=-2
        ):
            plan = StepPlan(
                step=step,
                released=released,
                new=new,
                rows=row,
                query_lengths=np.array([query], np.int32),
                computed=np.array([computed], np.int32),
                samples=np.ones(1, np.bool_),
                page_tables=tables,
            )
            self.runner.execute(plan)
        self.runner.forget(0)


def cache_layout(config: EngineConfig, bound: BoundModel, device: Device) -> CacheLayout:
    """What the cache keeps, page size and dtype resolved. Raises ConfigError for what the device does not read."""
    capabilities = device.capabilities()
    page_tokens = config.cache.page_tokens
    if page_tokens not in capabilities.page_tokens:
        offered = ", ".join(str(size) for size in capabilities.page_tokens)
        raise ConfigError(f"--page-tokens {page_tokens}: {device.info} reads pages of {offered} tokens")
    if config.cache.kv_dtype == "auto":
        dtype = _auto_kv_dtype(bound.dtype, capabilities.kv_dtypes)
    else:
        dtype = named_dtype(config.cache.kv_dtype, "--kv-dtype")
        if dtype not in capabilities.kv_dtypes:
            names = ", ".join(str(offered).removeprefix("torch.") for offered in capabilities.kv_dtypes)
            raise ConfigError(f"--kv-dtype {config.cache.kv_dtype}: {device.info} caches in {names}")
    return CacheLayout(bound.model.cache_groups, bound.model.pool, page_tokens, dtype)


def _auto_kv_dtype(compute: torch.dtype, offered: tuple[torch.dtype, ...]) -> torch.dtype:
    """The device's first choice, but nothing wider than the model computes in."""
    if offered[0].itemsize > compute.itemsize and compute in offered:
        return compute
    return offered[0]


def _plan_pages(config: EngineConfig, bound: BoundModel, device: Device, layout: CacheLayout) -> PagePlan:
    memory = config.cache.kv_cache_memory
    if memory is None:
        memory = int(device.memory().free * config.cache.memory_fraction)
        if device.capabilities().unified_memory:
            whole = -(-bound.max_model_len // layout.page_tokens) * len(layout.groups) * layout.page_bytes
            memory = min(memory, max(_SHARED_MEMORY_SHARE, whole))
    return plan_pages(
        page_bytes=device.state_cache().page_bytes(layout),
        page_tokens=layout.page_tokens,
        windows=tuple(group.window for group in layout.groups),
        max_model_len=bound.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        memory=memory,
        num_pages=config.cache.num_kv_pages,
        chunk=1 if config.scheduler.chunked_prefill else None,
    )


def _batch_tokens(config: EngineConfig, device: Device, max_model_len: int) -> int:
    capabilities = device.capabilities()
    wanted = config.scheduler.max_batch_tokens
    if wanted is None:
        wanted = capabilities.step_tokens
        if not config.scheduler.chunked_prefill:
            wanted = max(wanted, max_model_len)
    return min(wanted, capabilities.limits.max_tokens or wanted)
