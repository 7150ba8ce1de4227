"""Choosing experts: a program per token scores all of them, then takes the best one after the other, in one launch.

Choices are compared as integer keys of the order of their numbers, so that a NaN is the largest and of equals the
lower id comes first. A row is held in the registers of one warp, a group of experts per row of the block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hardpoint_torch_gpu.kernels.ahead import after_others, ahead
from hardpoint_torch_gpu.kernels.sample_pieces import BEYOND, LOWEST, from_key, order_key

#: Most experts, each group filled up to a power of two; most groups, as each is compared with every other.
MOST_PLACES, MOST_GROUPS = 1024, 32
#: Most experts per token.
MOST_CHOSEN = 32
_NEGATIVE_INFINITY: tl.constexpr = tl.constexpr(-2139095041)


@dataclass(frozen=True)
class Choosing:
    """How experts are chosen and weighed.

    Attributes:
        experts: of the model.
        top_k: chosen per token.
        softmax: scores are a softmax; else sigmoids.
        late: of the chosen experts' logits, which are chosen by logits; else of all, and chosen by scores.
        groups, top_groups: equal groups of neighbouring experts, and how many of them may be chosen from.
        best_two: a group is as good as the sum of its best two; else as its best.
        renormalize: a token's weights are divided by their sum.
        scale: factor on the weights.
    """

    experts: int
    top_k: int
    softmax: bool
    late: bool = False
    groups: int = 1
    top_groups: int = 1
    best_two: bool = False
    renormalize: bool = False
    scale: float = 1.0

    @property
    def members(self) -> int:
        """Experts of a group."""
        return self.experts // self.groups

    @property
    def block(self) -> tuple[int, int]:
        """Groups and members, each filled up to a power of two."""
        return int(triton.next_power_of_2(self.groups)), int(triton.next_power_of_2(self.members))


@triton.jit
def _scored(x, largest, total, SOFTMAX: tl.constexpr):
    """Scores of float32 logits; `largest` of a row and the `total` of exponentials are of use to softmax alone."""
    if SOFTMAX:
        return tl.div_rn(tl.exp(x - largest), tl.zeros_like(x) + total)
    else:
        return tl.div_rn(tl.zeros_like(x) + 1.0, 1.0 + tl.exp(-x))


@triton.jit
def _good_groups(key, member, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST_TWO: tl.constexpr):
    """bool [groups], filled up: whether fewer than TOP_GROUPS are better, of equal ones those that come before."""
    quality = tl.max(key, 1)
    if BEST_TWO:
        first = tl.min(tl.where(key == quality[:, None], member, BEYOND), 1)
        second = tl.max(tl.where(member == first[:, None], LOWEST, key), 1)
        quality = order_key(from_key(quality) + from_key(second))
    group = tl.arange(0, key.shape[0])
    quality = tl.where(group < GROUPS, quality, LOWEST)
    earlier = (quality[None, :] == quality[:, None]) & (group[None, :] < group[:, None])
    better = earlier | (quality[None, :] > quality[:, None])
    return tl.sum(better.to(tl.int32), 1) < TOP_GROUPS


@triton.jit
def _choose(
    logits_ptr, bias_ptr, weights_ptr, ids_ptr, scale,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SOFTMAX: tl.constexpr, LATE: tl.constexpr, BIAS: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST_TWO: tl.constexpr, RENORMALIZE: tl.constexpr,
    PAD_GROUPS: tl.constexpr, PAD_MEMBERS: tl.constexpr, PAD_K: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    MEMBERS: tl.constexpr = EXPERTS // GROUPS
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, PAD_GROUPS)[:, None], tl.arange(0, PAD_MEMBERS)[None, :]
    expert = group * MEMBERS + member
    inside = (group < GROUPS) & (member < MEMBERS)
    if BIAS:
        bias = tl.load(bias_ptr + expert, mask=inside, other=0.0)
    after_others(AHEAD)
    row = logits_ptr + token * EXPERTS
    x = tl.load(row + expert, mask=inside, other=float("-inf")).to(tl.float32)
    largest, total = 0.0, 1.0
    choice = x
    if not LATE:
        if SOFTMAX:
            largest = tl.max(x)
            total = tl.sum(tl.exp(x - largest))
        choice = _scored(x, largest, total, SOFTMAX)
    if BIAS:
        choice = choice + bias
    key = tl.where(inside, order_key(choice), LOWEST)
    if GROUPS > 1:
        good = _good_groups(key, member, GROUPS, TOP_GROUPS, BEST_TWO)
        key = tl.where(inside & (good[:, None] == 0), _NEGATIVE_INFINITY, key)
    place = tl.arange(0, PAD_K)
    ids = tl.zeros((PAD_K,), tl.int32)
    for turn in range(TOP_K):
        found = tl.min(tl.where(key == tl.max(key), expert, BEYOND))
        ids = tl.where(place == turn, found, ids)
        key = tl.where(expert == found, LOWEST, key)
    # Scored once more rather than picked out of the row: the logits are near, and picking would be a sum per turn.
    taken = place < TOP_K
    x = tl.load(row + ids, mask=taken, other=float("-inf")).to(tl.float32)
    if SOFTMAX and LATE:
        largest = tl.max(x, 0)
        total = tl.sum(tl.exp(x - largest), 0)
    weights = _scored(x, largest, total, SOFTMAX)
    if RENORMALIZE:
        weights = weights / (tl.sum(tl.where(taken, weights, 0.0), 0) + 1e-20)
    tl.store(weights_ptr + token * TOP_K + place, weights * scale, mask=taken)
    tl.store(ids_ptr + token * TOP_K + place, ids.to(tl.int64), mask=taken)


def choose(logits: torch.Tensor, bias: torch.Tensor | None, how: Choosing) -> tuple[torch.Tensor, torch.Tensor]:
    """logits float [T, E], bias float32 [E] for the choice alone -> weights float32 [T, k], ids int64 [T, k]."""
    logits, tokens = logits.contiguous(), logits.shape[0]
    weights = torch.empty((tokens, how.top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((tokens, how.top_k), dtype=torch.int64, device=logits.device)
    if tokens:
        groups, members = how.block
        _choose[(tokens,)](
            logits, weights if bias is None else bias, weights, ids, float(how.scale), EXPERTS=how.experts,
            TOP_K=how.top_k, SOFTMAX=how.softmax, LATE=how.late, BIAS=bias is not None, GROUPS=how.groups,
            TOP_GROUPS=how.top_groups, BEST_TWO=how.best_two, RENORMALIZE=how.renormalize, PAD_GROUPS=groups,
            PAD_MEMBERS=members, PAD_K=triton.next_power_of_2(how.top_k), num_warps=1, **ahead(logits),
        )  # fmt: skip
    return weights, ids
