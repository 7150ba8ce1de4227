"""Attention of prompts by AITER, over keys that are gathered from their pages first.

AITER also has a kernel that reads pages of our layout itself (`mha_batch_prefill_func`). It is not called: which page
sizes it takes differs from release to release and stands in no signature, and in caches of more than 2 GiB per layer
it has read wrong pages in some releases (ROCm/aiter issues 2517, 2608, 3824). Gathering costs one pass over the keys,
little beside attention of a prompt. What is gathered has a place of fixed size; a step that needs more is Triton's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from hardpoint_torch_gpu.attention import Prompts, TritonAttention
from hardpoint_torch_gpu.plan import GpuPlan, GpuPlanner

from hardpoint_platforms.batch import AttentionBatch
from hardpoint_platforms.ops.contract import OpInstance
from hardpoint_platforms.ops.provider import Support
from hardpoint_rocm.aiter_library import AiterFunction

#: Bytes that gathered keys and values may take.
_WORKSPACE = 256 << 20
#: Sizes of heads: its code is compiled for some up to the largest, others are padded; vectors have this many numbers.
_WIDEST, _VECTOR = 256, 8


@dataclass(frozen=True, eq=False)
class Gathering:
    """Which keys the rows of a step with several tokens need, one row's after another's.

    Attributes:
        places: int32 [N], where each lies: page * tokens per page + offset.
        query_ends, key_ends: int32 [R + 1], where each row's queries and keys end; the first is 0.
        most_queries, most_keys: of one row.
    """

    places: torch.Tensor
    query_ends: torch.Tensor
    key_ends: torch.Tensor
    most_queries: int
    most_keys: int


@dataclass(frozen=True, eq=False)
class AiterPlan(GpuPlan):
    """A plan whose rows with several tokens lie together: they are tokens first to last of the batch.

    `gathering(group, window, most)` is one for all ops that ask for the same; None if it had more than `most` keys.
    """

    first: int
    last: int
    gathering: Callable[[int, int | None, int], Gathering | None]


class AiterPlanner(GpuPlanner):
    """Owns the place of what is gathered: one op's at a time, as a stream runs them in order."""

    def __init__(
        self, upload: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]], device: torch.device
    ) -> None:
        super().__init__(upload)
        self._device = device
        self._space: torch.Tensor | None = None

    def plan(self, batch: AttentionBatch) -> GpuPlan:
        plan = super().plan(batch)
        rows = np.flatnonzero(np.diff(batch.query_start[: batch.num_requests + 1]) > 1)
        if not len(rows) or rows[-1] - rows[0] + 1 != len(rows):
            return plan
        first, last = int(batch.query_start[rows[0]]), int(batch.query_start[rows[-1] + 1])
        return AiterPlan(**vars(plan), first=first, last=last, gathering=cache(partial(self._gathering, batch, rows)))

    def _gathering(
        self, batch: AttentionBatch, rows: np.ndarray, group: int, window: int | None, most: int
    ) -> Gathering | None:
        """window: tokens that a query looks back, itself included: the keys before that stay where they are."""
        queries = batch.query_start[rows + 1] - batch.query_start[rows]
        lengths = batch.sequence_lengths[rows]
        firsts = np.maximum(lengths - queries - (window - 1), 0) if window is not None else np.zeros_like(lengths)
        counts = lengths - firsts
        query_ends, key_ends = (np.concatenate([[0], np.cumsum(each)]) for each in (queries, counts))
        if key_ends[-1] > most:
            return None
        token = np.arange(key_ends[-1]) + np.repeat(firsts - key_ends[:-1], counts)
        page = batch.page_tables[group][np.repeat(rows, counts), token // batch.page_tokens]
        places = page.astype(np.int64) * batch.page_tokens + token % batch.page_tokens
        arrays = [torch.from_numpy(array.astype(np.int32)) for array in (places, query_ends, key_ends)]
        sent = self._upload(arrays)
        return Gathering(sent[0], sent[1], sent[2], int(queries.max()), int(counts.max()))

    def gathered(self, pool: torch.Tensor, places: torch.Tensor, half: int) -> torch.Tensor:
        """pool [pages, page, hk, d] -> [N, hk, d], in one half (0 or 1) of the place."""
        if self._space is None:
            self._space = torch.empty(_WORKSPACE, dtype=torch.uint8, device=self._device)
        shape = (len(places), *pool.shape[2:])
        begin, size = half * (_WORKSPACE // 2), len(places) * pool[0, 0].numel() * pool.element_size()
        out = self._space[begin : begin + size].view(pool.dtype).view(shape)
        return torch.index_select(pool.flatten(0, 1), 0, places, out=out)


class AiterAttention(TritonAttention):
    """Prompts by AITER, rows of one token by Triton."""

    name = "aiter + triton attention"

    def __init__(self, planner: AiterPlanner, function: AiterFunction) -> None:
        super().__init__(planner)
        self._gatherer, self._function = planner, function

    def supports(self, instance: OpInstance) -> Support:
        answer = super().supports(instance)
        if not answer:
            return answer
        why = self._function.against or _unlike(instance)
        return (
            Support(False, why) if why else Support(True, "prompts by AITER over gathered pages, decodes by Triton's")
        )

    def prompts(self, instance: OpInstance) -> Prompts:
        attrs, otherwise, call = instance.attrs, super().prompts(instance), self._function.call
        group, window, scale, dtype = attrs["group"], attrs["window"], attrs["scale"], instance.dtype
        most = _WORKSPACE // 2 // (attrs["kv_heads"] * attrs["head_dim"] * dtype.itemsize)
        sides = (-1, -1) if window is None else (window - 1, 0)

        def by_aiter(
            q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: GpuPlan, sinks: torch.Tensor | None,
            out: torch.Tensor,
        ) -> None:  # fmt: skip
            wanted = None
            if isinstance(plan, AiterPlan) and keys.dtype is dtype:
                wanted = plan.gathering(group, window, most)
            if wanted is None or not isinstance(plan, AiterPlan):
                otherwise(q, keys, values, plan, sinks, out)
                return
            here = out[plan.first : plan.last]
            made = call(
                q=q[plan.first : plan.last],
                k=self._gatherer.gathered(keys, wanted.places, 0),
                v=self._gatherer.gathered(values, wanted.places, 1),
                cu_seqlens_q=wanted.query_ends,
                cu_seqlens_k=wanted.key_ends,
                max_seqlen_q=wanted.most_queries,
                max_seqlen_k=wanted.most_keys,
                softmax_scale=scale,
                causal=True,
                window_size=sides,
                out=here,
            )
            if made.data_ptr() != here.data_ptr():  # not every way through AITER writes where it is told to
                here.copy_(made)

        return by_aiter


def _unlike(instance: OpInstance) -> str:
    attrs = instance.attrs
    if instance.dtype not in (torch.bfloat16, torch.float16):
        return f"{instance.dtype} products, AITER has 16-bit ones"
    width = attrs["head_dim"]
    if attrs["v_head_dim"] != width:
        return f"head sizes {width} and {attrs['v_head_dim']}, AITER is asked for equal ones"
    if width % _VECTOR or width > _WIDEST:
        return f"head size {width}, AITER has multiples of {_VECTOR} up to {_WIDEST}"
    if attrs["softcap"] is not None:
        return "a soft cap, which one of the kernels that AITER chooses from leaves out"
    if attrs["window"] == 1:
        return "a sliding window of one token, which one of the kernels that AITER chooses from takes for none"
    if attrs["alibi"] is not None or "sinks" in instance.weights:
        return "a score with a bias by distance or with sinks: AITER is not asked for these"
    return ""
