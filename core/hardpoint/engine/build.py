"""The composition root: a configuration becomes an engine, owner by owner, and a description of what it became."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hardpoint.config.engine import EngineConfig
from hardpoint.engine.loop import Engine
from hardpoint.executor.inprocess import InProcessExecutor
from hardpoint.kv.pager import KVPager
from hardpoint.protocol.messages import EngineInfo
from hardpoint.request.defaults import sampling_defaults
from hardpoint.scheduler.scheduler import Scheduler
from hardpoint.scheduler.settings import SchedulerSettings, StepLimits
from hardpoint.weights.checkpoint import open_checkpoint
from hardpoint.worker.worker import BoundModel, Worker, bind_model, describe_fallback
from hardpoint_platforms.binding import Binding
from hardpoint_platforms.device import Device
from hardpoint_platforms.discovery import discover
from hardpoint_platforms.reference.providers import reference_providers
from hardpoint_platforms.selection import Selection, open_device, select

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

    `progress` is called with a phase's name and the share of it that is done. Raises HardpointError.
    """
    phases = _Phases(progress)
    with phases.phase("open device"):
        selection, device = open_configured(config)
    try:
        with phases.phase("read model files"):
            checkpoint = open_checkpoint(config.model)
        with phases.phase("bind ops"):
            bound = bind_model(config, checkpoint, device)
        worker = Worker(config, bound, device, progress)
        checkpoint.weights.close()
    except BaseException:
        device.close()
        raise
    scheduler = _scheduler(config, worker)
    engine = Engine(
        scheduler,
        InProcessExecutor(worker),
        overlap=config.scheduler.overlap,
        clock=device.clock(),
        fallback_ops=len(bound.fallbacks),
    )
    defaults = sampling_defaults(checkpoint.generation_config) if config.model.generation_config == "auto" else {}
    return BuiltEngine(engine, _describe(config, selection, worker, [*phases.rows, *worker.phases], defaults))


def open_configured(config: EngineConfig) -> tuple[Selection, Device]:
    """The device that the configuration names, opened. Raises HardpointError."""
    registry = discover()
    selection = select(config.device.device, registry)
    short = {"numerics": config.device.numerics, "threads": config.device.threads}
    options = {**config.device.options, **{name: value for name, value in short.items() if value is not None}}
    return selection, open_device(selection, options)


def explain_model(config: EngineConfig) -> tuple[Binding, ...]:
    """Every op instance of the model on the device, with what was chosen and what was refused. Loads no weights."""
    _, device = open_configured(config)
    try:
        bindings = bind_model(config, open_checkpoint(config.model), device).ops.bindings
        programs = device.programs()
        providers = (*device.providers(), *reference_providers(device.torch_device))
        outside = {provider.name for provider in providers if not programs.holds(provider)}
        return tuple(dataclasses.replace(binding, splits=binding.provider in outside) for binding in bindings)
    finally:
        device.close()


def _scheduler(config: EngineConfig, worker: Worker) -> Scheduler:
    pager = KVPager(
        worker.pages.num_pages,
        worker.layout.page_tokens,
        tuple(group.window for group in worker.layout.groups),
        config.cache.prefix_caching,
    )
    settings = SchedulerSettings(
        max_batch_tokens=worker.max_batch_tokens,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=worker.bound.max_model_len,
        max_waiting=config.scheduler.max_waiting,
        chunked_prefill=config.scheduler.chunked_prefill,
        policy=config.scheduler.policy,
        limits=StepLimits(**dataclasses.asdict(worker.device.capabilities().limits)),
    )
    return Scheduler(settings, pager)


def _tuning(worker: Worker) -> list[tuple[str, str, str]]:
    """What the device chose, and how steps run on it."""
    rows = [(choice.name, choice.value, choice.reason) for choice in worker.device.capabilities().tuning]
    said = worker.runner.describe()
    return [*rows, ("steps", said, "seen while warming up")] if said else rows


def _describe(
    config: EngineConfig,
    selection: Selection,
    worker: Worker,
    phases: list[tuple[str, float]],
    defaults: dict[str, float],
) -> EngineInfo:
    bound: BoundModel = worker.bound
    providers = Counter(binding.provider for binding in bound.ops.bindings if binding.provider != "(decomposed)")
    return EngineInfo(
        device=str(worker.device.info),
        device_name=worker.device.info.name,
        device_reason=selection.reason,
        tuning=_tuning(worker),
        dtype=str(bound.dtype).removeprefix("torch."),
        kv_dtype=str(worker.layout.dtype).removeprefix("torch."),
        weight_bytes=worker.weight_bytes,
        kv_bytes=worker.pages.kv_bytes,
        num_pages=worker.pages.usable_pages,
        page_tokens=worker.layout.page_tokens,
        max_model_len=bound.max_model_len,
        max_concurrency=worker.pages.max_concurrency,
        vocab_size=bound.model.vocab_size,
        ops=sorted(providers.items(), key=lambda item: -item[1]),
        fallbacks=[describe_fallback(binding) for binding in bound.fallbacks],
        phases=phases,
        default_sampling=defaults,
        policy=config.scheduler.policy,
        prefix_caching=config.cache.prefix_caching,
    )
