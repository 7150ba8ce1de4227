"""Group `attention`: the matrix of phases, sizes and score rules, over hostile page tables.

Every batch has random pages, a shared first page where two requests begin alike, rubbish in page 0, in the places of
pages that nobody has written yet, and in rows of padding. A second run without the padding must give the same.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from hardpoint_platforms.batch import AttentionBatch
from hardpoint_platforms.capabilities import Capabilities
from hardpoint_platforms.conformance.checks import Check, Group, Measure, Wrong
from hardpoint_platforms.conformance.comparison import require_close
from hardpoint_platforms.conformance.contracts import judge, short
from hardpoint_platforms.conformance.execution import execute
from hardpoint_platforms.conformance.subject import Subject, oracle
from hardpoint_platforms.ops.attention import ATTENTION, alibi_slopes
from hardpoint_platforms.ops.contract import Sample, Tolerance
from hardpoint_platforms.ops.samples import Source, specs
from hardpoint_platforms.reference.platform import ReferenceDevice

#: (tokens cached before, new tokens) of each request.
PHASES: dict[str, tuple[tuple[int, int], ...]] = {
    "prefill": ((0, 9), (0, 1), (0, 33)),
    "chunked": ((16, 16), (7, 9), (32, 3)),
    "decode": ((0, 1), (15, 1), (16, 1), (40, 1), (3, 1)),
    "mixed": ((17, 1), (31, 1), (0, 12), (8, 5)),
    "verify": ((21, 4), (40, 3), (5, 2), (16, 4)),
}
RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 9},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "sinks and window": {"sinks": True, "window": 17},
    "alibi": {"alibi": True},
    "scale": {"scale": 0.37},
}
HEADS = ((4, 4), (4, 2), (8, 1), (6, 2))
WIDTHS = (16, 64, 80, 128)
#: What nobody may read: finite, and so large that a single weight on it shows.
RUBBISH = 60.0
PADDED_TOKENS, PADDED_REQUESTS = 5, 2


@dataclass(frozen=True)
class Shape:
    """One place of the matrix."""

    phase: str
    rule: str
    heads: tuple[int, int]
    width: int
    page_tokens: int
    dtype: torch.dtype
    kv_dtype: torch.dtype

    @property
    def name(self) -> str:
        """What tells it from others of its phase and dtype."""
        heads, kv_heads = self.heads
        sizes = f"{heads}-over-{kv_heads} width-{self.width} page-{self.page_tokens} kv-{short(self.kv_dtype)}"
        return f"{self.phase} {self.rule} {sizes}"


def checks(subject: Subject) -> Iterator[Check]:
    """Every phase with every rule in every dtype; every size at least once with each dtype."""
    facts = subject.device.capabilities()
    for number, dtype in enumerate(dtype for dtype in facts.compute_dtypes if dtype in ATTENTION.tolerance):
        for shape in dict.fromkeys(_shapes(facts, dtype)):
            yield Check(
                "attention",
                "attention",
                shape.name,
                2,
                partial(_run, shape),
                dtype=short(dtype),
                phase=shape.phase,
                required=number == 0,
            )


def _shapes(facts: Capabilities, dtype: torch.dtype) -> Iterator[Shape]:
    """Random sizes, the same in every run: ids must not change with the seed."""
    rng = random.Random(short(dtype))
    kv = facts.kv_dtypes

    def shape(phase: str, rule: str, **given: Any) -> Shape:
        sizes = {
            "heads": rng.choice(HEADS),
            "width": rng.choice(WIDTHS),
            "page_tokens": rng.choice(facts.page_tokens),
            "kv_dtype": rng.choice(kv),
        }
        return Shape(phase, rule, dtype=dtype, **{**sizes, **given})

    for phase in PHASES:
        for rule in RULES:
            yield shape(phase, rule)
    for heads in HEADS:
        yield shape("mixed", "plain", heads=heads)
    for width in WIDTHS:
        yield shape("chunked", "plain", width=width)
    for page_tokens in facts.page_tokens:
        for phase in ("decode", "verify"):
            yield shape(phase, "plain", page_tokens=page_tokens)
    for kv_dtype in kv:
        for phase in ("decode", "prefill"):
            yield shape(phase, "plain", kv_dtype=kv_dtype)


def _run(shape: Shape, subject: Subject, seed: int) -> Measure:
    case, bare = (sample_of(shape, seed, padded) for padded in (True, False))
    provider = subject.claim(case.instance)
    tolerance = _tolerance(shape)
    host, theirs = ReferenceDevice(), oracle("attention")
    wanted, again = execute(host, theirs, case), execute(host, theirs, case)
    found = execute(subject.device, provider, case)
    distance = judge(case, found, wanted, tolerance)
    alone = execute(subject.device, provider, bare)
    distance = distance.worse(judge(bare, alone, wanted, tolerance))
    # The same kernel on the same rows: padding may change their rounding, and nothing more.
    tight = Tolerance(tolerance.atol / 2, tolerance.rtol / 2)
    require_close(found.result, alone.result, tight, found.kernel, "the result with padding")
    _check_padding(found.pages, alone.pages, found.kernel)
    return Measure("", distance.error, distance.tolerance, alone.seconds, again.seconds)


def _check_padding(with_padding: Any, without: Any, kernel: object) -> None:
    for ours, theirs in zip(with_padding, without, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            changed = (a != b).flatten(1).any(1)
            if bool(changed.any()):
                page = int(changed.nonzero()[0]) + 1
                raise Wrong(f"rows of padding change page {page}, which is not theirs", subject_code=kernel)


def _tolerance(shape: Shape) -> Tolerance:
    """That of the coarser of compute and cache."""
    kinds = [ATTENTION.tolerance[d] for d in (shape.dtype, shape.kv_dtype) if d in ATTENTION.tolerance]
    return max(kinds, key=lambda tolerance: tolerance.atol)


def sample_of(shape: Shape, seed: int, padded: bool) -> Sample:
    """The sample at one place of the matrix; with and without padding the real rows are the same."""
    rule = dict(RULES[shape.rule])
    heads, kv_heads = shape.heads
    if rule.pop("alibi", False):
        rule["alibi"] = alibi_slopes(heads)
    weights = {"sinks": Source(seed).normal(heads)} if rule.get("sinks") else {}
    attrs = {"scale": shape.width**-0.5, **rule}
    instance = ATTENTION.instance(
        shape.name,
        shape.dtype,
        specs(weights, shape.dtype),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=shape.width,
        v_head_dim=shape.width,
        pool_layer=1,
        **attrs,
    )
    return Sample(instance, weights, partial(_arguments, shape, rule.get("window"), seed, padded))


def _arguments(shape: Shape, window: int | None, seed: int, padded: bool) -> tuple[Any, ...]:
    rows = PHASES[shape.phase]
    heads, kv_heads = shape.heads
    batch, count, written = build_batch(rows, shape.page_tokens, window, seed, padded)
    source = Source(seed)
    real = batch.num_tokens
    fresh = [source.normal(real, n, shape.width) for n in (heads, kv_heads, kv_heads)]
    parts = [source.normal(count, shape.page_tokens, kv_heads, shape.width) for _ in range(2)]
    for part in parts:
        part[~torch.from_numpy(written)] = RUBBISH
    if padded:
        fresh = [torch.cat((x, x.new_full((PADDED_TOKENS, *x.shape[1:]), RUBBISH))) for x in fresh]
    other = tuple(torch.full_like(part, 0.5) for part in parts)
    state = tuple(tuple(part.to(shape.kv_dtype) for part in layer) for layer in (other, parts))
    return (*(x.to(shape.dtype) for x in fresh), state, batch)


def build_batch(
    rows: tuple[tuple[int, int], ...], page_tokens: int, window: int | None, seed: int, padded: bool
) -> tuple[AttentionBatch, int, np.ndarray[Any, np.dtype[np.bool_]]]:
    """A batch, the pages of its pool, and which places of them hold something: bool [pages, page_tokens].

    Requests that cached a whole page share their first one with the first such request, as after a prefix hit.
    """
    rng = np.random.default_rng(seed)
    count = 2 + sum(-(-(old + new) // page_tokens) for old, new in rows)
    free = list(1 + rng.permutation(count - 1))
    written = np.zeros((count, page_tokens), np.bool_)
    width = max(1, max(-(-(old + new) // page_tokens) for old, new in rows)) + 1
    table = np.zeros((len(rows), width), np.int32)
    slots: list[int] = []
    shared = 0
    for row, (old, new) in enumerate(rows):
        for page in range(-(-(old + new) // page_tokens)):
            if page == 0 and old >= page_tokens and shared:
                table[row, 0] = shared
            else:
                table[row, page] = free.pop()
        if old >= page_tokens and not shared:
            shared = int(table[row, 0])
        at = np.arange(old + new)
        written[table[row, at[:old] // page_tokens], at[:old] % page_tokens] = True
        fresh = at[old:]
        slots += list(table[row, fresh // page_tokens] * page_tokens + fresh % page_tokens)
    if window is not None:
        for row, (old, _) in enumerate(rows):
            gone = max(0, (old - window + 1) // page_tokens)
            table[row, :gone] = 0
    starts = np.cumsum([0, *(new for _, new in rows)]).astype(np.int32)
    batch = AttentionBatch(
        query_start=starts,
        sequence_lengths=np.array([old + new for old, new in rows], np.int32),
        page_tables=(table,),
        slot_mapping=(np.array(slots, np.int32),),
        page_tokens=page_tokens,
        num_requests=len(rows),
        num_tokens=int(starts[-1]),
    )
    return (_pad(batch) if padded else batch), count, written


def _pad(batch: AttentionBatch) -> AttentionBatch:
    real = batch.num_tokens
    padding = np.arange(PADDED_TOKENS, dtype=np.int32) % batch.page_tokens
    return dataclasses.replace(
        batch,
        query_start=np.r_[batch.query_start, [real] * PADDED_REQUESTS].astype(np.int32),
        sequence_lengths=np.r_[batch.sequence_lengths, [0] * PADDED_REQUESTS].astype(np.int32),
        page_tables=tuple(np.pad(table, ((0, PADDED_REQUESTS), (0, 0))) for table in batch.page_tables),
        slot_mapping=tuple(np.r_[slots, padding].astype(np.int32) for slots in batch.slot_mapping),
    )


GROUP = Group("attention", "attention matrix", checks, beside=True)
