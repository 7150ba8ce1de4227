"""A model whose layers lie on two platforms answers as on one; and two platforms serve side by side in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import Driver, assert_same
from tiny_models import llama_config, save_tokenizer

from hardpoint import SamplingParams
from hardpoint.errors import ConfigError

pytestmark = pytest.mark.reference

SPLITS = (
    "layers[:1]=reference,layers[1:]=cpu",
    "layers[0:1]=cpu,layers[1:]=reference",
    "layers[:1]=strict,layers[1:]=cpu",
    "layers[:1]=cpu,layers[1:]=strict",
)
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.2, "seed": 5, "top_p": 0.9},
    {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
    {"temperature": 0.8, "seed": 6, "repetition_penalty": 1.4, "min_tokens": 4, "logit_bias": {7: 3.0}},
)


def _requests(prompt_of: Any) -> list[tuple[list[int], SamplingParams]]:
    lengths = (1, 5, 16, 33, 60)
    return [
        (prompt_of(length, seed=length), SamplingParams(**({"max_tokens": 12, "ignore_eos": True} | kind)))
        for length in lengths
        for kind in KINDS
    ]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("split", SPLITS)
def test_a_split_model_answers_as_a_whole_one(split: str, overlap: bool, tiny: Any, start: Any, prompt_of: Any) -> None:
    requests = _requests(prompt_of)
    whole: Driver = start(tiny, device="reference", prefix_caching=False)
    wanted = [whole.ask_one(*request) for request in requests]
    driver: Driver = start(tiny, device=split, overlap=overlap, budget=48, pages=64)
    names = [driver.submit(*request) for request in requests]
    driver.run()
    for name, answer in zip(names, wanted, strict=True):
        assert_same(name[0], answer)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two full layers among six with a window, so that the parts hold unlike shares of the groups."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    base = {name: value for name, value in llama_config(num_hidden_layers=6).items() if name != "architectures"}
    facts = base | {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 16, "layer_types": kinds}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**facts), dtype=torch.float32)
    source = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=source) * (0.2 if weight.dim() > 1 else 0.1))
    folder = tmp_path_factory.mktemp("windowed")
    model.save_pretrained(folder)
    save_tokenizer(folder, [])
    return folder


def test_groups_with_windows_and_three_parts(windowed: Path, start: Any) -> None:
    prompts = [[2 + (7 * at + n) % 250 for at in range(n)] for n in (3, 50)]
    requests = [(prompt, SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)) for prompt in prompts]
    wanted = [start(windowed, device="reference").ask_one(*request) for request in requests]
    assert len({token for answer in wanted for token in answer.token_ids}) > 5
    driver = start(windowed, device="layers[0:2]=cpu,layers[2:4]=reference,layers[4:]=cpu")
    assert driver.info.device.count("cpu:0") == 2
    for request, answer in zip(requests, wanted, strict=True):
        assert_same(driver.ask_one(*request), answer)


def test_the_story_names_both_devices(tiny: Any, start: Any) -> None:
    info = start(tiny, device=SPLITS[0]).info
    assert info.device == "reference:0 (layers 0-0) + cpu:0 (layers 1-1)"


def test_a_placement_that_does_not_fit_the_model(tiny: Any) -> None:
    with pytest.raises(ConfigError, match="the model has layers 0 to 1"):
        Driver(tiny, device="layers[0:9]=reference")


def test_two_platforms_side_by_side(tiny: Any, start: Any, prompt_of: Any) -> None:
    """A draft on one device, its target on another, in one process, steps interleaved."""
    request = (prompt_of(20, seed=1), SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    target, draft = start(tiny, device="reference", overlap=False), start(tiny, device="cpu", overlap=False)
    answers = [target.submit(*request), draft.submit(*request)]
    while target.engine.has_work or draft.engine.has_work:
        target.step()
        draft.step()
    assert_same(answers[1][0], answers[0][0])
