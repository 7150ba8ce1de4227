"""`hardpoint bench compare`: children in turns, what they answer, what is told of one that fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hardpoint.bench.compare import Entry, ours_ahead, rows, table
from hardpoint.bench.workloads import workload
from hardpoint.cli.main import main
from hardpoint.errors import ConfigError

pytestmark = pytest.mark.reference

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
#: A package of the other engine's name, with the parts of its interface that are used.
VLLM = """
import os
__version__ = "0.0-test"
class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos, detokenize):
        assert temperature == 0.0 and ignore_eos and not detokenize
        self.max_tokens = max_tokens
class Out:
    def __init__(self, count): self.outputs, self.token_ids = [self], [7] * count
class LLM:
    def __init__(self, model, dtype, load_format, skip_tokenizer_init, max_model_len, max_num_seqs,
                 gpu_memory_utilization, enable_prefix_caching):
        assert load_format == "dummy" and skip_tokenizer_init and not enable_prefix_caching
        assert gpu_memory_utilization == 0.45 and max_model_len == 48 and os.path.isdir(model)
        print("noise on stdout")
    def generate(self, prompts, params, use_tqdm):
        assert all(0 <= token < 97 for prompt in prompts for token in prompt["prompt_token_ids"])
        short = {"short": 1}.get(os.environ.get("FAULT"), 0)
        if os.environ.get("FAULT") == "raise": raise RuntimeError("out of luck")
        if os.environ.get("FAULT") == "exit": os._exit(3)
        return [Out(one.max_tokens - short) for one in params]
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A comparison of a tiny model with the stand-in."""
    model, packages = tmp_path / "model", tmp_path / "packages"
    model.mkdir()
    packages.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA))
    (packages / "vllm.py").write_text(VLLM)
    monkeypatch.setenv("PYTHONPATH", str(packages))
    flags = ["--load-format", "dummy", "--device", "reference", "--max-model-len", "48", "--rounds", "2"]
    return ["bench", "compare", str(model), *flags, "--workloads", "a", "s3", "--against", "vllm"]


def test_both_run_in_turns(command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    told = capfd.readouterr()
    assert "noise" not in told.out
    assert "vllm: vllm 0.0-test" in told.out
    found = json.loads((tmp_path / "out/compare.json").read_text())
    assert [engine["name"] for engine in found["engines"]] == ["hardpoint", "vllm"]
    assert [len(taken) for engine in found["engines"] for taken in engine["seconds"].values()] == [2, 2, 2, 2]
    assert [row["workload"] for row in found["rows"]] == ["a", "s3", "start"]
    assert (tmp_path / "out/compare.md").read_text().count("|") > 20


@pytest.mark.parametrize(
    ("fault", "told"),
    [("raise", "vllm: RuntimeError: out of luck"), ("exit", "vllm ended (exit code 3)"), ("short", "not 24")],
)
def test_one_that_fails_is_named(
    command: list[str], fault: str, told: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAULT", fault)
    assert main(command) != 0
    assert told in capfd.readouterr().err


@pytest.mark.parametrize("flags", [["--workloads", "x"], ["--workloads", "s0"], ["--against", "nobody"]])
def test_bad_names_start_nothing(command: list[str], flags: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*command, *flags]) != 0
    err = capfd.readouterr().err
    assert flags[1] in err
    assert "ready in" not in err


def test_all_flags_of_the_engine_reach_it(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--kernel", "rope=acme"]) != 0
    assert "hardpoint: UnsupportedOperation: nobody takes rope" in capfd.readouterr().err


def test_numbers_and_ratios() -> None:
    ours = Entry("hardpoint", "h", 2.0, {"a": [0.256], "s2": [1.0, 0.5, 2.0]})
    theirs = Entry("vllm", "v", 6.0, {"a": [0.512], "s2": [2.0, 2.0, 2.0]})
    found = rows([ours, theirs], 97, 4096)
    assert found[0].numbers == (1.0, 2.0)
    assert found[1].numbers == (256.0, 128.0)
    assert [ours_ahead(row, 1) for row in found] == [2.0, 2.0, 3.0]
    assert "| s2 | output tok/s | 256 | 128 | 2.00x |" in table([ours, theirs], found)


def test_workloads_are_seeded_and_cut() -> None:
    assert workload("c", 1000) == workload("c", 1000)
    assert workload("c", 1000) != workload("c", 1000, seed=1)
    work = workload("d", 1000, longest=100)
    assert {len(prompt) for prompt in work.prompts} == {50}
    assert 15_000 < workload("c", 1000).output_tokens / 5 < 21_000
    with pytest.raises(ConfigError, match="'q'"):
        workload("q", 10)
