"""Faults in attention over pages, and in planners."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from hardpoint_platforms.batch import AttentionBatch
from hardpoint_platforms.conformance.mutants.kernels import around, with_attrs
from hardpoint_platforms.conformance.mutants.platform import Fault
from hardpoint_platforms.ops.contract import Kernel, OpInstance
from hardpoint_platforms.ops.provider import AttentionPlanner, OpProvider
from hardpoint_platforms.reference.plan import ReferencePlan


class WrongPlanner(AttentionPlanner):
    """Changes the batch before it is planned, or the plan."""

    def __init__(
        self,
        right: AttentionPlanner,
        batch: Callable[[AttentionBatch], AttentionBatch] | None = None,
        plan: Callable[[ReferencePlan], ReferencePlan] | None = None,
    ) -> None:
        self._right, self._batch, self._plan = right, batch, plan

    def plan(self, batch: AttentionBatch) -> Any:
        made = self._right.plan(batch if self._batch is None else self._batch(batch))
        return made if self._plan is None else self._plan(made)


def _planner(name: str, **wrong: Any) -> Fault:
    return Fault(name, ("attention",), planner=lambda right: WrongPlanner(right, **wrong))


def _attention(name: str, build: Any) -> Fault:
    return Fault(name, ("attention",), kernels={"attention": build})


def _decode_sees_less(plan: ReferencePlan) -> ReferencePlan:
    blocks = tuple(dataclasses.replace(block, last=(block.last - 1).clamp(min=0)) for block in plan.blocks)
    return dataclasses.replace(plan, blocks=blocks)


def _chunk_sees_more(plan: ReferencePlan) -> ReferencePlan:
    """Chunks believe that one token more was computed: the mask is off by one, pages are read beyond the end."""
    chunks = tuple(
        dataclasses.replace(chunk, computed=chunk.computed + 1)
        if (chunk.computed + chunk.stop - chunk.start) % plan.page_tokens
        else chunk
        for chunk in plan.chunks
    )
    return dataclasses.replace(plan, chunks=chunks)


def _stale_page(batch: AttentionBatch) -> AttentionBatch:
    """The last page of each table is the one of the step before, which is not there yet."""
    tables = []
    for table in batch.page_tables:
        old = table.copy()
        for row in range(batch.num_requests):
            held = -(-int(batch.sequence_lengths[row]) // batch.page_tokens)
            if held > 1:
                old[row, held - 1] = old[row, held - 2]
        tables.append(old)
    return dataclasses.replace(batch, page_tables=tuple(tables))


def _wrong_slot(batch: AttentionBatch) -> AttentionBatch:
    mapping = []
    for slots in batch.slot_mapping:
        moved = slots.copy()
        if batch.num_tokens > 1:
            moved[: batch.num_tokens] = moved[: batch.num_tokens][::-1]
        mapping.append(moved)
    return dataclasses.replace(batch, slot_mapping=tuple(mapping))


def _padding_leaks(batch: AttentionBatch) -> AttentionBatch:
    mapping = []
    for slots in batch.slot_mapping:
        moved = slots.copy()
        moved[batch.num_tokens :] += batch.page_tokens
        mapping.append(moved)
    return dataclasses.replace(batch, slot_mapping=tuple(mapping))


def _first_table(batch: AttentionBatch) -> AttentionBatch:
    """Every request reads the first one's first page."""
    tables = tuple(table.copy() for table in batch.page_tables)
    for table in tables:
        if len(table):
            table[: batch.num_requests, 0] = table[0, 0]
    return dataclasses.replace(batch, page_tables=tables)


def _low_precision(kernel: Kernel, q: Any, k: Any, v: Any, state: Any, plan: Any, *w: Any) -> Any:
    out, state = kernel(q.to(torch.bfloat16).to(q.dtype), k, v, state, plan, *w)
    return out, state


def _heads_interleaved(right: OpProvider, instance: OpInstance) -> Kernel:
    """Query head h reads key head h mod hk where h div (h / hk) is meant."""
    kernel = right.build(instance)
    heads, kv_heads = instance.attrs["heads"], instance.attrs["kv_heads"]
    order = torch.arange(heads).view(heads // kv_heads, kv_heads).T.flatten()

    def mutant(q: Any, k: Any, v: Any, state: Any, plan: Any, *w: Any) -> Any:
        out, state = kernel(q[:, order], k, v, state, plan, *w)
        return out[:, order.argsort()], state

    return mutant


def _no_sinks(kernel: Kernel, q: Any, k: Any, v: Any, state: Any, plan: Any, *w: Any) -> Any:
    return kernel(q, k, v, state, plan)


def _clears_rest(kernel: Kernel, q: Any, k: Any, v: Any, state: Any, plan: Any, *w: Any) -> Any:
    """Writes whole pages: what others hold in a shared one is lost."""
    out, state = kernel(q, k, v, state, plan, *w)
    for parts in state[1:]:
        for part in parts:
            for block in plan.blocks:
                for row, last in zip(block.tables[0].tolist(), block.last.tolist(), strict=True):
                    part[row[last // plan.page_tokens], : last % plan.page_tokens] = 0.0
    return out, state


def _does_not_store(kernel: Kernel, q: Any, k: Any, v: Any, state: Any, plan: Any, *w: Any) -> Any:
    """Attends rightly and forgets to keep values."""
    kept = state[-1][1].clone()
    out, state = kernel(q, k, v, state, plan, *w)
    state[-1][1].copy_(kept)
    return out, state


def _all_layers(kernel: Kernel, q: Any, k: Any, v: Any, state: Any, plan: Any, *w: Any) -> Any:
    """Writes keys into the layer before its own, too."""
    out, state = kernel(q, k, v, state, plan, *w)
    state[0][0][plan.pages[0], plan.offsets[0]] = k.to(state[0][0].dtype)
    return out, state


def _never_starts(batch: AttentionBatch) -> AttentionBatch:
    """Recurrent ops believe that every request goes on: what the page held is taken for its state."""
    return dataclasses.replace(batch, sequence_lengths=batch.sequence_lengths + 1)


def _only_out(kernel: Kernel, *arguments: Any) -> Any:
    return kernel(*arguments)[0]


FAULTS: tuple[Fault, ...] = (
    _attention("window is one token too wide", with_attrs(window=lambda w: None if w is None else w + 1)),
    _attention("window is ignored", with_attrs(window=None)),
    _planner("mask is off by one in decode", plan=_decode_sees_less),
    _planner("mask is off by one in prefill", plan=_chunk_sees_more),
    _attention("softmax in low precision", around(_low_precision)),
    _planner("keys and values go to the wrong slots", batch=_wrong_slot),
    _planner("a stale page is read", batch=_stale_page),
    _planner("padded rows write into a page", batch=_padding_leaks),
    _planner("one request's first page for all", batch=_first_table),
    _attention("heads are shared out in another order", _heads_interleaved),
    _attention("sinks are ignored", around(_no_sinks)),
    _attention("softcap is ignored", with_attrs(softcap=None)),
    _attention("alibi is ignored", with_attrs(alibi=None)),
    _attention("scale is 1 / sqrt(d) always", with_attrs(scale=16**-0.5)),
    _attention("a decode clears the rest of its page", around(_clears_rest)),
    _attention("values are not stored", around(_does_not_store)),
    _attention("another layer is written, too", around(_all_layers)),
    _attention("the state is not returned", around(_only_out)),
    Fault(
        "the first group's pages for every group", ("ops",), ("ops/attention/second*",),
        kernels={"attention": with_attrs(group=0)},
    ),
    Fault(
        "a new request starts from what its page holds", ("ops",), ("ops/conv_state/*", "ops/ssm_scan/*"),
        planner=lambda right: WrongPlanner(right, batch=_never_starts),
    ),
)  # fmt: skip
