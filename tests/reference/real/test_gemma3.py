"""Gemma 3 270M, a base model of Q5_0, Q4_K, Q6_K and Q8_0 tensors with sliding windows: the text of transformers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from hardpoint.config.engine import ModelConfig
from hardpoint.errors import RequestError
from hardpoint.request.output import RequestOutput
from hardpoint.request.sampling import SamplingParams
from hardpoint.weights.checkpoint import open_checkpoint
from hardpoint_platforms.quant import QuantTensor

pytestmark = [pytest.mark.reference, pytest.mark.real_model]

TEXTS = (
    "The capital of France is",
    "Here is a short poem about the sea, written for children who have never seen it:\n",
    "import json\n\n\ndef read_config(path):\n    with open(path) as file:\n        return",
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=0)
SHORT = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def oracle(make_oracle: Any, gemma3_path: Any) -> Any:
    return make_oracle(gemma3_path)


@pytest.fixture(scope="module", params=[("exact", 16)], ids=str)
def llm(request: Any, open_llm: Any, gemma3_path: Any) -> Iterator[Any]:
    with open_llm(gemma3_path, *request.param) as opened:
        yield opened


@pytest.fixture(scope="module")
def first(llm: Any) -> list[RequestOutput]:
    return llm.generate(list(TEXTS), GREEDY, use_tqdm=False)


def test_64_greedy_tokens_are_those_of_transformers(first: list[RequestOutput], oracle: Any) -> None:
    for output in first:
        assert output.prompt_token_ids[0] == 2  # begin of text, once
        assert output.prompt_token_ids[1] != 2
        assert len(output.outputs[0].token_ids) == 64
        oracle.check(output)


def test_cached_prompts_give_the_same_text(llm: Any, first: list[RequestOutput]) -> None:
    again = llm.generate(list(TEXTS), SHORT, use_tqdm=False)
    for before, now in zip(first, again, strict=True):
        assert now.outputs[0].token_ids == before.outputs[0].token_ids[:12]
    assert any(output.num_cached_tokens for output in again)


def test_it_completes_sensibly(first: list[RequestOutput]) -> None:
    assert "the largest city in France" in first[0].outputs[0].text
    assert "json.load" in first[2].outputs[0].text


def test_a_chat_is_refused_with_the_reason(llm: Any) -> None:
    with pytest.raises(RequestError, match="no chat template"):
        llm.chat([{"role": "user", "content": "Hello"}], use_tqdm=False)


def test_weights_stay_quantized_until_they_are_packed(gemma3_path: Any) -> None:
    weights = open_checkpoint(ModelConfig(str(gemma3_path))).weights
    found: Counter[str] = Counter()
    for name in weights.names():
        scheme = weights.spec(name).scheme
        if scheme is None or found[scheme.name] < 3:
            assert isinstance(weights.load(name), QuantTensor) == (scheme is not None), name
        found[scheme.name if scheme is not None else "plain"] += 1
    assert found == {"q5_0": 81, "q4_k": 27, "q6_k": 9, "q8_0": 10, "plain": 109}
