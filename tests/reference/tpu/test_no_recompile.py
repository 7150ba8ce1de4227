"""After it is ready nothing is compiled, whatever requests ask for.

HARDPOINT_TPU_TRACE_SECONDS=600 runs the random trace for ten minutes.
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest
import torch

pytest.importorskip("jax")

from hardpoint_tpu.platform import TpuPlatform
from tpu_bench import FAST

from hardpoint.conformance.tiny import SMALL, Crowd
from hardpoint.protocol.messages import EngineRequest
from hardpoint.request.sampling import SamplingParams

pytestmark = pytest.mark.reference

VOCAB = SMALL["vocab_size"]


def anything(rng: random.Random, name: str) -> EngineRequest:
    """A request that asks for whatever a step may have to do."""
    length = rng.choice([1, 2, 7, 15, 16, 17, 23, 40, 70])
    asked: dict[str, Any] = {"temperature": rng.choice([0.0, 0.0, 0.7, 1.3]), "seed": rng.getrandbits(40)}
    extras: list[dict[str, Any]] = [
        {"top_k": rng.randint(1, 20)},
        {"top_p": 0.9, "min_p": 0.02},
        {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.2},
        {"logit_bias": {rng.randrange(VOCAB): 5.0 for _ in range(rng.randint(1, 9))}},
        {"bad_words_ids": tuple(_word(rng) for _ in range(rng.randint(1, 40)))},
        {"allowed_token_ids": tuple(range(rng.randint(5, VOCAB)))},
        {"min_tokens": 2, "stop_token_ids": (3, 4)},
        {"logprobs": rng.randint(2, 20)},
        {"prompt_logprobs": rng.randint(0, 20)},
    ]
    for extra in rng.sample(extras, rng.choice([0, 0, 1, 3])):
        asked |= extra
    params = SamplingParams(max_tokens=rng.randint(3, 20), ignore_eos=True, **asked)
    return EngineRequest(request_id=name, prompt=[rng.randrange(VOCAB) for _ in range(length)], params=params)


def _word(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 3, 9, 12, 20])))


def test_a_random_trace_compiles_nothing() -> None:
    device: Any = TpuPlatform().open(0, {**FAST, "shapes": "each"})
    try:
        served = Crowd(device, "llama", torch.float32, torch.float32, 16)
        rng, seconds = random.Random(11), float(os.environ.get("HARDPOINT_TPU_TRACE_SECONDS", "0"))
        ended, rounds = time.monotonic() + seconds, 0
        while rounds < 6 or time.monotonic() < ended:
            answers = served.serve([anything(rng, f"request {rounds}.{n}") for n in range(8)])
            assert len(answers) == 7, "the eighth is aborted on the way"
            assert device.late_compiles == 0, f"in round {rounds}"
            rounds += 1
    finally:
        device.close()
