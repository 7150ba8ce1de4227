"""Drawing tokens, log-probabilities and verification of drafts by the Triton kernels.

No call reads a device value or makes a shape of one, so each may be recorded in a graph. Passes that the host knows to
be needless (no row draws, no filters, no penalties) are left out.
"""

from __future__ import annotations

import torch

from hardpoint_platforms.batch import Logprobs, SampleResult, SamplingInputs, VerifyResult
from hardpoint_platforms.ops.contract import Kernel, OpInstance
from hardpoint_platforms.ops.provider import OpProvider, Support
from hardpoint_platforms.ops.sampling import VERIFY
from hardpoint_platforms.reference.sampling import assemble
from hardpoint_platforms.versioning import Version
from hardpoint_torch_gpu.kernels.argmax import first_largest
from hardpoint_torch_gpu.kernels.sample_adjust import adjusted
from hardpoint_torch_gpu.kernels.sample_draw import draw
from hardpoint_torch_gpu.kernels.sample_filter import edges_of
from hardpoint_torch_gpu.kernels.sample_score import score

_ONE = Version(1, 0)


def draw_tokens(logits: torch.Tensor, inputs: SamplingInputs, block: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 [R] of raw logits float32 [R, V], contiguous; whether their largest is finite, bool [R].

    block: tokens per piece of the vocabulary, a power of two; 0 is what suits V. A row's draw depends on it by rounding
    alone.
    """
    if not len(logits):
        return inputs.positions.new_zeros(0), inputs.positions.new_zeros(0, dtype=torch.bool)
    summed = not inputs.all_greedy and not inputs.filters
    x, temperature, pieces = adjusted(logits, inputs, summed, block)
    if inputs.all_greedy:
        return first_largest(pieces)
    edges = edges_of(x, temperature, inputs, pieces) if inputs.filters else None
    return draw(x, temperature, inputs, pieces, edges)


def scores(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> Logprobs:
    """logprobs(logits[N, V], token_ids[N], k): of any floating type and stride."""
    rows = logits.to(torch.float32).contiguous()
    if not len(rows):
        none = rows.new_zeros((0, min(k, rows.shape[1])))
        return Logprobs(rows.new_zeros(0), token_ids.new_zeros(0), none.long(), none)
    return score(rows, token_ids, k)


class TritonSample(OpProvider):
    """The draw of a step."""

    name, op, version = "triton sample", "sample", _ONE

    def supports(self, instance: OpInstance) -> Support:
        return Support(True, "canonical draws, no sort over the vocabulary")

    def build(self, instance: OpInstance) -> Kernel:
        def sample(logits: torch.Tensor, inputs: SamplingInputs) -> SampleResult:
            raw = logits.to(torch.float32).contiguous()
            tokens, finite = draw_tokens(raw, inputs)
            wanted = inputs.num_logprobs
            return SampleResult(tokens, None if wanted is None else scores(raw, tokens, wanted), finite)

        return sample


class TritonLogprobs(OpProvider):
    """Log-probabilities of given tokens."""

    name, op, version = "triton logprobs", "logprobs", _ONE

    def supports(self, instance: OpInstance) -> Support:
        return Support(True, "no sort over the vocabulary")

    def build(self, instance: OpInstance) -> Kernel:
        return scores


class TritonVerify(OpProvider):
    """Verification of drafts: those without probabilities by the draws of `sample`, others by torch."""

    name, op, version = "triton verify", "verify", _ONE

    def supports(self, instance: OpInstance) -> Support:
        return Support(True, "drafts with probabilities by torch")

    def build(self, instance: OpInstance) -> Kernel:
        assert VERIFY.reference is not None
        general = VERIFY.reference(instance)

        def verify(
            logits: torch.Tensor,
            draft_ids: torch.Tensor,
            draft_lengths: torch.Tensor,
            draft_probs: torch.Tensor | None,
            inputs: SamplingInputs,
        ) -> VerifyResult:
            if draft_probs is not None:
                judged: VerifyResult = general(logits, draft_ids, draft_lengths, draft_probs, inputs)
                return judged
            rows, depth = draft_ids.shape
            flat = logits.flatten(0, 1).to(torch.float32).contiguous()
            own = draw_tokens(flat, inputs)[0].view(rows, depth + 1)
            return assemble(own, own[:, :depth] == draft_ids, draft_ids, draft_lengths)

        return verify
