"""SLO terms and the search over replicas."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hardpoint.errors import ConfigError
from hardpoint.simulate.objective import Objective, find_replicas, meets, parse_objectives
from hardpoint.simulate.summary import Summary

EMPTY = np.zeros(0)
SUMMARY = Summary(
    replicas=1, requests=1, refused=0, refusal="", prompt_tokens=1, output_tokens=1, makespan=1.0, steps=1,
    step_mean=1.0, batch_mean=1.0, busy=1.0, kv_mean=0.1, kv_peak=0.1, preemptions=0, prefix_hit_share=0.0,
    ttft=np.array([0.1]), tpot=EMPTY, latency=np.array([0.1]),
)  # fmt: skip


def test_terms_are_read() -> None:
    assert parse_objectives("ttft_p95<0.5, tpot_p99.9 <= 30ms,latency_mean<2s,ttft_max<.5") == (
        Objective("ttft", "p95", 0.5),
        Objective("tpot", "p99.9", 0.03),
        Objective("latency", "mean", 2.0),
        Objective("ttft", "max", 0.5),
    )


@pytest.mark.parametrize("text", ["", "ttft<1", "ttft_p95>1", "itl_p95<1", "ttft_p95<x", "ttft_p95<0", "ttft_p95<1,"])
def test_a_wrong_term_is_shown(text: str) -> None:
    with pytest.raises(ConfigError, match="--slo"):
        parse_objectives(text)


@pytest.mark.parametrize("needed", [1, 2, 3, 7, 8, 9, 100])
def test_the_fewest_are_found(needed: int) -> None:
    asked: list[int] = []

    def run(replicas: int) -> tuple[Summary, int]:
        asked.append(replicas)
        return replace(SUMMARY, replicas=replicas, ttft=np.array([1.0 if replicas < needed else 0.1])), 50

    found = find_replicas(parse_objectives("ttft_p95<0.5"), 256, run)
    assert found.replicas == needed
    assert found.best.replicas == needed
    assert len(set(asked)) == len(asked) <= 2 + 2 * needed.bit_length()


def test_the_search_ends_where_replicas_do_not_help() -> None:
    objectives = parse_objectives("ttft_p95<0.01")
    alone = find_replicas(objectives, 256, lambda replicas: (SUMMARY, 1 if replicas >= 4 else 9))
    assert (alone.replicas, [count for count, _ in alone.tried]) == (None, [1, 2, 4])
    most = find_replicas(objectives, 6, lambda replicas: (SUMMARY, 9))
    assert (most.replicas, [count for count, _ in most.tried]) == (None, [1, 2, 4, 6])


def test_a_refusal_is_not_met_and_a_missing_metric_is() -> None:
    objectives = parse_objectives("ttft_p95<0.5,tpot_p95<0.001")
    assert meets(objectives, SUMMARY)
    assert not meets(objectives, replace(SUMMARY, refused=1))
    assert not meets(objectives, replace(SUMMARY, tpot=np.array([0.002])))
