"""Attention for heads that no kernel has room for: torch's own function over gathered pages, planned on the host."""

from __future__ import annotations

import torch

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed
from hardpoint_platforms.ops.provider import Support
from hardpoint_platforms.reference.sdpa import SdpaAttention
from hardpoint_platforms.reference.sdpa_plan import SdpaPlan
from hardpoint_platforms.state_cache import State
from hardpoint_torch_gpu.seams import Seam


class GpuSdpa(SdpaAttention):
    """To be asked after all others: a step with such a layer is called op by op."""

    def supports(self, instance: OpInstance) -> Support:
        answer = super().supports(instance)
        return Support(True, f"{answer.reason}; steps are called op by op") if answer else answer

    def build(self, instance: OpInstance) -> Kernel:
        attend = super().build(instance)

        def attention(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: State, plan: SdpaPlan | Seam, w: Packed = ()
        ) -> tuple[torch.Tensor, State]:
            if isinstance(plan, Seam) or _recorded(q):
                # A graph would keep the pages of the step that it was recorded with.
                raise RuntimeError(f"attention at {instance.where} is torch's own, which is planned on the host")
            found: tuple[torch.Tensor, State] = attend(q, k, v, state, plan, w)
            return found

        return attention


def _recorded(x: torch.Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
