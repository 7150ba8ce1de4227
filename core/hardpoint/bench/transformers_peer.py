"""`hardpoint bench compare-transformers`: this engine beside `transformers` generate on the same weights, in one run.

Rounds are interleaved, so that noise of the machine falls on both alike; medians and their ratios are the result. The
peer gets our checkpoint's weights dequantized to float32, which spares it the conversion of a GGUF file.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hardpoint.bench.offline import Generator, throughput
from hardpoint.config.engine import ModelConfig
from hardpoint.errors import ModelError
from hardpoint.weights.checkpoint import open_checkpoint
from hardpoint_platforms.quant import QuantTensor


@dataclass(frozen=True)
class Comparison:
    """Output tokens per second at one concurrency, all rounds."""

    concurrency: int
    ours: tuple[float, ...]
    theirs: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Median of ours by median of theirs."""
        return statistics.median(self.ours) / statistics.median(self.theirs)


class TransformersPeer:
    """A transformers model in float32 with the weights of our checkpoint."""

    def __init__(self, config: ModelConfig) -> None:
        self.model = load_peer(config)
        self.vocab_size = int(self.model.config.vocab_size)

    def generate(self, prompts: Sequence[Sequence[int]], output_len: int) -> float:
        """Output tokens per second of one greedy batch of equally long prompts."""
        ids = torch.tensor([list(prompt) for prompt in prompts])
        start = time.perf_counter()
        with torch.inference_mode():
            self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=output_len,
                min_new_tokens=output_len,
                do_sample=False,
                pad_token_id=0,
            )
        return len(prompts) * output_len / (time.perf_counter() - start)


def load_peer(config: ModelConfig) -> Any:
    """The transformers model of a checkpoint of ours, in float32 and evaluation mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    checkpoint = open_checkpoint(config)
    unwanted = ("torch_dtype", "dtype", "quantization_config")
    settings = {key: value for key, value in checkpoint.config.items() if value is not None and key not in unwanted}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.float32)
    state = {}
    for name in checkpoint.weights.names():
        weight = checkpoint.weights.load(name)
        plain = weight.dequantize(torch.float32) if isinstance(weight, QuantTensor) else weight.float()
        state[name] = plain.clone()
    checkpoint.weights.close()
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    tied = set(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else set()
    if unexpected or set(missing) - tied:
        raise ModelError(
            f"the weights of {config.model} and of transformers' {type(model).__name__} have different names: "
            f"missing {sorted(set(missing) - tied)[:3]}, unexpected {sorted(unexpected)[:3]}"
        )
    return model.eval()


def compare(
    llm: Generator,
    peer: TransformersPeer,
    make_batch: Callable[[int], Sequence[list[int]]],
    *,
    output_len: int,
    concurrencies: Sequence[int],
    rounds: int,
    threads: int,
    on_round: Callable[[str], None] | None = None,
) -> list[Comparison]:
    """Alternate between both for each concurrency. `threads`: what the peer computes with."""
    results = []
    for concurrency in concurrencies:
        ours, theirs = [], []
        for number in range(rounds):
            ours.append(throughput(llm, make_batch(concurrency), output_len).output_rate)
            own_threads = torch.get_num_threads()
            torch.set_num_threads(threads)
            try:
                theirs.append(peer.generate(make_batch(concurrency), output_len))
            finally:
                torch.set_num_threads(own_threads)
            if on_round is not None:
                on_round(
                    f"{concurrency} at once, round {number + 1}: ours {ours[-1]:.1f}, theirs {theirs[-1]:.1f} tok/s"
                )
        results.append(Comparison(concurrency, tuple(ours), tuple(theirs)))
    return results
