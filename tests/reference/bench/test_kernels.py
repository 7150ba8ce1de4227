"""`bench kernels` and `bench overhead` on tiny models with made-up weights."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from hardpoint.bench.kernels import run
from hardpoint.bench.overhead import GOALS, PARTS, Ledger, StepParts
from hardpoint.bench.overhead import run as overhead
from hardpoint.cli.main import main
from hardpoint.config.engine import CacheConfig, DeviceConfig, EngineConfig, ModelConfig
from hardpoint.engine.build import explain_model
from hardpoint.errors import ConfigError
from hardpoint_platforms.binding import DECOMPOSED

pytestmark = pytest.mark.reference

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
LLAMA = {"model_type": "llama", "num_key_value_heads": 2, **SIZES}
WINDOWED = {"model_type": "gemma3_text", "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 8, **SIZES}
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    **SIZES,
}


def folder(tmp_path: Path, config: dict[str, Any]) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def configured(tmp_path: Path, config: dict[str, Any], device: str, **cache: Any) -> EngineConfig:
    model = ModelConfig(folder(tmp_path, config), load_format="dummy")
    return EngineConfig(model, DeviceConfig(device), CacheConfig(**cache))


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("model", [LLAMA, WINDOWED, EXPERTS], ids=lambda config: config["model_type"])
def test_every_op_of_the_model_is_measured(model: dict[str, Any], device: str, tmp_path: Path) -> None:
    config = configured(tmp_path, model, device)
    report = run(config, tokens=[1, 3, 40], contexts=[5], rounds=1)
    bound = [b for _, found in explain_model(config) for b in found if b.provider != DECOMPOSED]
    assert {(rate.op, rate.provider) for rate in report.rates} == {(b.instance.op, b.provider) for b in bound}
    assert [shape for shape, _ in report.steps] == ["1 x 5", "3 x 5", "prompt 40"]
    attention = [rate for rate in report.rates if rate.op == "attention" and rate.shape == "3 x 5"]
    assert sum(rate.calls for rate in attention) == model["num_hidden_layers"]
    assert {rate.tokens for rate in report.rates if rate.op == "logits"} == {1, 3}
    for rate in report.rates:
        assert rate.seconds > 0
        assert rate.bytes
        if device == "reference":
            assert report.ceilings is rate.bound is rate.memory_share is None
        else:
            assert rate.memory_share
            assert bool(rate.multiply_adds) == (rate.compute_share is not None)


def test_attention_is_shown_for_each_context_and_the_rest_once(tmp_path: Path) -> None:
    report = run(configured(tmp_path, LLAMA, "reference"), tokens=[2], contexts=[4, 20], rounds=1)
    shown = [(rate.op, rate.shape) for rate in report.rates if rate.op in ("attention", "embedding")]
    assert shown == [("embedding", "2 x 4"), ("attention", "2 x 4"), ("attention", "2 x 20")]
    near, far = (rate for rate in report.rates if rate.op == "attention")
    assert near.multiply_adds is not None
    assert far.multiply_adds == pytest.approx(near.multiply_adds * 21 / 5)


def test_batches_that_do_not_fit_are_named(tmp_path: Path) -> None:
    # a page of 16 tokens: 3 layers of 2 heads of 8 keys and as many values, 4 bytes each
    page = 16 * 3 * 2 * 8 * 2 * 4
    config = configured(tmp_path, LLAMA, "reference", kv_cache_memory=4 * page)
    report = run(config, tokens=[1, 8, 100], contexts=[10], rounds=1)
    assert [shape for shape, _ in report.steps] == ["1 x 10"]
    assert [reason.split(":")[0] for reason in report.skipped] == ["8 x 10", "prompt 100"]
    with pytest.raises(ConfigError, match="prompt 100: the model takes 64 tokens"):
        run(config, tokens=[100], contexts=[10], rounds=1)


def test_the_command_prints_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["bench", "kernels", folder(tmp_path, LLAMA), "--load-format", "dummy", "--device", "cpu"]
    line += ["--tokens", "2", "--context", "6", "--rounds", "1"]
    assert main(line) == 0
    text = capsys.readouterr().out
    for word in ("ceilings: memory", "GMAC/s", "linear 32 -> 64", "attention 4/2 x 8", "2 x 6", "sample"):
        assert word in text
    assert "\033" not in text
    assert main([*line, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ceilings"]["bytes_per_second"] > 0
    (linear,) = [op for op in found["ops"] if op["name"] == "linear 32 -> 64"]
    assert linear["calls"] == 3
    assert linear["multiply_adds"] == 2 * 32 * 64
    assert linear["bound"] in ("memory", "compute")


class Letters:
    """Token n is the letter n mod 26."""

    def decode(self, ids: Any, *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + i % 26) for i in ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self.decode([token_id]).encode()


def test_overhead_splits_decode_steps(tmp_path: Path) -> None:
    config = configured(tmp_path, LLAMA, "reference")
    one, many = overhead(config, [1, 3], steps=4, input_len=6, tokenizer=Letters())
    for result, requests in ((one, 1), (many, 3)):
        assert (result.requests, result.steps) == (requests, 4)
        assert set(result.parts) == set(PARTS)
        assert all(milliseconds > 0 for milliseconds in result.parts.values())
        assert 0 < result.besides < result.whole
    assert one.goal == GOALS[1]
    assert many.goal is None
    assert many.goal_met


def test_goals() -> None:
    parts = dict.fromkeys(PARTS, 0.0)
    assert StepParts(32, 1, parts, besides=1.9, whole=9.0).goal_met
    assert not StepParts(32, 1, parts, besides=2.1, whole=9.0).goal_met


def test_nested_parts_count_their_own_time() -> None:
    times = iter([0.0, 1.0, 4.0, 10.0])
    ledger = Ledger(lambda: next(times))
    ledger.start_step()
    ledger.timed("batch", lambda: ledger.timed("device", lambda: None)())()
    assert ledger.spent["device"] == 3.0
    assert ledger.spent["batch"] == 7.0
    assert ledger.spent["text"] == 0.0


def test_a_part_that_fails_leaves_the_ledger_in_order() -> None:
    ledger = Ledger(time.perf_counter)
    ledger.start_step()
    with pytest.raises(ZeroDivisionError):
        ledger.timed("batch", lambda: 1 // 0)()
    ledger.timed("text", lambda: None)()
    assert ledger.spent["batch"] > 0
    assert ledger.spent["text"] > 0
