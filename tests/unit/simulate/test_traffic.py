"""Traces and generators: what is read, what is refused with row and column, what a seed fixes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hardpoint.errors import ConfigError
from hardpoint.simulate.traffic import Lengths, generate, read_trace

HEADER = "arrival,prompt_tokens,output_tokens,prefix_id,prefix_tokens\n"


def trace(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_trace_is_read_and_sorted(tmp_path: Path) -> None:
    found = read_trace(trace(tmp_path, HEADER + "2.5,10,3,a,4\n0.5,20,1,,\n\n1,30,2,a,\n"))
    assert found.arrival.tolist() == [0.5, 1.0, 2.5]
    assert found.prompt.tolist() == [20, 30, 10]
    assert found.output.tolist() == [1, 2, 3]
    assert found.shared.tolist() == [0, 30, 4]
    assert found.prefix[1] == found.prefix[2] != found.prefix[0] == -1


def test_a_trace_needs_no_header_and_no_prefix(tmp_path: Path) -> None:
    found = read_trace(trace(tmp_path, "0,5,6\n1.25,7,8\n"))
    assert (found.arrival.tolist(), found.prompt.tolist(), found.output.tolist()) == ([0, 1.25], [5, 7], [6, 8])


def test_prompts_share_their_prefix_and_nothing_else(tmp_path: Path) -> None:
    found = read_trace(trace(tmp_path, HEADER + "0,6,1,a,4\n1,8,1,a,5\n2,6,1,b,4\n3,6,1,,\n"))
    first, second, other, none = (found.prompt_tokens(index) for index in range(4))
    assert first[:4].tolist() == second[:4].tolist()
    assert not set(first[4:].tolist()) & set(second[5:].tolist())
    assert not set(other.tolist()) & set(first.tolist())
    assert not set(none.tolist()) & {*first.tolist(), *second.tolist(), *other.tolist()}


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ("x,5,6", ("line 3", "arrival", "'x'")),
        ("-1,5,6", ("line 3", "arrival")),
        ("nan,5,6", ("line 3", "arrival")),
        ("1,0,6", ("line 3", "prompt_tokens", "'0'")),
        ("1,5,2.5", ("line 3", "output_tokens", "'2.5'")),
        ("1,5,99999999999", ("line 3", "output_tokens")),
        ("1,5", ("line 3", "2 columns")),
        ("1,5,6,a,9", ("line 3", "prefix_tokens", "9")),
        ("1,5,6,,3", ("line 3", "prefix_tokens", "prefix_id")),
        ("1,5,6,a,3,7", ("line 3", "6 columns")),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: str, named: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_trace(trace(tmp_path, f"{HEADER}0,5,6,,\n{row}\n"))
    assert all(word in caught.value.message for word in (*named, "trace.csv")), caught.value.message


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "no requests"),
        (HEADER, "no requests"),
        ("arrival,prompt_tokens\n0,1\n", "output_tokens"),
        ("arrival,prompt_tokens,output_tokens,colour\n0,1,1,red\n", "colour"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_trace(trace(tmp_path, text))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "missing.csv")


def test_a_seed_fixes_everything() -> None:
    lengths = Lengths(100, 50, 0.7, prefixes=3, prefix_tokens=20)
    one, two, other = (generate(20, 50, lengths, burst=4, seed=seed) for seed in (1, 1, 2))
    for name in ("arrival", "prompt", "output", "prefix", "shared"):
        assert np.array_equal(getattr(one, name), getattr(two, name))
    assert not np.array_equal(one.arrival[:50], other.arrival[:50])
    assert set(one.prefix.tolist()) == {0, 1, 2}
    assert one.prompt.min() > 20


@pytest.mark.parametrize("burst", [0.0, 1.0, 6.0])
def test_rate_and_burst_are_as_asked(burst: float) -> None:
    found = generate(50, 400, Lengths(300, 40, 0.5), burst=burst, seed=3)
    gaps = np.diff(found.arrival)
    assert len(found) / 400 == pytest.approx(50, rel=0.1)
    assert (gaps.std() / gaps.mean()) ** 2 == pytest.approx(burst, rel=0.15, abs=1e-9)
    assert found.prompt.mean() == pytest.approx(300, rel=0.05)
    assert found.arrival.max() < 400


@pytest.mark.parametrize(("rate", "duration", "burst"), [(0, 1, 1), (1, 0, 1), (1, 1, -1), (1e6, 1e6, 1), (1e-6, 1, 1)])
def test_traffic_that_cannot_be(rate: float, duration: float, burst: float) -> None:
    with pytest.raises(ConfigError, match="--"):
        generate(rate, duration, Lengths(), burst=burst)
