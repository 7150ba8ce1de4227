"""`/metrics` against what clients were told, and what an idle server costs."""

from __future__ import annotations

import time

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_process import ServerProcess, events, open_stream, wait_until

pytestmark = pytest.mark.server


def difference(before: dict[str, float], after: dict[str, float], name: str) -> float:
    return after[name] - before.get(name, 0.0)


def test_counters_equal_the_usage_that_was_sent(server: ServerProcess) -> None:
    server.http.post("/reset_prefix_cache")
    before = server.metrics()
    usages = []
    for fields in (
        {"prompt": [5] * 40, "max_tokens": 7, "ignore_eos": True},
        {"prompt": [5] * 40, "max_tokens": 3, "n": 3, "ignore_eos": True, "temperature": 1},
        {"prompt": [[6] * 20, [7] * 10], "max_tokens": 4},
        {"prompt": "x", "max_tokens": 9, "stop": ["a", "b", " "]},
        {"prompt": "x", "max_tokens": 9, "min_tokens": 2, "logit_bias": {"1": 100}},
        {"prompt": "score me", "max_tokens": 0, "echo": True, "logprobs": 1},
    ):
        usages.append(server.complete(**fields)["usage"])
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "stream": True}
    text = server.http.post("/v1/chat/completions", json={**body, "stream_options": {"include_usage": True}}).text
    usages.append(events(text)[-1]["usage"])
    after = server.metrics()
    assert difference(before, after, "vllm:prompt_tokens_total") == sum(u["prompt_tokens"] for u in usages)
    assert difference(before, after, "vllm:generation_tokens_total") == sum(u["completion_tokens"] for u in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert difference(before, after, "vllm:prompt_tokens_cached_total") == cached == 32
    assert difference(before, after, "vllm:request_success_total") == 10
    for name in ("vllm:time_to_first_token_seconds_count", "vllm:e2e_request_latency_seconds_count"):
        assert difference(before, after, name) in (9, 10)  # a score draws no token
    assert difference(before, after, "http_requests_total") == 8  # seven requests, and the first /metrics
    drawn = difference(before, after, "hardpoint:engine_generated_tokens_total")
    assert drawn >= sum(usage["completion_tokens"] for usage in usages)


def test_finish_reasons_are_told_apart(server: ServerProcess) -> None:
    def counts() -> dict[str, float]:
        families = text_string_to_metric_families(server.http.get("/metrics").text)
        found = next(family for family in families if family.name == "vllm:request_success")
        return {s.labels["finished_reason"]: s.value for s in found.samples if s.name.endswith("_total")}

    before = counts()
    server.complete([5], max_tokens=2, ignore_eos=True)
    server.complete([5], max_tokens=5, logit_bias={"1": 100})
    with open_stream(server, request_id="gone", max_tokens=3000) as lines:
        server.http.post("/abort_requests", json={"request_ids": ["gone"]})
        list(lines)
    after = counts()
    assert {reason: after[reason] - before[reason] for reason in after if after[reason] != before[reason]} == {
        "length": 1,
        "stop": 1,
        "abort": 1,
    }


def test_gauges_follow_the_load(server: ServerProcess) -> None:
    info = server.metrics()
    assert info["hardpoint:kv_pages_total"] == 264
    assert info["vllm:cache_config_info"] == 1
    with open_stream(server, n=4, prompt=[9] * 100, max_tokens=3000):
        wait_until(lambda: server.load()[0] == 4)
        now = server.metrics()
        # six shared prompt pages and at least one of its own for each
        assert now["hardpoint:kv_pages_used"] >= 6 + 4
        assert now["vllm:kv_cache_usage_perc"] == pytest.approx(now["hardpoint:kv_pages_used"] / 264)
    server.wait_idle()


def test_labels_do_not_grow_with_what_clients_send(server: ServerProcess) -> None:
    """A path or method of a stranger makes no time series."""
    server.http.get("/nowhere/0")
    server.http.request("BREW", "/x0")
    before = len(server.http.get("/metrics").text.splitlines())
    for number in range(1, 20):
        server.http.get(f"/nowhere/{number}")
        server.http.get(f"/v1/models/unknown-{number}")
        server.http.request(f"BREW{number}", f"/x{number}")
        server.http.post("/v1/completions", json={"model": f"m{number}", "prompt": "a"})
    grown = len(server.http.get("/metrics").text.splitlines()) - before
    assert grown < 80  # the two known routes, once


def test_an_idle_server_costs_next_to_nothing(server: ServerProcess) -> None:
    """CPU time, not wall-clock: a loop that turns without work would take all of it."""
    processes = [server.main, server.engine]
    server.complete([5, 6, 7], max_tokens=5)
    server.wait_idle()

    def cpu() -> list[float]:
        return [times.user + times.system for times in (process.cpu_times() for process in processes)]

    before = cpu()
    time.sleep(4)
    used = [after - start for after, start in zip(cpu(), before, strict=True)]
    assert sum(used) < 0.8, f"front end {used[0]:.2f} s, engine {used[1]:.2f} s in 4 s"
    threads = [process.num_threads() for process in processes]
    assert max(threads) < 64, threads
