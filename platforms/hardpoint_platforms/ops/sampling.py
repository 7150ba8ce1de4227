"""Contracts: drawing tokens, log-probabilities, verification of drafts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hardpoint_platforms.batch import LogitBias, Penalties, SamplingInputs
from hardpoint_platforms.ops.contract import Altitude, OpContract, Sample, Tolerance
from hardpoint_platforms.ops.samples import Source, sample
from hardpoint_platforms.reference.sampling import build_logprobs, build_sample, build_verify
from hardpoint_platforms.versioning import Version

#: Logits are float32 whatever the model computes in; tokens must be equal.
_TOLERANCE = dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), Tolerance(1e-5, 1e-5))


def sampling_inputs(rows: int, **changes: Any) -> SamplingInputs:
    """Inputs of `rows` draws at temperature 1 with every filter off; a number stands for the same in each row."""

    def column(name: str, default: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(changes.pop(name, default), dtype=dtype).expand(rows).clone()

    return SamplingInputs(
        temperature=column("temperature", 1.0, torch.float32),
        top_k=column("top_k", 0, torch.int64),
        top_p=column("top_p", 1.0, torch.float32),
        min_p=column("min_p", 0.0, torch.float32),
        seeds=column("seeds", list(range(100, 100 + rows)), torch.int64),
        positions=column("positions", list(range(rows)), torch.int64),
        **changes,
    )


def _penalties(s: Source, rows: int, vocab: int, length: int = 12) -> Penalties:
    history = s.integers(0, vocab, rows, length)
    for row in range(rows):
        history[row, length - row % 4 :] = vocab
    return Penalties(
        history,
        s.integers(0, length, rows),
        s.uniform(rows, low=-1.0),
        s.uniform(rows, low=-1.0),
        s.uniform(rows, low=0.5, high=2.0),
    )


def _allowed(s: Source, rows: int, vocab: int) -> torch.Tensor:
    words = -(-vocab // 32)
    return s.integers(-(1 << 31), 1 << 31, rows, words).to(torch.int32)


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    def case(where: str, rows: int, vocab: int = 131, **changes: Any) -> Sample:
        def make(s: Source) -> tuple[Any, ...]:
            logits = s.normal(rows, vocab, scale=3.0)
            made = {name: value(s) if callable(value) else value for name, value in changes.items()}
            return logits, sampling_inputs(rows, **made)

        return sample(SAMPLE, where, torch.float32, make)

    yield case("greedy", 4, temperature=0.0, all_greedy=True)
    yield case("greedy and drawn", 4, temperature=[0.0, 1.0, 0.0, 0.3], filters=False)
    yield case("one row", 1, filters=False)
    yield case("top-k", 5, top_k=[1, 3, 0, 131, 1000])
    yield case("top-p", 5, top_p=[0.1, 0.5, 0.9, 1.0, 1e-6])
    yield case("min-p", 3, min_p=[0.0, 0.1, 1.0])
    yield case("all filters", 4, top_k=[5, 0, 20, 2], top_p=[0.9, 0.8, 1.0, 0.5], min_p=[0.0, 0.05, 0.1, 0.0])
    yield case("large vocabulary", 3, vocab=5000, top_k=[40, 0, 3000], top_p=[0.95, 0.999, 1.0])
    yield case("tiny temperature", 2, temperature=[1e-5, 1e-30])
    yield case("allowed tokens", 3, allowed=lambda s: _allowed(s, 3, 131), filters=False)
    yield case("penalties", 4, penalties=lambda s: _penalties(s, 4, 131), temperature=[0.0, 1.0, 0.5, 0.0])
    yield case(
        "bias",
        2,
        bias=LogitBias(torch.tensor([0, 0, 1]), torch.tensor([3, 3, 130]), torch.tensor([50.0, 50.0, float("-inf")])),
    )
    yield case("log-probabilities", 3, num_logprobs=5, temperature=[0.0, 1.0, 2.0])
    yield case("more log-probabilities than tokens", 2, vocab=7, num_logprobs=20)


def _logprob_samples(dtype: torch.dtype) -> Iterator[Sample]:
    def case(rows: int, vocab: int, k: int) -> Sample:
        def make(s: Source) -> tuple[Any, ...]:
            return s.normal(rows, vocab, scale=4.0), s.integers(0, vocab, rows), k

        return sample(LOGPROBS, f"{rows} of {vocab}, top {k}", torch.float32, make)

    yield case(4, 97, 5)
    yield case(1, 97, 0)
    yield case(3, 11, 20)
    yield case(2, 5000, 20)


def _verify_samples(dtype: torch.dtype) -> Iterator[Sample]:
    def case(where: str, probabilities: bool, **changes: Any) -> Sample:
        def make(s: Source) -> tuple[Any, ...]:
            rows, depth, vocab = 5, 3, 23
            logits = s.normal(rows, depth + 1, vocab, scale=2.0)
            drafts = logits[:, :depth].argmax(-1)
            drafts[1::2, 1] = 0
            probs = s.normal(rows, depth, vocab, scale=2.0).softmax(-1) if probabilities else None
            inputs = sampling_inputs(rows * (depth + 1), **changes)
            return logits, drafts, torch.tensor([3, 3, 2, 1, 0]), probs, inputs

        return sample(VERIFY, where, torch.float32, make)

    yield case("greedy", False, temperature=0.0, all_greedy=True)
    yield case("drawn, certain draft", False)
    yield case("drawn, draft with probabilities", True)
    yield case("greedy, draft with probabilities", True, temperature=0.0)
    yield case("filters", True, top_k=8, top_p=0.9)


SAMPLE = OpContract(
    name="sample",
    version=Version(1, 0),
    altitude=Altitude.COMPOSITE,
    signature="sample(logits: float32 [R, V], inputs: SamplingInputs) -> SampleResult",
    doc=(
        "Order of work: allowed mask, bias, penalties (repetition, frequency, presence), temperature, min-p, top-k, "
        "top-p, draw. Of equal weights the lower id comes first, in the argmax and in top-k and top-p. The draw is "
        "canonical, so that a seed gives the same tokens on every platform: u in [0, 1) is "
        "`hardpoint_platforms.reference.draw.uniform(seed, position)`, a counter-based generator (SplitMix64's "
        "finalizer, integers alone), and the token is the first, in the order of ids, at which the running sum of the "
        "weights left exceeds u times their sum. Rounding may choose the neighbour where u lies at the border between "
        "two tokens, by 2**-14 of the sum at most."
    ),
    attributes={},
    reference=build_sample,
    samples=_samples,
    tolerance=_TOLERANCE,
)

LOGPROBS = OpContract(
    name="logprobs",
    version=Version(1, 0),
    altitude=Altitude.PRIMITIVE,
    signature="logprobs(logits: float32 [N, V], token_ids: int64 [N], k: int) -> Logprobs",
    doc="Log-softmax at the given tokens, their ranks, and the min(k, V) likeliest tokens.",
    attributes={},
    reference=build_logprobs,
    samples=_logprob_samples,
    tolerance=_TOLERANCE,
)

VERIFY = OpContract(
    name="verify",
    version=Version(1, 0),
    altitude=Altitude.COMPOSITE,
    signature=(
        "verify(logits: float32 [R, K + 1, V], draft_ids: int64 [R, K], draft_lengths: int64 [R], "
        "draft_probs: float32 [R, K, V] or None, inputs: SamplingInputs of R * (K + 1) rows) -> VerifyResult"
    ),
    doc=(
        "Speculative sampling (Leviathan et al. 2023): the accepted beginning of each draft and one token more, "
        "distributed as the target alone would. Row r * (K + 1) + j of the inputs belongs to place j of request r. "
        "Without draft_probs the draft counts as certain, and the tokens are those that `sample` would draw."
    ),
    attributes={},
    reference=build_verify,
    samples=_verify_samples,
    tolerance=_TOLERANCE,
)
