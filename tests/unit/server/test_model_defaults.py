"""The model's own sampling defaults stand where a request says nothing."""

from __future__ import annotations

import pytest

from hardpoint.request.validation import RequestLimits
from hardpoint.server.openai.params import sampling_params
from hardpoint.server.openai.schemas import ChatRequest, CompletionRequest

LIMITS = RequestLimits(vocab_size=100, max_model_len=64)
DEFAULTS = {"temperature": 0.25, "top_k": 20}


@pytest.mark.parametrize(
    "body",
    [ChatRequest(messages=[{"role": "user", "content": "hi"}]), CompletionRequest(prompt="hi", temperature=None)],
)
def test_silence_takes_the_default(body):
    params = sampling_params(body, LIMITS, DEFAULTS)
    assert (params.temperature, params.top_k, params.top_p) == (0.25, 20, 1.0)


def test_a_request_has_the_last_word():
    params = sampling_params(CompletionRequest(prompt="hi", temperature=0.0, top_k=-1), LIMITS, DEFAULTS)
    assert (params.temperature, params.top_k) == (0.0, -1)
