"""Choosing experts per token through one Triton kernel."""

from __future__ import annotations

import torch

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed
from hardpoint_platforms.ops.provider import OpProvider, Support
from hardpoint_platforms.versioning import Version
from hardpoint_torch_gpu.kernels.route import MOST_CHOSEN, MOST_GROUPS, MOST_PLACES, Choosing, choose


class TritonRoute(OpProvider):
    """Scores, groups, choice and weights of a token in one program."""

    name, op, version = "triton moe_route", "moe_route", Version(1, 0)

    def supports(self, instance: OpInstance) -> Support:
        against = _refusal(instance)
        return Support(False, against) if against else Support(True, "one launch, a warp per token")

    def build(self, instance: OpInstance) -> Kernel:
        how = _choosing(instance)

        def moe_route(logits: torch.Tensor, w: Packed = ()) -> tuple[torch.Tensor, torch.Tensor]:
            return choose(logits, w[0] if w else None, how)

        return moe_route


def _choosing(instance: OpInstance) -> Choosing:
    """Groups and renormalizing are left out where they change nothing: weights of the chosen ones know neither."""
    attrs = instance.attrs
    late = attrs["score"].startswith("topk_")
    grouped = not late and attrs["top_groups"] < attrs["groups"]
    return Choosing(
        attrs["experts"],
        attrs["top_k"],
        attrs["score"].endswith("softmax"),
        late,
        attrs["groups"] if grouped else 1,
        attrs["top_groups"] if grouped else 1,
        grouped and attrs["group_score"] == "top2",
        not late and attrs["renormalize"],
        attrs["scale"],
    )


def _refusal(instance: OpInstance) -> str:
    """Why not; "" where it takes the instance."""
    how = _choosing(instance)
    if not 0 < how.top_k <= how.experts:
        return f"{how.top_k} of {how.experts} experts per token"
    if how.top_k > MOST_CHOSEN:
        return f"{how.top_k} experts per token, the kernel chooses up to {MOST_CHOSEN}"
    if how.experts % how.groups:
        return f"{how.experts} experts in {how.groups} groups are not equal groups"
    if how.groups > MOST_GROUPS:
        return f"{how.groups} groups, the kernel compares up to {MOST_GROUPS}"
    if how.best_two and how.members < 2:
        return f"groups of {how.members} have no best two"
    groups, members = how.block
    if groups * members > MOST_PLACES:
        return f"{how.experts} experts in {how.groups} groups, the kernel holds {MOST_PLACES} in powers of two"
    return ""
