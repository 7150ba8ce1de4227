"""What `hardpoint bench profile` makes of spans of work, and that it looks at real steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hardpoint.bench.profile import SHORT_GAP, Busy, measure
from hardpoint.cli.main import main
from hardpoint.errors import EngineError

pytestmark = pytest.mark.reference

LLAMA = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """The command line of a model with made-up weights."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return ["bench", "profile", str(tmp_path), "--load-format", "dummy"]


def test_gaps_are_what_no_span_covers() -> None:
    spans = [Busy("a", 0.0, 10.0), Busy("b", 5.0, 20.0), Busy("a", 22.0, 30.0), Busy("b", 80.0, 100.0)]
    step, idle, hand_over = measure(spans, 2)
    assert step == pytest.approx(0.05)
    assert idle == pytest.approx(0.52)
    assert hand_over == pytest.approx(0.02)
    assert SHORT_GAP > 2.0


def test_a_span_within_another_ends_nothing() -> None:
    assert measure([Busy("long", 0.0, 100.0), Busy("short", 1.0, 2.0), Busy("next", 100.0, 110.0)], 1)[1] == 0.0


def test_no_spans_are_told() -> None:
    with pytest.raises(EngineError, match="no work"):
        measure([], 1)


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_programs_are_seen_from_the_host(
    tiny: list[str], device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json"
    flags = ["--num-requests", "3", "--steps", "4", "--input-len", "5", "--trace", str(trace), "--device", device]
    assert main([*tiny, *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not found["by_kernels"]
    assert found["requests"] == 3
    assert 0.0 < found["idle"] < 1.0
    # overlapped, a step or two more may be under way at the ends
    assert found["work"][0]["calls"] == pytest.approx(1.0, abs=0.5)
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_trace_that_cannot_be_written_is_told(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--steps", "1", "--num-requests", "1", "--device", "reference", "--trace", "/nowhere/trace.json"]
    assert main([*tiny, *flags]) != 0
    assert "--trace /nowhere/trace.json" in capsys.readouterr().err
