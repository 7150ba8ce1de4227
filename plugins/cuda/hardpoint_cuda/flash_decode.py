"""Decodes by FlashInfer, in graphs: planned on the host before each step, into buffers at fixed addresses.

A graph holds the launch and where the plan lies; a wrapper per number of rows owns these buffers. Planning costs the
host tenths of a millisecond per step and kind of layer, and Triton's kernel reads keys at the speed of memory: it is
left only for kinds where FlashInfer was measured faster, and takes back steps in which rows share pages, which it reads
once for several of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hardpoint_torch_gpu.attention import Decodes
from hardpoint_torch_gpu.kernels.store import store
from hardpoint_torch_gpu.plan import GpuPlan
from hardpoint_torch_gpu.rule import ScoreRule

from hardpoint_cuda.flash_plans import Kind, lacking
from hardpoint_platforms.batch import AttentionBatch

#: Bytes of a wrapper's lists of parts; there is a copy in pinned memory.
_LISTS = 1 << 20
#: Wrappers of a kind: one per recorded number of rows, and some more.
_MOST = 64
#: Query heads per head of keys from which tensor cores pay.
_SHARED = 4


@dataclass(frozen=True, eq=False)
class FlashDecodePlan(GpuPlan):
    """A plan of decodes alone. `decode` gives the planned kernel of a kind, the same for every step of as many rows."""

    decode: Callable[[Kind], Callable[..., torch.Tensor]]


class FlashDecodes:
    """Owns the wrappers of decodes."""

    def __init__(
        self,
        upload: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]],
        space: Callable[[], torch.Tensor],
    ) -> None:
        """`space`: gives the device memory for partial results, which all wrappers share."""
        self._upload, self._space = upload, space
        self._kinds: set[Kind] = set()
        #: By kind, rows, and pages that a row may have.
        self._wrappers: dict[tuple[Kind, int, int], _Fixed] = {}

    def take(self, kind: Kind) -> None:
        """Plan for this kind from now on."""
        self._kinds.add(kind)

    def planned(self, plan: GpuPlan, batch: AttentionBatch) -> GpuPlan:
        """`plan`, or one with FlashInfer's beside it where the batch is one of decodes, its padding included."""
        rows = len(batch.sequence_lengths)
        if not self._kinds or not batch.decode_only or len(batch.slot_mapping[0]) != rows:
            return plan
        places = {kind: (kind, *batch.page_tables[kind.group].shape) for kind in self._kinds}
        full = len(self._wrappers) >= _MOST * len(places)
        if full and any(place not in self._wrappers for place in places.values()):
            return plan
        runs = {kind: self._wrapper(place).plan(batch) for kind, place in places.items()}
        return FlashDecodePlan(**vars(plan), decode=runs.__getitem__)

    def _wrapper(self, place: tuple[Kind, int, int]) -> _Fixed:
        if place not in self._wrappers:
            self._wrappers[place] = _Fixed(*place, self._upload, self._space())
        return self._wrappers[place]


class _Fixed:
    """A wrapper whose buffers stay where they are."""

    def __init__(
        self,
        kind: Kind,
        rows: int,
        pages: int,
        upload: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]],
        space: torch.Tensor,
    ) -> None:
        """`pages`: of one row."""
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        def numbers(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=space.device)

        self._kind, self._upload, self._sent = kind, upload, torch.cuda.Event()
        self._wrapper: Any = BatchDecodeWithPagedKVCacheWrapper(
            space,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=with_tensor_cores(kind),
            paged_kv_indptr_buffer=numbers(rows + 1),
            paged_kv_indices_buffer=numbers(rows * pages),
            paged_kv_last_page_len_buffer=numbers(rows),
        )
        self._wrapper.reset_workspace_buffer(space, torch.empty(_LISTS, dtype=torch.uint8, device=space.device))

    def plan(self, batch: AttentionBatch) -> Callable[..., torch.Tensor]:
        """The kernel, planned for the step that comes next on this stream."""
        kind = self._kind
        lengths = np.maximum(batch.sequence_lengths, 1)  # a row of padding sees page 0, which belongs to nobody
        table = batch.page_tables[kind.group]
        counts = -(-lengths // batch.page_tokens)
        ends = np.concatenate([np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)])
        held = np.ascontiguousarray(table[np.arange(table.shape[1])[None, :] < counts[:, None]], np.int32)
        lasts = ((lengths - 1) % batch.page_tokens + 1).astype(np.int32)
        # From the device: for a list on the host FlashInfer would wait until the step before this one has ended.
        (there,) = self._upload([torch.from_numpy(held)])
        self._sent.synchronize()  # its pinned memory still holds the last plan until that has arrived
        self._wrapper.plan(
            torch.from_numpy(ends),
            there,
            torch.from_numpy(lasts),
            kind.heads,
            kind.kv_heads,
            kind.width,
            batch.page_tokens,
            window_left=-1 if kind.window is None else kind.window - 1,
            logits_soft_cap=kind.softcap,
            q_data_type=kind.dtype,
            sm_scale=kind.scale,
        )
        self._sent.record()
        run: Callable[..., torch.Tensor] = self._wrapper.run
        return run


def by_flash(kind: Kind, otherwise: Decodes) -> Decodes:
    """Rows of one token by FlashInfer where the plan has its part, the cache is of the activations' dtype, and no
    pages are read once for several rows."""

    def decode(
        q: torch.Tensor, new: tuple[torch.Tensor, torch.Tensor] | None, keys: torch.Tensor, values: torch.Tensor,
        plan: GpuPlan, group: int, rule: ScoreRule, sinks: torch.Tensor | None, out: torch.Tensor,
    ) -> None:  # fmt: skip
        shares = plan.shared(group, rule) is not None
        if shares or keys.dtype is not kind.dtype or not isinstance(plan, FlashDecodePlan):
            return otherwise(q, new, keys, values, plan, group, rule, sinks, out)
        if new is not None:
            store(*new, plan.slots[group], keys, values, plan.page_tokens)
        plan.decode(kind)(q, (keys, values), out=out)
        return None

    return decode


def with_tensor_cores(kind: Kind) -> bool:
    """Whether the kernel is FlashInfer's one for prompts, with a query per row; else it has one for decodes."""
    return kind.heads >= _SHARED * kind.kv_heads


def why_not(kind: Kind, compile: bool) -> str:
    """Why FlashInfer's kernel cannot be had, or ""; `compile`: whether it may be compiled now."""
    from flashinfer.jit import gen_batch_decode_module, gen_batch_prefill_module

    dtypes, rules = (kind.dtype, kind.dtype, kind.dtype, torch.int32), (kind.window is not None, bool(kind.softcap))
    if with_tensor_cores(kind):
        module = gen_batch_prefill_module("fa2", *dtypes, kind.width, kind.width, 0, *rules, False)
    else:
        module = gen_batch_decode_module(*dtypes, kind.width, kind.width, 0, *rules)
    return lacking(module, compile)
