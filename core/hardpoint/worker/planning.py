"""A model on devices that are not here: what its weights, its cache and its programs would take there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hardpoint.config.engine import EngineConfig
from hardpoint.errors import ConfigError
from hardpoint.kv.sizing import PagePlan
from hardpoint.weights.source import Checkpoint
from hardpoint.worker.model_runner import ModelRunner, RunnerParts
from hardpoint.worker.stage import StageParts
from hardpoint.worker.step import make_step
from hardpoint.worker.worker import (
    BoundModel,
    PlacedModel,
    batch_tokens,
    bind_model,
    cache_layout,
    load_weights,
    plan_device,
)
from hardpoint_platforms.device import Device
from hardpoint_platforms.program import Bucket, Footprint, Weights
from hardpoint_platforms.state_cache import CacheLayout


@dataclass(frozen=True)
class PlannedModel:
    """What a model takes on each of the devices of a target.

    Attributes:
        memory: bytes of one device; weights: of its part of them.
        pages: the plan of the cache there.
        dtype, kv_dtype: names.
        max_model_len, max_batch_tokens: as they would be served.
        providers: which op by which providers, as (op, provider) pairs without repetition.
        programs: those that were compiled.
    """

    memory: int
    weights: int
    pages: PagePlan
    dtype: str
    kv_dtype: str
    max_model_len: int
    max_batch_tokens: int
    providers: tuple[tuple[str, str], ...]
    programs: tuple[tuple[Bucket, Footprint], ...]


class Planner:
    """Binds a model on a target, gives its weights and its state shapes, and compiles what it is asked for."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, device: Device) -> None:
        """Raises ConfigError where model, cache and devices do not go together."""
        self._config, self._device = config, device
        self._bound = bind_model(config, checkpoint, device)
        part = PlacedModel(self._bound, device)
        self._weights: Weights = load_weights(part, (0.0, 1.0), None)
        self._layout = cache_layout(config, self._bound, device)
        memory = device.memory()
        if memory.free <= 0:
            raise ConfigError(
                f"the weights alone do not fit: {device.info} has {memory.total / 1e9:.1f} GB",
                hint="cut the model over more devices: --tensor-parallel-size",
            )
        self._pages = plan_device(config, part, self._layout, config.cache.num_kv_pages)

    def plan(self, buckets: Callable[[Sequence[Bucket]], Sequence[Bucket]] | None) -> PlannedModel:
        """The plan; `buckets` chooses which programs are compiled for it, None for none."""
        bound, budget = self._bound, batch_tokens(self._config, self._device, self._bound.max_model_len)
        programs: list[tuple[Bucket, Footprint]] = []
        if buckets is not None:
            runner = _runner(self._config, bound, self._device, self._layout, self._pages, self._weights, budget)
            for bucket, footprint in runner.footprints(len(self._layout.groups), buckets):
                if footprint is None:
                    raise ConfigError(f"{self._device.info} cannot say what its programs take")
                programs.append((bucket, footprint))
        chosen = dict.fromkeys((binding.instance.op, binding.provider) for binding in bound.ops.bindings)
        return PlannedModel(
            memory=self._device.memory().total,
            weights=bound.book.weight_bytes(self._weights) // self._device.mesh.ranks,
            pages=self._pages,
            dtype=str(bound.dtype).removeprefix("torch."),
            kv_dtype=str(self._layout.dtype).removeprefix("torch."),
            max_model_len=bound.max_model_len,
            max_batch_tokens=budget,
            providers=tuple(chosen),
            programs=tuple(programs),
        )


def _runner(
    config: EngineConfig,
    bound: BoundModel,
    device: Device,
    layout: CacheLayout,
    pages: PagePlan,
    weights: Weights,
    max_batch_tokens: int,
) -> ModelRunner:
    draws = bound.draws
    assert draws is not None, "a whole model draws"
    stage = StageParts(
        device=device,
        planners=bound.ops.planners,
        model=bound.model,
        dtype=bound.dtype,
        weights=weights,
        layout=layout,
        state=device.state_cache().allocate(layout, pages.num_pages),
        step=make_step(bound.model, draws.sample.kernel),
    )
    return ModelRunner(
        RunnerParts((stage,), draws.score.kernel, config.scheduler.max_num_seqs, bound.max_model_len, max_batch_tokens)
    )
