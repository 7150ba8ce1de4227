"""The hardware table and recorded step times: complete, sourced, and refused with file, line and column."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hardpoint.errors import ConfigError
from hardpoint.simulate.hardware import TABLE, hardware_names, load_hardware
from hardpoint.simulate.recorded import RecordedCost


def test_the_table_has_the_chips_and_a_source_for_each_number() -> None:
    assert hardware_names() == ["h100-sxm", "h200-sxm", "mi300x", "tpu-v5e", "tpu-v6e", "cpu-2core-avx2"]
    for name in hardware_names():
        sources = load_hardware(name).sources
        numbers = {"peak", "memory_bandwidth", "memory", "link_bandwidth", "link_start", "launch", "shares"}
        assert numbers <= set(sources), name
        assert all(
            "http" in s or "measured" in s or "assumed" in s or "machine" in s
            for s in map(sources.__getitem__, numbers)
        ), name


def test_a_missing_dtype_takes_the_next_wider() -> None:
    chip = load_hardware("tpu-v5e")
    assert chip.operations("float8") == chip.operations("bfloat16") == 197e12
    assert chip.operations("int8") == 393e12
    assert load_hardware("cpu-2core-avx2").operations("bfloat16") == 182e9


def test_a_table_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    row = json.loads(TABLE.read_text())["chips"]["h100-sxm"]
    path.write_text(json.dumps({"chips": {"mine": row}}))
    assert load_hardware(str(path)).name == load_hardware(f"{path}:mine").name == "mine"
    with pytest.raises(ConfigError, match="no such row"):
        load_hardware(f"{path}:other")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"memory": 0}, "'memory' must be above 0"),
        ({"memory_bandwidth": "fast"}, "'memory_bandwidth' must be a number"),
        ({"peak": {}}, '"peak"'),
        ({"compute_share": 1.5}, "'compute_share'"),
        ({"launch": None}, "'launch'"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, change: dict[str, object], named: str) -> None:
    row = json.loads(TABLE.read_text())["chips"]["h100-sxm"] | change
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"chips": {"mine": row}}))
    with pytest.raises(ConfigError, match=named):
        load_hardware(str(path))


def test_an_unknown_chip_is_told_its_neighbours() -> None:
    with pytest.raises(ConfigError, match="h200-sxm") as caught:
        load_hardware("h200")
    assert "h200-sxm" in (caught.value.hint or "")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_hardware("nowhere.json")


def table(folder: Path, text: str) -> Path:
    path = folder / "steps.csv"
    path.write_text(text)
    return path


def test_recorded_times_are_interpolated(tmp_path: Path) -> None:
    cost = RecordedCost(table(tmp_path, "tokens,seconds\n8,0.010\n1,0.004\n16,0.014\n"))
    at = [cost.seconds(tokens, tokens, ((0, 0),)) for tokens in (1, 8, 12, 16, 32)]
    assert at == pytest.approx([0.004, 0.010, 0.012, 0.014, 0.022])


def test_recorded_times_with_context(tmp_path: Path) -> None:
    rows = "tokens,context,seconds\n1,0,0.004\n1,1000,0.006\n9,0,0.012\n9,1000,0.022\n"
    cost = RecordedCost(table(tmp_path, rows))
    assert cost.seconds(5, 5, ((0, 500),)) == pytest.approx((0.004 + 0.006 + 0.012 + 0.022) / 4)
    query, computed = np.array([1, 4], np.int32), np.array([10, 0], np.int32)
    assert cost.attended(query, computed) == ((11 + 10, 15),)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a,b\n1,2\n", "line 1"),
        ("tokens,seconds\n1,x\n", "line 2, column seconds"),
        ("tokens,seconds\n1,0.1\n-1,0.1\n", "line 3, column tokens"),
        ("tokens,seconds\n1,0.1\n1,0.2\n", "line 3"),
        ("tokens,seconds\n1\n", "line 2"),
        ("tokens,seconds\n", "no step times"),
        ("tokens,context,seconds\n1,0,0.1\n2,9,0.1\n", "no row for tokens 1 with context 9"),
    ],
)
def test_wrong_step_times_are_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        RecordedCost(table(tmp_path, text))
