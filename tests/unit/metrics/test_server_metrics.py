"""Counters equal what the deltas held; histograms are fed once per event; labels stay few."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hardpoint.metrics.engine_stats import EngineCollector
from hardpoint.metrics.prometheus import render
from hardpoint.metrics.registry import ServerMetrics
from hardpoint.metrics.request_record import RequestRecord
from hardpoint.protocol.messages import STEP_SIZE_BOUNDS, EngineInfo, EngineStats, RequestTiming
from hardpoint.request.output import SequenceDelta

#: Names that dashboards for `vllm:` metrics read (features B1 to B3).
NAMES = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prompt_tokens",
    "generation_tokens",
    "request_success",
    "num_preemptions",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "prompt_tokens_cached",
    "iteration_tokens_total",
]


def samples(metrics: ServerMetrics) -> dict[str, float]:
    text = render(metrics, "")[0].decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            extra = sample.labels.get("finished_reason")
            if "le" not in sample.labels:
                found[sample.name + (f"/{extra}" if extra else "")] = sample.value
    return found


@pytest.fixture
def metrics() -> ServerMetrics:
    made = ServerMetrics("m")
    stats = EngineStats(
        running=3, waiting=2, pages_total=10, pages_used=4, preemptions=5, prefix_queries=100, prefix_hits=60
    )
    made.registry.register(EngineCollector("m", lambda: stats, lambda: None))
    return made


def test_all_known_names_with_their_labels(metrics) -> None:
    families = {f.name: f for f in text_string_to_metric_families(render(metrics, "")[0].decode())}
    missing = [name for name in NAMES if f"vllm:{name}" not in families]
    assert missing == []
    for name, family in families.items():
        if name.startswith(("vllm:", "hardpoint:")):
            assert all(s.labels["model_name"] == "m" and s.labels["engine"] == "0" for s in family.samples)


def test_the_engines_numbers_are_read_at_each_scrape(metrics) -> None:
    found = samples(metrics)
    assert found["vllm:num_requests_running"] == 3
    assert found["vllm:kv_cache_usage_perc"] == pytest.approx(0.4)
    assert found["vllm:num_preemptions_total"] == 5
    assert found["vllm:prefix_cache_hits_total"] == 60


def test_tokens_per_step_are_a_histogram_that_counts_up_to_each_bound() -> None:
    made = ServerMetrics("m")
    sizes = (4, *[0] * (len(STEP_SIZE_BOUNDS) - 2), 3, 2)
    stats = EngineStats(steps=9, step_sizes=sizes, step_tokens=70_000)
    made.registry.register(EngineCollector("m", lambda: stats, lambda: None))
    text = render(made, "")[0].decode()
    (family,) = (f for f in text_string_to_metric_families(text) if f.name == "vllm:iteration_tokens_total")
    assert family.type == "histogram"
    buckets = {s.labels["le"]: s.value for s in family.samples if s.name.endswith("_bucket")}
    assert (buckets["1.0"], buckets["8192.0"], buckets["16384.0"], buckets["+Inf"]) == (4, 4, 7, 9)
    assert samples(made)["vllm:iteration_tokens_total_sum"] == 70_000
    assert samples(made)["vllm:iteration_tokens_total_count"] == 9


@pytest.mark.parametrize("caching", [True, False])
def test_the_caches_layout_has_the_labels_of_dashboards(caching: bool) -> None:
    info = EngineInfo(
        device="x:0", device_name="x", device_reason="", tuning=[], dtype="float32", kv_dtype="bfloat16",
        weight_bytes=0, kv_bytes=0, num_pages=77, page_tokens=32, max_model_len=64, max_concurrency=1.0, vocab_size=9,
        ops=[], fallbacks=[], phases=[], prefix_caching=caching,
    )  # fmt: skip
    made = ServerMetrics("m")
    made.registry.register(EngineCollector("m", EngineStats, lambda: info))
    families = {f.name: f for f in text_string_to_metric_families(render(made, "")[0].decode())}
    (sample,) = families["vllm:cache_config_info"].samples
    assert sample.value == 1
    assert sample.labels == {
        "model_name": "m", "engine": "0", "block_size": "32", "num_gpu_blocks": "77", "num_blocks": "77",
        "num_cpu_blocks": "0", "cache_dtype": "bfloat16", "enable_prefix_caching": str(caching), "device": "x:0",
    }  # fmt: skip


def test_an_empty_engine_divides_by_nothing() -> None:
    empty = ServerMetrics("m")
    empty.registry.register(EngineCollector("m", EngineStats, lambda: None))
    assert samples(empty)["vllm:iteration_tokens_total_count"] == 0
    assert samples(empty)["vllm:kv_cache_usage_perc"] == 0


def test_a_request_with_two_sequences(metrics) -> None:
    record = RequestRecord(metrics, arrived=0.0, prompt_tokens=10, n=2, max_tokens=5)
    timing = RequestTiming(1.0, 2.0, 3.0, 4)
    record.add(SequenceDelta(0, "a", (1,), cached_tokens=4))
    record.add(SequenceDelta(1, "b", (2, 3), cached_tokens=9))
    record.add(SequenceDelta(0, "c", (4, 5)))
    record.add(SequenceDelta(0, "", (), finish_reason="stop", timing=timing))
    record.add(SequenceDelta(1, "d", (6,), finish_reason="length", timing=timing))
    found = samples(metrics)
    expected = {
        "vllm:prompt_tokens_total": 10, "vllm:prompt_tokens_cached_total": 4, "vllm:generation_tokens_total": 6,
        "vllm:request_success_total/stop": 1, "vllm:request_success_total/length": 1,
        "vllm:request_success_total/abort": 0, "vllm:time_to_first_token_seconds_count": 2,
        "vllm:inter_token_latency_seconds_count": 2, "vllm:request_time_per_output_token_seconds_count": 2,
        "vllm:request_generation_tokens_sum": 6, "vllm:request_prompt_tokens_sum": 10, "vllm:request_params_n_sum": 2,
        "vllm:request_queue_time_seconds_sum": 2, "vllm:request_inference_time_seconds_sum": 10,
        "vllm:request_num_preemptions_sum": 8, "vllm:request_prefill_kv_computed_tokens_sum": 6,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected


def test_an_unknown_reason_counts_as_an_error(metrics) -> None:
    record = RequestRecord(metrics, arrived=0.0, prompt_tokens=1, n=1, max_tokens=1)
    record.add(SequenceDelta(0, finish_reason="something new"))
    assert samples(metrics)["vllm:request_success_total/error"] == 1


def test_http_metrics_by_route_and_status_class(metrics) -> None:
    for status in (200, 201, 404):
        metrics.http_request("/v1/models/{model_id:path}", "GET", status, 0.1)
    text = render(metrics, "")[0].decode()
    counts: dict[str, Any] = {}
    for family in text_string_to_metric_families(text):
        if family.name == "http_requests":
            counts = {s.labels["status"]: s.value for s in family.samples if s.name.endswith("_total")}
    assert counts == {"2xx": 2, "4xx": 1}


def test_the_format_follows_the_accept_header(metrics) -> None:
    assert render(metrics, "")[1].startswith("text/plain")
    body, kind = render(metrics, "application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")
