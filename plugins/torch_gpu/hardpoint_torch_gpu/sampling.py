"""Drawing tokens: greedy rows by one pass over the logits; everything else by the reference's torch ops on the GPU."""

from __future__ import annotations

import torch

from hardpoint_platforms.batch import SampleResult, SamplingInputs
from hardpoint_platforms.ops.contract import Kernel, OpInstance
from hardpoint_platforms.ops.provider import OpProvider, Support
from hardpoint_platforms.ops.sampling import SAMPLE
from hardpoint_platforms.versioning import Version
from hardpoint_torch_gpu.kernels.argmax import argmax


class TritonSample(OpProvider):
    """The draw of a step."""

    name = "triton sample"
    op = "sample"
    version = Version(1, 0)

    def supports(self, instance: OpInstance) -> Support:
        return Support(True, "greedy rows in one pass, others by torch")

    def build(self, instance: OpInstance) -> Kernel:
        assert SAMPLE.reference is not None
        general = SAMPLE.reference(instance)

        def sample(logits: torch.Tensor, inputs: SamplingInputs) -> SampleResult:
            special = (inputs.penalties, inputs.bias, inputs.allowed, inputs.num_logprobs)
            if inputs.all_greedy and all(part is None for part in special):
                return SampleResult(*_greedy(logits))
            drawn: SampleResult = general(logits, inputs)
            return drawn

        return sample


def _greedy(logits: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor]:
    ids, finite = argmax(logits.contiguous())
    return ids, None, finite
