"""`--kernel`: the named provider runs the named ops, everything else is as before, and so are the tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hardpoint.cli.main import main
from hardpoint.config.engine import DeviceConfig, EngineConfig, ModelConfig
from hardpoint.config.kernels import parse_kernel_choice
from hardpoint.engine.build import build_engine, explain_model
from hardpoint.errors import ConfigError
from hardpoint.protocol.messages import EngineRequest
from hardpoint.request.sampling import SamplingParams
from hardpoint_platforms.errors import UnsupportedOperation

pytestmark = pytest.mark.reference

LLAMA = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path)


def config(model: str, *choices: str) -> EngineConfig:
    kernels = tuple(map(parse_kernel_choice, choices))
    return EngineConfig(
        ModelConfig(model, load_format="dummy"), DeviceConfig("cpu", kernels=kernels, on_fallback="allow")
    )


def providers(model: str, *choices: str) -> dict[tuple[str, str], tuple[str, list[str]]]:
    ((_, bindings),) = explain_model(config(model, *choices))
    return {(b.instance.op, b.instance.where): (b.provider, [r.reason for r in b.refused]) for b in bindings}


def test_the_named_ops_and_no_others(model: str) -> None:
    before, after = providers(model), providers(model, "attention[layers.1.*]=reference")
    changed = {place for place in before if before[place][0] != after[place][0]}
    assert {op for op, _ in changed} == {"attention"}
    assert {where.split(".")[1] for _, where in changed} == {"1"}
    for place in changed:
        provider, reasons = after[place]
        assert provider == "reference"
        assert "--kernel attention[layers.1.*]=reference" in reasons


def test_the_last_of_several_counts(model: str) -> None:
    found = providers(model, "*=reference", "linear=native")
    assert {provider for (op, _), (provider, _) in found.items() if op == "linear"} == {"native linear"}
    assert {provider for (op, _), (provider, _) in found.items() if op == "rope"} == {"reference"}


def test_tokens_stay_the_same(model: str) -> None:
    def tokens(*choices: str) -> dict[str, list[int]]:
        engine, made = build_engine(config(model, *choices)).engine, {"a": [], "b": []}  # type: ignore[var-annotated]
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        for name, prompt in (("a", [1, 2, 3]), ("b", list(range(20)))):
            engine.add(EngineRequest(request_id=name, prompt=prompt, params=params))
        while engine.has_work:
            for output in engine.step().outputs:
                made[output.request_id] += output.token_ids
        engine.close()
        return made

    assert tokens() == tokens("attention=reference", "linear=reference")


def test_a_choice_that_nobody_can_follow_is_told(model: str) -> None:
    with pytest.raises(UnsupportedOperation, match=r"nobody takes rope.*--kernel rope\[\*\]=acme"):
        providers(model, "rope=acme")
    with pytest.raises(ConfigError, match="no such op"):
        providers(model, "convolution=reference")


def test_from_the_command_line(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--load-format", "dummy", "--device", "cpu", "--kernel", "rope=reference"]
    assert main(["explain", model, *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["provider"] for row in found if row["op"] == "rope"} == {"reference"}
