"""From records to percentiles, by hand-made records."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.bench.load import Record
from hardpoint.bench.report import distribution, histogram, percentile, report, summarize

numpy = pytest.importorskip("numpy")


def test_one_request() -> None:
    summary = summarize([Record(1.0, (1.5, 1.6, 1.8), 1.9, prompt_tokens=10, output_tokens=4)])
    assert summary.ttft is not None
    assert summary.ttft.median == pytest.approx(0.5)
    assert summary.tpot is not None
    assert summary.tpot.median == pytest.approx(0.1)
    assert summary.itl is not None
    assert (summary.itl.lowest, summary.itl.highest) == (pytest.approx(0.1), pytest.approx(0.2))
    assert summary.e2e is not None
    assert summary.e2e.median == pytest.approx(0.9)
    assert summary.output_rate == pytest.approx(4 / 0.9)
    assert summary.total_rate == pytest.approx(14 / 0.9)


def test_failed_requests_count_apart() -> None:
    good = Record(0.0, (1.0, 2.0), 2.0, prompt_tokens=5, output_tokens=2)
    bad = Record(0.0, (0.5,), 4.0, output_tokens=1, error="HTTP 503")
    summary = summarize([good, bad, bad])
    assert (summary.requests, summary.failed) == (3, 2)
    assert summary.output_tokens == 2
    assert summary.duration == 4.0
    assert summary.errors == (("HTTP 503", 2),)
    assert "failed x2: HTTP 503" in report(summary)


def test_nothing_at_all() -> None:
    summary = summarize([])
    assert summary.ttft is None
    assert summary.output_rate == 0.0
    assert "0 done" in report(summary)
    assert json.loads(json.dumps(summary.as_json()))["requests"] == 0


def test_one_token_has_no_tpot() -> None:
    summary = summarize([Record(0.0, (1.0,), 1.0, output_tokens=1)])
    assert summary.tpot is None
    assert summary.itl is None


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=50), st.sampled_from([0, 50, 90, 99, 100]))
def test_percentiles_are_numpys(values: list[float], share: float) -> None:
    assert percentile(sorted(values), share) == pytest.approx(float(numpy.percentile(values, share)))


def test_json_names_percentiles() -> None:
    values = distribution([0.1, 0.2, 0.3])
    assert values is not None
    assert values.median == pytest.approx(0.2)
    plain = summarize([Record(0.0, (0.1,), 0.2, output_tokens=1)]).as_json()
    assert set(plain["ttft"]) >= {"mean", "p50", "p90", "p99"}


def test_the_histogram_counts_all() -> None:
    text = histogram([0.0, 0.1, 0.1, 1.0], title="TTFT", bins=4)
    counts = [int(line.split()[-1]) for line in text.splitlines()[1:]]
    assert sum(counts) == 4
    assert counts[0] == 3
    assert histogram([0.5, 0.5], title="x").count("#") > 0
    assert "no values" in histogram([], title="x")
