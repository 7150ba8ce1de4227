"""`hardpoint bench compare-transformers`: this engine beside `transformers` generate on the same weights, in one run.

Both get the same prompts, as many threads, and generate as many tokens greedily, whatever the tokens are: prompts of
equal length, one batch for the peer, requests that all arrive at once for the engine. Rounds are interleaved and change
places, so that noise of the machine falls on both alike; medians and their ratio are the result. The peer gets our
checkpoint's weights dequantized to float32, which spares it the conversion of a GGUF file.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hardpoint.bench.datasets import Prompt
from hardpoint.bench.offline import Generator, throughput
from hardpoint.config.engine import ModelConfig
from hardpoint.errors import ConfigError, ModelError
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


class Peer(Protocol):
    """What is measured beside the engine."""

    def generate(self, prompts: Sequence[Sequence[int]], output_len: int) -> float:
        """Output tokens per second of one greedy batch of equally long prompts."""


class TransformersPeer:
    """A transformers model in float32 with the weights of our checkpoint, its key-value cache in use."""

    def __init__(self, config: ModelConfig) -> None:
        self.model = load_peer(config)
        # It goes on after an end of text, like the engine here, and need not look for one.
        self.model.generation_config.eos_token_id = None

    def generate(self, prompts: Sequence[Sequence[int]], output_len: int) -> float:
        """Output tokens per second of one greedy batch of equally long prompts."""
        ids = torch.tensor([list(prompt) for prompt in prompts])
        start = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=output_len,
                do_sample=False,
                use_cache=True,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - start
        made = out.shape[0] * (out.shape[1] - ids.shape[1])
        if made != len(prompts) * output_len:
            raise ModelError(f"transformers made {made} tokens where {len(prompts) * output_len} were asked for")
        return made / seconds  # type: ignore[no-any-return]


def load_peer(config: ModelConfig) -> Any:
    """The transformers model of a checkpoint of ours, in float32 and evaluation mode.

    Raises ModelError where its weights have other names than ours.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    checkpoint = open_checkpoint(config)
    unwanted = ("torch_dtype", "dtype", "quantization_config")
    settings = {key: value for key, value in checkpoint.config.items() if value is not None and key not in unwanted}
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.float32)
    state = {}
    for name in checkpoint.weights.names():
        weight = checkpoint.weights.load(name)
        # A copy of its own where it may be a view of the file, which is closed below.
        state[name] = weight.dequantize(torch.float32) if isinstance(weight, QuantTensor) else weight.float().clone()
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
    peer: Peer,
    make_batch: Callable[[int], Sequence[Prompt]],
    *,
    output_len: int,
    concurrencies: Sequence[int],
    rounds: int,
    threads: int,
    on_round: Callable[[str], None] | None = None,
) -> list[Comparison]:
    """Alternate between both for each concurrency, after a short round that does not count.

    `make_batch` gives fresh prompts each time, so that no prefix is found in the cache; both get the same. `threads`:
    what the peer computes with. Raises ConfigError for prompts of unequal length.
    """

    def ours(prompts: Sequence[list[int]], tokens: int) -> float:
        return throughput(llm, prompts, tokens).output_rate

    def theirs(prompts: Sequence[list[int]], tokens: int) -> float:
        with _torch_threads(threads):
            return peer.generate(prompts, tokens)

    results = []
    for concurrency in concurrencies:
        rates: dict[Callable[..., float], list[float]] = {ours: [], theirs: []}
        warm_up = _equally_long(make_batch(concurrency))
        for run in rates:
            run(warm_up, 2)
        for number in range(rounds):
            prompts = _equally_long(make_batch(concurrency))
            for run in (ours, theirs) if number % 2 == 0 else (theirs, ours):
                rates[run].append(run(prompts, output_len))
            if on_round is not None:
                on_round(
                    f"{concurrency} at once, round {number + 1}: "
                    f"ours {rates[ours][-1]:.1f}, theirs {rates[theirs][-1]:.1f} tok/s"
                )
        results.append(Comparison(concurrency, tuple(rates[ours]), tuple(rates[theirs])))
    return results


def _equally_long(prompts: Sequence[Prompt]) -> list[list[int]]:
    ids = [prompt for prompt in prompts if not isinstance(prompt, str)]
    if len(ids) < len(prompts) or len({len(prompt) for prompt in ids}) > 1:
        raise ConfigError("transformers takes a batch of equally long prompts", hint="leave out --prompts and --spread")
    return ids


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
