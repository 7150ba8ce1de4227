"""Choices by measurement: asked once, kept on disk, never by a hair."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hardpoint_torch_gpu.few_rows import FewRows
from hardpoint_torch_gpu.measured import Measurements, Way

pytestmark = pytest.mark.reference


def clock(**seconds: float) -> tuple[Callable[[Way], float], list[str], dict[str, Way]]:
    """A timer that finds these, what it was asked, and the ways to give to it."""
    asked: list[str] = []
    ways: dict[str, Way] = {name: (lambda name=name: name) for name in seconds}  # type: ignore[misc]

    def timer(way: Way) -> float:
        asked.append(str(way()))
        return seconds[asked[-1]]

    return timer, asked, ways


def test_the_fastest_is_asked_for_once_and_kept(tmp_path: Path) -> None:
    timer, asked, ways = clock(first=2e-5, second=1e-5)
    path = tmp_path / "kept" / "gpu.json"
    here = Measurements(path, timer)
    assert here.fastest("q", ways) == here.fastest("q", ways) == "second"
    assert asked == ["first", "second"]
    later = Measurements(path, None)
    assert later.fastest("q", ways) == "second"
    assert [entry.name for entry in path.parent.iterdir()] == ["gpu.json"]


def test_a_hair_is_not_enough() -> None:
    timer, _, ways = clock(first=1e-5, second=0.99e-5)
    assert Measurements(None, timer).fastest("q", ways) == "first"


def test_a_head_start_counts() -> None:
    timer, _, ways = clock(first=1e-5, second=0.8e-5)
    measurements = Measurements(None, timer)
    assert measurements.fastest("q", ways, 1e-6) == "second"
    assert measurements.fastest("q", ways, 2.5e-6) == "first"


def test_without_a_timer_the_first_is_taken() -> None:
    _, asked, ways = clock(first=2e-5, second=1e-5)
    nothing = Measurements(None, None)
    assert not nothing.knows("q")
    assert nothing.fastest("q", ways) == "first"
    assert not asked


def test_a_new_way_makes_it_ask_again(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    timer, _, ways = clock(first=2e-5, second=1e-5)
    Measurements(path, timer).fastest("q", ways)
    timer, asked, ways = clock(first=2e-5, second=1e-5, third=0.5e-5)
    assert Measurements(path, None).fastest("q", ways) == "first"
    assert Measurements(path, timer).fastest("q", ways) == "third"
    assert asked == ["first", "second", "third"]


@pytest.mark.parametrize("damage", ["{", "[1]", '{"q": 3}', '{"q": {"first": "x"}}', "\x00"])
def test_a_damaged_file_is_told_and_measured_anew(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(damage)
    timer, _, ways = clock(first=2e-5, second=1e-5)
    assert Measurements(path, timer).fastest("q", ways) == "second"
    assert "measured anew" in caplog.text
    assert Measurements(path, None).fastest("q", ways) == "second"


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    timer, _, ways = clock(first=2e-5, second=1e-5)
    assert Measurements(tmp_path / "file" / "gpu.json", timer).fastest("q", ways) == "second"
    assert "cannot be kept" in caplog.text


@pytest.mark.parametrize("tokens", [1, 3, 16, 17, 64, 65])
def test_products_are_right_whoever_makes_them(tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn((tokens, 128), generator=generator).half()
    w = torch.randn((48, 128), generator=generator).half()
    few = FewRows(Measurements(None, None))
    few._library[(48, 128, torch.float16)] = frozenset({16})
    wanted = x.float() @ w.float().t()
    torch.testing.assert_close(few.product(x, w, None).float(), wanted, atol=0.05, rtol=0.01)
