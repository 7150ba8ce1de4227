"""Head norms, rotation and attention as a block: one launch makes queries, keys and values ready, the rest attends."""

from __future__ import annotations

from functools import partial

import torch

from hardpoint_platforms.binding import ask
from hardpoint_platforms.ops.attention import ATTENTION
from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed
from hardpoint_platforms.ops.provider import AttentionPlanner, OpProvider, Support
from hardpoint_platforms.ops.rotary_attention import attention_in
from hardpoint_platforms.state_cache import State
from hardpoint_platforms.versioning import Version
from hardpoint_torch_gpu.attention import TritonAttention
from hardpoint_torch_gpu.kernels.prepare_heads import HeadRule, prepare_heads
from hardpoint_torch_gpu.plan import GpuPlan
from hardpoint_torch_gpu.seams import Seam, unowned


class RotaryAttention(OpProvider):
    """Takes what a provider of attention takes, and attends by its kernels."""

    op, version = "rotary_attention", Version(1, 0)

    def __init__(self, attention: TritonAttention) -> None:
        self.name = f"{attention.name} with rope"
        self._attention = attention

    def supports(self, instance: OpInstance) -> Support:
        answer = ask(ATTENTION, self._attention, attention_in(instance))
        norms = "head norms, " if instance.attrs["norm"] else ""
        return Support(True, f"{norms}rope and the cache write in one launch; {answer.reason}") if answer else answer

    def planner(self) -> AttentionPlanner:
        return self._attention.planner()

    def build(self, instance: OpInstance) -> Kernel:
        attrs, inner = instance.attrs, attention_in(instance)
        group, pool_layer, width = attrs["group"], attrs["pool_layer"], attrs["v_head_dim"]
        rule = HeadRule(attrs["interleaved"], attrs["tail"], attrs["norm"], attrs["eps"])
        attend = self._attention.attending(inner)
        names = tuple(instance.weights)

        def prepare_and_attend(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, out: torch.Tensor,
            keys: torch.Tensor, values: torch.Tensor, w: Packed, plan: GpuPlan,
        ) -> None:  # fmt: skip
            named = dict(zip(names, w, strict=True))
            weights = named["table"], named.get("q_norm"), named.get("k_norm")
            prepare_heads((q, k, v), positions, rule, weights, plan.slots[group], keys, values, plan.page_tokens)
            attend(q, None, keys, values, plan, named.get("sinks"), out)

        def rotary_attention(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            positions: torch.Tensor,
            state: State,
            plan: GpuPlan | Seam,
            w: Packed,
        ) -> tuple[torch.Tensor, State]:
            q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
            out = torch.empty((q.shape[0], q.shape[1], width), dtype=q.dtype, device=q.device)
            keys, values = state[pool_layer]
            if isinstance(plan, Seam):
                kept = unowned(q), unowned(k), unowned(v), unowned(positions), unowned(out)
                plan.cut(partial(prepare_and_attend, *kept, keys, values, w))
            else:
                prepare_and_attend(q, k, v, positions, out, keys, values, w, plan)
            return out, state

        return rotary_attention
