"""Native sampling and log-probabilities: the reference's own draw, without its sorts."""

from __future__ import annotations

import torch

from hardpoint_cpu.native.abi import Code
from hardpoint_cpu.native.provider import NativeProvider
from hardpoint_cpu.native.stage import Stage
from hardpoint_platforms.batch import Logprobs, SampleResult, SamplingInputs
from hardpoint_platforms.ops.contract import Kernel, OpInstance
from hardpoint_platforms.ops.provider import Support


class NativeSample(NativeProvider):
    """Bias and penalties in place, then mask, filters and draw in one op; greedy batches take the argmax."""

    name = "native sample"
    op = "sample"
    code = Code.SAMPLE

    def takes(self, instance: OpInstance) -> Support:
        return Support(True, "no sort")

    def build(self, instance: OpInstance) -> Kernel:
        stage = self.stage

        def kernel(logits: torch.Tensor, inputs: SamplingInputs) -> SampleResult:
            if stage.recording is not None:
                return stage.recording.sample(kernel, logits)
            return _sample(stage, logits.contiguous(), inputs)

        return kernel


class NativeLogprobs(NativeProvider):
    """Log-softmax at given tokens, ranks, and the likeliest tokens."""

    name = "native logprobs"
    op = "logprobs"
    code = Code.LOGPROBS

    def takes(self, instance: OpInstance) -> Support:
        return Support(True, "no sort")

    def build(self, instance: OpInstance) -> Kernel:
        stage = self.stage
        return lambda logits, token_ids, k: _score(stage, logits, token_ids, k)


def takes_largest(inputs: SamplingInputs) -> bool:
    """Whether a draw is the place of each row's largest logit, and nothing else is asked for."""
    return inputs.all_greedy and inputs.num_logprobs is None and _as_they_are(inputs)


def _as_they_are(inputs: SamplingInputs) -> bool:
    """Whether nothing changes the logits before the draw."""
    return inputs.bias is None and inputs.penalties is None and inputs.allowed is None


def _sample(stage: Stage, logits: torch.Tensor, inputs: SamplingInputs) -> SampleResult:
    rows, vocab = logits.shape
    ids, finite = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool)
    plain = _as_they_are(inputs)
    # The ops below write into the logits, which belong to the caller; log-probabilities are those of the raw ones.
    work = logits if plain else logits.clone()
    if plain and inputs.all_greedy:
        stage.call(Code.ARGMAX, rows, (work, ids, finite), (vocab, vocab))
    else:
        _change(stage, work, inputs)
        _draw(stage, work, inputs, ids, finite)
    if inputs.num_logprobs is None:
        return SampleResult(ids, finite=finite)
    return SampleResult(ids, _score(stage, logits, ids, inputs.num_logprobs), finite=finite)


def _change(stage: Stage, logits: torch.Tensor, inputs: SamplingInputs) -> None:
    """Add biases, then penalize, in place. What the mask forbids stays forbidden by both, so that it may come after."""
    rows, vocab = logits.shape
    bias, penalties = inputs.bias, inputs.penalties
    if bias is not None:
        parts = (bias.rows.contiguous(), bias.tokens.contiguous(), bias.values.contiguous())
        stage.call(Code.BIAS, rows, (logits, *parts, None), (vocab, vocab, parts[0].shape[0]))
    if penalties is not None:
        lengths = penalties.prompt_lengths.contiguous()
        history = penalties.history.contiguous()
        factors = [part.contiguous() for part in (penalties.presence, penalties.frequency, penalties.repetition)]
        length = history.shape[1]
        stage.call(Code.PENALTIES, rows, (logits, history, lengths, *factors, None), (vocab, vocab, length, length))


def _draw(stage: Stage, logits: torch.Tensor, inputs: SamplingInputs, ids: torch.Tensor, finite: torch.Tensor) -> None:
    rows, vocab = logits.shape
    filters: tuple[torch.Tensor | None, ...] = (None, None, None)
    if inputs.filters:
        filters = (inputs.top_k.contiguous(), inputs.top_p.contiguous(), inputs.min_p.contiguous())
    places = (inputs.seeds.contiguous(), inputs.positions.contiguous())
    allowed = None if inputs.allowed is None else inputs.allowed.contiguous()
    words = 0 if allowed is None else allowed.shape[1]
    pointers = (logits, inputs.temperature.contiguous(), *filters, *places, ids, finite, allowed)
    stage.call(Code.SAMPLE, rows, pointers, (vocab, vocab, words))


def _score(stage: Stage, logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> Logprobs:
    logits, token_ids = logits.contiguous(), token_ids.contiguous()
    rows, vocab = logits.shape
    count = min(k, vocab)
    chosen, rank = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    ids, top = torch.empty((rows, count), dtype=torch.int64), torch.empty((rows, count))
    stage.call(Code.LOGPROBS, rows, (logits, token_ids, chosen, rank, ids, top), (vocab, vocab, count))
    return Logprobs(chosen, rank, ids, top)
