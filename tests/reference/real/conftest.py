"""The two real models beside transformers, which gets the same dequantized weights in float32.

The oracle is asked once per text: one pass over prompt and generated tokens gives its distribution at every position.
Generation is greedy in both, so its own text is the same one as long as its best token is ours at each position.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint.bench.transformers_peer import load_peer
from hardpoint.config.engine import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from hardpoint.llm import LLM
from hardpoint.request.output import RequestOutput

#: Two logits this close may change places with the order of a sum.
TIE = 1e-4
#: Log-probabilities sum the error of a whole forward pass.
CLOSE = 5e-4
DEVICES = {
    "reference": DeviceConfig("reference"),
    "exact": DeviceConfig("cpu", numerics="exact"),
    "fast": DeviceConfig("cpu"),
    "torch": DeviceConfig("cpu", {"kernels": "torch"}),
}


class Oracle:
    """A transformers model made from our checkpoint."""

    def __init__(self, path: Path) -> None:
        self.model = load_peer(ModelConfig(str(path)))
        assert {parameter.dtype for parameter in self.model.parameters()} == {torch.float32}

    def check(self, output: RequestOutput) -> None:
        """Every generated token is the oracle's best, and has the oracle's log-probability."""
        sequence = output.outputs[0]
        prompt, generated = output.prompt_token_ids, sequence.token_ids
        with torch.inference_mode():
            ids = torch.tensor([prompt + generated[:-1]])
            logits = self.model(ids, logits_to_keep=len(generated)).logits[0]
        for place, (token, row) in enumerate(zip(generated, logits, strict=True)):
            gap = float(row.max() - row[token])
            assert gap <= TIE, f"token {place} is {token}, the oracle's {int(row.argmax())} is better by {gap}"
        assert sequence.logprobs is not None
        ours = torch.tensor(
            [position[token].logprob for position, token in zip(sequence.logprobs, generated, strict=True)]
        )
        theirs = logits.log_softmax(-1).gather(1, torch.tensor(generated)[:, None])[:, 0]
        torch.testing.assert_close(ours, theirs, atol=CLOSE, rtol=0)


@pytest.fixture(scope="session")
def make_oracle() -> Callable[[Path], Oracle]:
    return Oracle


@pytest.fixture(scope="session")
def open_llm() -> Callable[..., LLM]:
    def open_it(path: Path, device: str, max_batch_tokens: int | None, dtype: str = "float32", **model: Any) -> LLM:
        """In float32, as the oracle computes, also where a processor has units for bf16; "fast" has no such cache."""
        return LLM.from_config(
            EngineConfig(
                ModelConfig(str(path), max_model_len=512, dtype=dtype, **model),
                DEVICES[device],
                CacheConfig(num_kv_pages=256, kv_dtype="auto" if device == "fast" else "float32"),
                SchedulerConfig(max_batch_tokens=max_batch_tokens, max_num_seqs=8),
            )
        )

    return open_it
