"""Rows of `hardpoint explain`, folded and whole."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

from hardpoint.cli import explain
from hardpoint.cli.main import main


class Altitude(IntEnum):
    COMPOSITE = 2


@dataclass(frozen=True)
class Binding:
    """Like hardpoint_platforms.binding.Binding, without torch."""

    instance: Any
    provider: str = "fast"
    reason: str = ""
    refused: tuple[Any, ...] = ()
    fallback: bool = False
    held: bool = True
    altitude: Altitude = field(default=Altitude.COMPOSITE)


def bind(where: str, op: str = "linear", **changes: Any) -> Binding:
    spec = SimpleNamespace(shape=(4, 2), dtype="torch.float32", scheme=None)
    instance = SimpleNamespace(
        where=where,
        op=op,
        attrs={"bias": False, "shape": (1, 2)},
        dtype="torch.float32",
        weights={"weight": spec},
    )
    return Binding(instance, **changes)


REFUSED = (SimpleNamespace(provider="fast", reason="needs 64 columns"),)


def test_alike_layers_are_one_row() -> None:
    rows = explain.folded([*(bind(f"layers.{i}.self_attn.qkv") for i in range(30)), bind("norm")])
    assert [where for where, _ in rows] == ["layers.0-29.self_attn.qkv x30", "norm"]


def test_layers_that_differ_stay_apart() -> None:
    bindings = [bind(f"layers.{i}.mlp") for i in range(6)]
    bindings[2] = bind("layers.2.mlp", provider="reference", refused=REFUSED, fallback=True)
    rows = explain.folded(bindings)
    assert [where for where, _ in rows] == ["layers.0-1,3-5.mlp x5", "layers.2.mlp"]
    assert rows[1][1] == ["linear", "composite", "reference", "fallback", "fast: needs 64 columns"]


def test_only_the_layer_number_is_folded() -> None:
    rows = explain.folded([bind("layers.0.experts.3.up"), bind("layers.1.experts.3.up")])
    assert [where for where, _ in rows] == ["layers.0-1.experts.3.up x2"]


@pytest.mark.parametrize(
    ("numbers", "text"), [([0], "0"), ([0, 1, 2], "0-2"), ([5, 3, 4, 9, 1], "1,3-5,9"), ([2, 2], "2")]
)
def test_spans(numbers: list[int], text: str) -> None:
    assert explain.spans(numbers) == text


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> list[Binding]:
    import sys

    rows = [
        bind("layers.0.mlp"),
        bind("layers.1.mlp"),
        bind("head", refused=REFUSED, provider="reference", fallback=True, held=False),
    ]
    seen = SimpleNamespace(explain_model=lambda config: (("cpu:0", tuple(rows)),))
    monkeypatch.setitem(sys.modules, "hardpoint.engine.build", seen)
    return rows


def test_the_table(bindings: list[Binding], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "some/model"]) == 0
    out = capsys.readouterr().out
    assert "layers.0-1.mlp x2" in out
    assert "fast: needs 64 columns" in out
    assert "3 op instances: fast 2, reference 1" in out
    assert "fallback. not held by the program" in out
    assert "1 of them are not held by the step's program" in out
    assert "\033" not in out


def test_blocks_are_rows_only_where_somebody_refused_one(
    bindings: list[Binding], capsys: pytest.CaptureFixture[str]
) -> None:
    bindings += [bind(f"layers.{i}.mlp", op="whole_mlp", provider="(decomposed)") for i in range(2)]
    bindings.append(bind("layers.2.mlp", op="whole_attention", provider="(decomposed)", refused=REFUSED))
    assert main(["explain", "some/model"]) == 0
    table, _, told = capsys.readouterr().out.partition("\n\n")
    assert "whole_mlp" not in table
    assert "whole_attention" in table
    assert "3 op instances: fast 2, reference 1" in told
    assert "no provider has them whole: whole_mlp." in told
    assert main(["explain", "some/model", "--all"]) == 0
    assert "whole_mlp" in capsys.readouterr().out


def test_all_rows(bindings: list[Binding], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "some/model", "--all"]) == 0
    out = capsys.readouterr().out
    assert "layers.0.mlp" in out
    assert "layers.1.mlp" in out


def test_json(bindings: list[Binding], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "some/model", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["where"] for row in rows] == ["layers.0.mlp", "layers.1.mlp", "head"]
    assert rows[2]["refused"] == [{"provider": "fast", "reason": "needs 64 columns"}]
    assert rows[2]["fallback"] is True
    assert [row["held"] for row in rows] == [True, True, False]
    assert rows[0]["weights"]["weight"] == {"shape": [4, 2], "dtype": "float32", "scheme": None}
    assert rows[0]["attributes"] == {"bias": False, "shape": [1, 2]}
