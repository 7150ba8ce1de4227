"""Norms of heads, rotation and the cache write in one launch: to the bit what the kernels of their own give."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hardpoint_torch_gpu.kernels.norm import norm
from hardpoint_torch_gpu.kernels.prepare_heads import HeadRule, prepare_heads
from hardpoint_torch_gpu.kernels.rope import rope
from hardpoint_torch_gpu.kernels.store import store

from hardpoint_platforms.ops.rotary import rope_table
from hardpoint_platforms.ops.samples import Source

pytestmark = [
    pytest.mark.reference,
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter, on the host"),
]

PAGES, PAGE = 5, 4
SLOTS = torch.tensor([7, 19, 4, 16, 1, 1, 0], dtype=torch.int32)  # the last three are of padding, in page 0
POSITIONS = torch.tensor([3, 40, 0, 17, 0, 0, 0])


@dataclass(frozen=True)
class Case:
    heads: int = 4
    kv_heads: int = 2
    width: int = 16
    v_width: int = 16
    rotated: int = 16
    interleaved: bool = False
    tail: bool = False
    norm: str | None = None
    weights: tuple[bool, bool] = (True, True)
    dtype: torch.dtype = torch.float16
    cache: torch.dtype = torch.float16
    fused: bool = True

    def made(self) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Heads (views of one tensor if `fused`), the two pools, and the table with the weights of the norms."""
        source, counts = Source(5), (self.heads, self.kv_heads, self.kv_heads)
        if self.fused and self.width == self.v_width:
            whole = source.normal(len(SLOTS), sum(counts), self.width, dtype=self.dtype, scale=2.0)
            heads = whole.split_with_sizes(list(counts), 1)
        else:
            widths = (self.width, self.width, self.v_width)
            heads = tuple(
                source.normal(len(SLOTS), count, width, dtype=self.dtype)
                for count, width in zip(counts, widths, strict=True)
            )
        pools = tuple(
            source.normal(PAGES, PAGE, self.kv_heads, width, dtype=self.cache) for width in (self.width, self.v_width)
        )
        weights = (source.normal(self.width) + 1.0, source.normal(self.width) + 1.0)
        return heads, pools, (rope_table(64, self.rotated), *weights)

    def one_launch(self) -> tuple[torch.Tensor, ...]:
        """q, keys, values."""
        (q, k, v), (keys, values), (table, *weights) = self.made()
        kept = [weight if there and self.norm else None for weight, there in zip(weights, self.weights, strict=True)]
        before = k.clone(), v.clone()
        rule = HeadRule(self.interleaved, self.tail, self.norm, 1e-5)
        prepare_heads((q, k, v), POSITIONS, rule, (table, *kept), SLOTS, keys, values, PAGE)
        assert torch.equal(k, before[0])
        assert torch.equal(v, before[1])
        return q, keys, values

    def one_by_one(self) -> tuple[torch.Tensor, ...]:
        """Likewise, by the kernels of the ops."""
        (q, k, v), (keys, values), (table, *weights) = self.made()
        if self.norm is not None:
            q, k = (
                norm(x, self.norm, 1e-5, weight if there else None, None)[0]
                for x, weight, there in zip((q, k), weights, self.weights, strict=True)
            )
        rope(q, k, POSITIONS, table, self.interleaved, self.tail)
        store(k, v, SLOTS, keys, values, PAGE)
        return q, keys, values


WAYS = {
    "all": Case(),
    "neighbours": Case(interleaved=True),
    "first half": Case(rotated=8),
    "last part": Case(rotated=6, tail=True),
    "last part, neighbours": Case(rotated=6, tail=True, interleaved=True),
    "odd sizes": Case(heads=9, kv_heads=3, width=20, v_width=12, rotated=12),
    "programs of one kind of head": Case(heads=8, kv_heads=8),
    "one head of keys": Case(heads=3, kv_heads=1),
    "wide": Case(heads=4, kv_heads=2, width=256, v_width=256, rotated=256),
    "wide, a quarter": Case(heads=4, kv_heads=2, width=256, v_width=256, rotated=64),
    "float32": Case(dtype=torch.float32, cache=torch.float32),
    "narrow cache": Case(dtype=torch.float32, cache=torch.float16),
    "wide cache": Case(cache=torch.float32),
    "apart": Case(fused=False),
}


@pytest.mark.parametrize("case", WAYS.values(), ids=WAYS)
def test_without_norms(case: Case) -> None:
    for ours, theirs in zip(case.one_launch(), case.one_by_one(), strict=True):
        assert torch.equal(ours, theirs)


NORMS = {
    "rms": Case(norm="rms"),
    "rms1p": Case(norm="rms1p", width=256, v_width=256, rotated=256),
    "rms, a part rotated": Case(norm="rms", rotated=6),
    "ln": Case(norm="ln", rotated=10, tail=True),
    "ln, all rotated": Case(norm="ln", interleaved=True),
    "l2": Case(norm="l2", weights=(False, False)),
    "of queries": Case(norm="rms", weights=(True, False)),
    "of keys": Case(norm="rms1p", weights=(False, True), rotated=8, interleaved=True),
    "odd sizes": Case(norm="rms", heads=9, kv_heads=3, width=20, v_width=12, rotated=12),
    "float32": Case(norm="rms", dtype=torch.float32, cache=torch.float32, width=128, v_width=128, rotated=128),
    "narrow cache": Case(norm="rms", dtype=torch.float32),
}


@pytest.mark.parametrize("case", NORMS.values(), ids=NORMS)
def test_with_norms(case: Case) -> None:
    """Sums of squares in another order: a unit of float32 apart before they are rounded, which few numbers show."""
    step = torch.finfo(case.dtype).eps
    for ours, theirs in zip(case.one_launch(), case.one_by_one(), strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), atol=4 * step, rtol=4 * step)
        if case.dtype is torch.float16:
            assert (ours != theirs).float().mean() < 0.01


def test_pages_of_others_stay() -> None:
    case = WAYS["all"]
    _, before, _ = case.made()
    _, *after = case.one_launch()
    written = torch.zeros(PAGES * PAGE, dtype=torch.bool)
    written[SLOTS.long()] = True
    for old, new in zip(before, after, strict=True):
        changed = (old != new).flatten(2).any(2).flatten()
        assert torch.equal(changed, written)


def test_no_tokens() -> None:
    heads = tuple(torch.zeros(0, count, 16) for count in (4, 2, 2))
    pool, none = torch.zeros(2, 4, 2, 16), torch.zeros(0, dtype=torch.int64)
    rule = HeadRule(False, False, None, 0.0)
    prepare_heads(heads, none, rule, (rope_table(4, 16), None, None), none.int(), pool, pool, 4)  # type: ignore[arg-type]
    assert not pool.any()
