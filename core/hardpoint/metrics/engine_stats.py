"""The engine's own gauges and counters, read when `/metrics` is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from hardpoint.metrics.registry import ENGINE, LABELS
from hardpoint.protocol.messages import STEP_SIZE_BOUNDS, EngineInfo, EngineStats

_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("vllm:num_requests_running", "Sequences in the running batch.", lambda s: s.running),
    ("vllm:num_requests_waiting", "Sequences waiting for a place.", lambda s: s.waiting),
    (
        "vllm:kv_cache_usage_perc",
        "Share of the KV cache in use, 0 to 1.",
        lambda s: _share(s.pages_used, s.pages_total),
    ),
    ("hardpoint:kv_pages_total", "Pages of the KV cache.", lambda s: s.pages_total),
    ("hardpoint:kv_pages_used", "Pages held by running requests.", lambda s: s.pages_used),
    ("hardpoint:kv_pages_cached", "Free pages that keep a reusable prefix.", lambda s: s.pages_cached),
    ("hardpoint:fallback_ops", "Op instances that run on the reference.", lambda s: s.fallback_ops),
)

_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("vllm:num_preemptions", "Sequences put back into the queue for want of pages.", lambda s: s.preemptions),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda s: s.prefix_queries),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda s: s.prefix_hits),
    ("hardpoint:engine_prompt_tokens", "Prompt tokens computed, recomputation included.", lambda s: s.prompt_tokens),
    ("hardpoint:engine_generated_tokens", "Tokens drawn by the engine.", lambda s: s.generated_tokens),
    ("hardpoint:engine_steps", "Steps run.", lambda s: s.steps),
    ("hardpoint:engine_step_seconds", "Seconds on the device.", lambda s: s.step_seconds),
    ("hardpoint:engine_schedule_seconds", "Seconds in scheduler and pager.", lambda s: s.schedule_seconds),
)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


class EngineCollector(Collector):
    """Turns the latest EngineStats into samples. Holds no counts of its own."""

    def __init__(
        self, model_name: str, stats: Callable[[], EngineStats], info: Callable[[], EngineInfo | None]
    ) -> None:
        self._labels = (model_name, ENGINE)
        self._stats = stats
        self._info = info

    def describe(self) -> Iterator[Metric]:
        """Nothing: the registry must not ask the engine at registration."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """One family per gauge and counter, and the cache's layout as labels."""
        stats = self._stats()
        for name, text, read in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.add_metric(self._labels, read(stats))
            yield gauge
        for name, text, read in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.add_metric(self._labels, read(stats))
            yield counter
        yield self._step_sizes(stats)
        info = self._info()
        if info is not None:
            cache = _cache_labels(info)
            layout = GaugeMetricFamily("vllm:cache_config_info", "The KV cache's layout.", labels=(*LABELS, *cache))
            layout.add_metric((*self._labels, *cache.values()), 1.0)
            yield layout

    def _step_sizes(self, stats: EngineStats) -> Metric:
        """Tokens per step: the engine counts steps per class, the format wants the counts up to each bound."""
        counts = stats.step_sizes or (0,) * (len(STEP_SIZE_BOUNDS) + 1)
        bounds = [*(str(float(bound)) for bound in STEP_SIZE_BOUNDS), "+Inf"]
        family = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens computed per step.", labels=LABELS)
        family.add_metric(self._labels, list(zip(bounds, accumulate(counts), strict=True)), stats.step_tokens)
        return family


def _cache_labels(info: EngineInfo) -> dict[str, str]:
    """Labels of the cache's layout under vLLM's names, with its spelling of truth values; and our own."""
    return {
        "block_size": str(info.page_tokens),
        "num_gpu_blocks": str(info.num_pages),
        "num_blocks": str(info.num_pages),
        "num_cpu_blocks": "0",
        "cache_dtype": info.kv_dtype,
        "enable_prefix_caching": str(info.prefix_caching),
        "device": info.device,
    }
