"""Attention over pages through the Triton kernels: store what is new, decode rows and prompt tiles in a launch each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed
from hardpoint_platforms.ops.provider import AttentionPlanner, OpProvider, Support
from hardpoint_platforms.state_cache import State
from hardpoint_platforms.versioning import Version
from hardpoint_torch_gpu.kernels.paged_decode import PagedDecode
from hardpoint_torch_gpu.kernels.paged_prefill import prefill
from hardpoint_torch_gpu.kernels.store import store
from hardpoint_torch_gpu.plan import GpuPlan, GpuPlanner
from hardpoint_torch_gpu.rule import ScoreRule
from hardpoint_torch_gpu.seams import Seam, unowned

#: Widest head: wider ones leave no room in a multiprocessor's shared memory.
WIDEST = 256


#: prompts(q, keys, values, plan, sinks, out): attention of the rows of `plan` that bring several tokens.
Prompts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, GpuPlan, torch.Tensor | None, torch.Tensor], None]
#: decodes(q, new, keys, values, plan, group, rule, sinks, out): of the rows that bring one token; see `PagedDecode`.
Decodes = Callable[
    [
        torch.Tensor,
        tuple[torch.Tensor, torch.Tensor] | None,
        torch.Tensor,
        torch.Tensor,
        GpuPlan,
        int,
        ScoreRule,
        torch.Tensor | None,
        torch.Tensor,
    ],
    None,
]
#: attend(q, new, keys, values, plan, sinks, out): of all rows of `plan`; `new` as of `Decodes`, None if all are stored.
Attend = Callable[
    [
        torch.Tensor,
        tuple[torch.Tensor, torch.Tensor] | None,
        torch.Tensor,
        torch.Tensor,
        GpuPlan,
        torch.Tensor | None,
        torch.Tensor,
    ],
    None,
]


class TritonAttention(OpProvider):
    """Takes every kind of score; head sizes up to `WIDEST`. A plugin with a better kernel derives."""

    name = "triton attention"
    op = "attention"
    version = Version(1, 0)

    def __init__(self, planner: GpuPlanner) -> None:
        self._planner = planner
        self._decode = PagedDecode()

    def supports(self, instance: OpInstance) -> Support:
        widest = max(instance.attrs["head_dim"], instance.attrs["v_head_dim"])
        if widest > WIDEST:
            return Support(False, f"head size {widest}, the kernels take up to {WIDEST}")
        told = "keys split over programs for decodes, tiles for prompts"
        return Support(True, told + of_shared_pages(instance))

    def planner(self) -> AttentionPlanner:
        return self._planner

    def attending(self, instance: OpInstance) -> Attend:
        """The launches of an op behind those that make its queries and keys."""
        group, rule = instance.attrs["group"], ScoreRule.of(instance.attrs)
        decode, prompts = self.decodes(instance), self.prompts(instance)
        if rule.same_for_all:
            self._planner.share(group, *_sizes(instance))

        def attend(
            q: torch.Tensor, new: tuple[torch.Tensor, torch.Tensor] | None, keys: torch.Tensor, values: torch.Tensor,
            plan: GpuPlan, sinks: torch.Tensor | None, out: torch.Tensor,
        ) -> None:  # fmt: skip
            if new is not None and not plan.decodes_alone:
                store(*new, plan.slots[group], keys, values, plan.page_tokens)
                new = None
            if plan.padded:
                out.zero_()
            decode(q, new, keys, values, plan, group, rule, sinks, out)
            prompts(q, keys, values, plan, sinks, out)

        return attend

    def build(self, instance: OpInstance) -> Kernel:
        pool_layer, width, attend = instance.attrs["pool_layer"], instance.attrs["v_head_dim"], self.attending(instance)

        def attend_new(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, keys: torch.Tensor,
            values: torch.Tensor, sinks: torch.Tensor | None, plan: GpuPlan,
        ) -> None:  # fmt: skip
            attend(q, (k, v), keys, values, plan, sinks, out)

        def attention(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: State, plan: GpuPlan | Seam, w: Packed = ()
        ) -> tuple[torch.Tensor, State]:
            q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
            out = torch.empty((q.shape[0], q.shape[1], width), dtype=q.dtype, device=q.device)
            (keys, values), sinks = state[pool_layer], w[0] if w else None
            if isinstance(plan, Seam):
                kept = unowned(q), unowned(k), unowned(v), unowned(out)
                plan.cut(partial(attend_new, *kept, keys, values, sinks))
            else:
                attend_new(q, k, v, out, keys, values, sinks, plan)
            return out, state

        return attention

    def decodes(self, instance: OpInstance) -> Decodes:
        """What computes rows with one token, and stores their keys where nobody has."""
        return self._decode

    def prompts(self, instance: OpInstance) -> Prompts:
        """What computes rows with several tokens, whose keys are stored by then."""
        group, rule = instance.attrs["group"], ScoreRule.of(instance.attrs)

        def tiles(
            q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: GpuPlan, sinks: torch.Tensor | None,
            out: torch.Tensor,
        ) -> None:  # fmt: skip
            prefill(q, keys, values, plan, group, rule, sinks, out)

        return tiles


def of_shared_pages(instance: OpInstance) -> str:
    """What `supports` adds for ops that may read pages once for several rows."""
    able = ScoreRule.of(instance.attrs).same_for_all
    return "; pages that decodes share are read once for a tile of them" if able else ""


def _sizes(instance: OpInstance) -> tuple[int, int]:
    """Query heads per head of keys; bytes of a cached token, if the cache is of the activations' dtype."""
    attrs = instance.attrs
    numbers = attrs["kv_heads"] * (attrs["head_dim"] + attrs["v_head_dim"])
    return attrs["heads"] // attrs["kv_heads"], numbers * instance.dtype.itemsize
