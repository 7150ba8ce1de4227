"""The composition root: a configuration becomes an engine, owner by owner, and a description of what it became."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from hardpoint.config.engine import EngineConfig
from hardpoint.engine.devices import OpenedDevices, PlacedLayers, common_limits
from hardpoint.engine.loop import Engine
from hardpoint.engine.watch import Startup
from hardpoint.executor.inprocess import InProcessExecutor
from hardpoint.kv.pager import KVPager
from hardpoint.models.registry import model_layers
from hardpoint.protocol.messages import EngineInfo
from hardpoint.request.defaults import sampling_defaults
from hardpoint.scheduler.scheduler import Scheduler
from hardpoint.scheduler.settings import SchedulerSettings
from hardpoint.weights.checkpoint import open_checkpoint
from hardpoint.weights.source import Checkpoint
from hardpoint.worker.worker import PlacedModel, Worker, bind_model, check_choices, describe_fallback
from hardpoint_platforms.binding import DECOMPOSED, Binding
from hardpoint_platforms.guarding import named, naming
from hardpoint_platforms.program import BIAS_ENTRIES, TOP_LOGPROBS

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class BuiltEngine:
    """An engine that is ready to serve, and what it turned out to be."""

    engine: Engine
    info: EngineInfo


class _Phases:
    """Seconds per phase of start-up."""

    def __init__(self, progress: Progress | None) -> None:
        self.rows: list[tuple[str, float]] = []
        self._progress = progress

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        if self._progress is not None:
            self._progress(name, 0.0)
        yield
        self.rows.append((name, time.perf_counter() - started))


def build_engine(config: EngineConfig, progress: Progress | None = None) -> BuiltEngine:
    """Open the device, load the model, plan the cache.

    `progress` is called with a phase's name and the share of it that is done. A `Startup` learns the op tables, too.
    Raises HardpointError.
    """
    phases = _Phases(progress)
    with phases.phase("open device"):
        devices = OpenedDevices(config.device)
    with devices:
        with phases.phase("read model files"):
            checkpoint = open_checkpoint(config.model)
        with phases.phase("bind ops"):
            parts = devices.place(model_layers(checkpoint.config))
            placed = _bind(config, checkpoint, parts)
        tables = [(part.device, part.bound.ops) for part in placed]
        if isinstance(progress, Startup):
            progress.parts = tables
        with naming(tables):
            worker = Worker(config, placed, progress)
        checkpoint.weights.close()
    engine = Engine(
        _scheduler(config, worker),
        InProcessExecutor(worker),
        overlap=config.scheduler.overlap,
        clock=placed[-1].device.clock(),
        fallback_ops=sum(len(part.bound.fallbacks) for part in placed),
        named=partial(named, parts=tables),
    )
    defaults = sampling_defaults(checkpoint.generation_config) if config.model.generation_config == "auto" else {}
    return BuiltEngine(engine, _describe(config, parts, worker, [*phases.rows, *worker.phases], defaults))


def explain_model(config: EngineConfig) -> tuple[tuple[str, tuple[Binding, ...]], ...]:
    """Every op instance of the model, with what was chosen and what was refused, per device. Loads no weights."""
    devices = OpenedDevices(config.device)
    try:
        checkpoint = open_checkpoint(config.model)
        parts = devices.place(model_layers(checkpoint.config))
        placed = _bind(config, checkpoint, parts)
        return tuple((_described(where), tuple(_with_held(part))) for where, part in zip(parts, placed, strict=True))
    finally:
        devices.close()


def _with_held(part: PlacedModel) -> Iterator[Binding]:
    """Whether programs hold an op is asked of the provider that was bound: others of its name may be of other ops."""
    programs, ops = part.device.programs(), part.bound.ops
    for binding, bound in zip(ops.bindings, ops.claims, strict=True):
        yield dataclasses.replace(binding, held=bound is None or programs.holds(bound.provider))


def _bind(config: EngineConfig, checkpoint: Checkpoint, parts: Sequence[PlacedLayers]) -> tuple[PlacedModel, ...]:
    """Raises ConfigError also for a choice of kernels that is about no op of the model."""
    placed = tuple(
        PlacedModel(
            bind_model(config, checkpoint, part.opened.device, layers=part.layers, last=part.last), part.opened.device
        )
        for part in parts
    )
    check_choices(config, [part.bound.ops for part in placed])
    return placed


def _scheduler(config: EngineConfig, worker: Worker) -> Scheduler:
    pager = KVPager(
        worker.pages.num_pages,
        worker.layouts[0].page_tokens,
        tuple(group.window for group in worker.layouts[0].groups),
        config.cache.prefix_caching,
    )
    settings = SchedulerSettings(
        max_batch_tokens=worker.max_batch_tokens,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=worker.max_model_len,
        max_waiting=config.scheduler.max_waiting,
        chunked_prefill=config.scheduler.chunked_prefill,
        policy=config.scheduler.policy,
        limits=common_limits(part.device.capabilities().limits for part in worker.placed),
    )
    return Scheduler(settings, pager)


def _tuning(worker: Worker) -> list[tuple[str, str, str]]:
    """What the devices chose, and how steps run on them."""
    devices = dict.fromkeys(part.device for part in worker.placed)
    rows = [
        (f"{device.info} {choice.name}" if len(devices) > 1 else choice.name, choice.value, choice.reason)
        for device in devices
        for choice in device.capabilities().tuning
    ]
    said = worker.runner.describe()
    return [*rows, ("steps", said, "seen while warming up")] if said else rows


def _described(part: PlacedLayers) -> str:
    """Its device, and the layers where it has not all of them: "cpu:0 (layers 0-14)"."""
    device = str(part.opened.device.info)
    return device if part.layers is None else f"{device} (layers {part.layers.start}-{part.layers.stop - 1})"


def _describe(
    config: EngineConfig,
    parts: Sequence[PlacedLayers],
    worker: Worker,
    phases: list[tuple[str, float]],
    defaults: dict[str, float],
) -> EngineInfo:
    bindings = [binding for part in worker.placed for binding in part.bound.ops.bindings]
    providers = Counter(binding.provider for binding in bindings if binding.provider != DECOMPOSED)
    last, layout = worker.placed[-1], worker.layouts[-1]
    return EngineInfo(
        device=" + ".join(map(_described, parts)),
        device_name=" + ".join(dict.fromkeys(part.device.info.name for part in worker.placed)),
        device_reason=parts[0].opened.selection.reason,
        tuning=_tuning(worker),
        dtype=str(last.bound.dtype).removeprefix("torch."),
        kv_dtype=str(layout.dtype).removeprefix("torch."),
        weight_bytes=worker.weight_bytes,
        kv_bytes=worker.pages.kv_bytes,
        num_pages=worker.pages.usable_pages,
        page_tokens=layout.page_tokens,
        max_model_len=worker.max_model_len,
        max_concurrency=worker.pages.max_concurrency,
        vocab_size=last.bound.model.vocab_size,
        ops=sorted(providers.items(), key=lambda item: -item[1]),
        fallbacks=[describe_fallback(binding) for part in worker.placed for binding in part.bound.fallbacks],
        phases=phases,
        default_sampling=defaults,
        policy=config.scheduler.policy,
        prefix_caching=config.cache.prefix_caching,
        max_logprobs=TOP_LOGPROBS if worker.runner.fixed_shapes else None,
        max_biased_tokens=BIAS_ENTRIES if worker.runner.fixed_shapes else None,
    )
