"""SmolLM2-135M-Instruct, Q4_1: the same text as transformers, whole or in chunks, and from cached prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from hardpoint.config.engine import ModelConfig
from hardpoint.request.output import RequestOutput
from hardpoint.request.sampling import SamplingParams
from hardpoint.weights.checkpoint import open_checkpoint
from hardpoint_platforms.quant import QuantTensor

pytestmark = [pytest.mark.reference, pytest.mark.real_model]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TEXTS = (
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "The three laws of motion, first published in 1687, are the following. The first law says that a body at rest",
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=0)
SHORT = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def oracle(make_oracle: Any, smollm2_path: Any) -> Any:
    return make_oracle(smollm2_path)


#: The reference needs as long as the others together, and has transformers beside it in tests/reference/cases.
WAYS = [pytest.param(("reference", None), marks=pytest.mark.long), ("exact", None), ("exact", 16), ("torch", None)]


@pytest.fixture(scope="module", params=WAYS, ids=str)
def llm(request: Any, open_llm: Any, smollm2_path: Any) -> Iterator[Any]:
    with open_llm(smollm2_path, *request.param) as opened:
        yield opened


@pytest.fixture(scope="module")
def first(llm: Any) -> list[RequestOutput]:
    """Three prompts at once, the first through the chat template."""
    tokenizer = llm.get_tokenizer()
    chat = tokenizer.encode(tokenizer.render_chat(QUESTION, add_generation_prompt=True), add_special_tokens=False)
    prompts = [chat, *(tokenizer.encode(text) for text in TEXTS)]
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], GREEDY, use_tqdm=False)


def test_64_greedy_tokens_are_those_of_transformers(first: list[RequestOutput], oracle: Any) -> None:
    for output in first:
        assert len(output.outputs[0].token_ids) == 64
        oracle.check(output)


def test_cached_prompts_give_the_same_text(llm: Any, first: list[RequestOutput]) -> None:
    again = llm.generate([{"prompt_token_ids": o.prompt_token_ids} for o in first], SHORT, use_tqdm=False)
    for before, now in zip(first, again, strict=True):
        assert before.num_cached_tokens == 0
        whole_pages = (len(now.prompt_token_ids) - 1) // 16 * 16
        assert now.num_cached_tokens == whole_pages > 0 or len(now.prompt_token_ids) <= 16
        assert now.outputs[0].token_ids == before.outputs[0].token_ids[:12]
    assert any(output.num_cached_tokens for output in again)


def test_it_chats_sensibly(llm: Any) -> None:
    answer = llm.chat(QUESTION, SamplingParams(temperature=0.0, max_tokens=40), use_tqdm=False)[0].outputs[0]
    assert answer.text == "The capital of France is Paris."
    assert answer.finish_reason == "stop"


def test_weights_stay_quantized_until_they_are_packed(smollm2_path: Any) -> None:
    weights = open_checkpoint(ModelConfig(str(smollm2_path))).weights
    found: Counter[str] = Counter()
    for name in weights.names():
        weight = weights.load(name)
        scheme = weights.spec(name).scheme
        assert isinstance(weight, QuantTensor) == (scheme is not None), name
        found[scheme.name if scheme is not None else "plain"] += 1
    assert found == {"q4_1": 210, "q8_0": 1, "plain": 61}
