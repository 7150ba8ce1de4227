"""Quantized checkpoints through a whole engine: greedy tokens and log-probabilities are those of transformers.

transformers runs on the plain weights that the checkpoint stands for, and rounds the inputs of products where the
checkpoint's format does. Every format's weights, one by one: tests/reference/models/quantized.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint import SamplingParams

if (FORMATS_AT := str(Path(__file__).parents[1] / "models" / "quantized")) not in sys.path:
    sys.path.insert(0, FORMATS_AT)

from formats import FORMATS, Pair, rounded_inputs, write_pair

pytestmark = pytest.mark.reference

COUNT = 12
PARAMS = SamplingParams(temperature=0.0, max_tokens=COUNT, logprobs=1, ignore_eos=True)


@pytest.fixture(scope="module")
def written(make_llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """written(format) -> Pair of a Llama whose rows end inside blocks of scales."""
    made: dict[str, Pair] = {}

    def write(name: str) -> Pair:
        if name not in made:
            saved = make_llama(head_dim=24)
            made[name] = write_pair(saved, tmp_path_factory.mktemp(name), FORMATS[name])
        return made[name]

    return write


def _greedy(pair: Pair, prompt: list[int]) -> tuple[list[int], list[float]]:
    """The oracle's tokens and their log-probabilities."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(pair.plain, attn_implementation="eager", dtype=torch.float32)
    ids, logprobs = list(prompt), []
    with torch.no_grad(), rounded_inputs(model, pair.form.rounding):
        for _ in range(COUNT):
            best = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1).max(-1)
            ids.append(int(best.indices))
            logprobs.append(float(best.values))
    return ids[len(prompt) :], logprobs


#: Traced on the strict device as well; there each takes seconds.
STRICT = ("fp8-block", "ct-int8-channel", "gptq4")


@pytest.mark.parametrize("name", [*STRICT, "fp8-static", "ct-int4-zeros", "ct-int4-sorted", "gptq8-zeros", "awq"])
@pytest.mark.parametrize("where", ["reference", "device"])
def test_greedy_equals_transformers(
    name: str, where: str, written: Any, device: str, start: Any, prompt_of: Any
) -> None:
    if device == "strict" and (where == "reference" or name not in STRICT):
        pytest.skip("seen on the other devices")
    pair, prompt = written(name), prompt_of(30)
    tokens, logprobs = _greedy(pair, prompt)
    answer = start(pair.folder, device="reference" if where == "reference" else device).ask_one(prompt, PARAMS)
    assert answer.token_ids == tokens
    found = [position[token].logprob for position, token in zip(answer.logprobs, tokens, strict=True)]
    # where inputs are rounded, a sum that ends in another bit may round one of them the other way
    assert found == pytest.approx(logprobs, abs=1e-4 if pair.form.rounding is None else 3e-2)
