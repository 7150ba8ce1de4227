"""New keys and values into their pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _store(
    k_ptr, v_ptr, slots_ptr, keys_ptr, values_ptr, k_row, k_head, v_row, v_head, page_k, slot_k, head_k,
    page_v, slot_v, head_v, D: tl.constexpr, D_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(slots_ptr + token)
    page, slot = (place // PAGE).to(tl.int64), place % PAGE
    d, dv = tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
    k = tl.load(k_ptr + token * k_row + head * k_head + d, mask=d < D, other=0.0)
    tl.store(keys_ptr + page * page_k + slot * slot_k + head * head_k + d, k.to(keys_ptr.dtype.element_ty), mask=d < D)
    v = tl.load(v_ptr + token * v_row + head * v_head + dv, mask=dv < DV, other=0.0)
    tl.store(
        values_ptr + page * page_v + slot * slot_v + head * head_v + dv, v.to(values_ptr.dtype.element_ty),
        mask=dv < DV,
    )  # fmt: skip


def store(
    k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, page: int
) -> None:
    """k [T, hk, d] and v [T, hk, dv] into pools [pages, page, hk, d or dv] at int32 slots [T]."""
    if not len(slots):
        return
    _store[(len(slots), k.shape[1])](
        k, v, slots, keys, values, k.stride(0), k.stride(1), v.stride(0), v.stride(1), keys.stride(0), keys.stride(1),
        keys.stride(2), values.stride(0), values.stride(1), values.stride(2), D=k.shape[-1],
        D_PAD=triton.next_power_of_2(k.shape[-1]), DV=v.shape[-1], DV_PAD=triton.next_power_of_2(v.shape[-1]),
        PAGE=page, num_warps=1,
    )  # fmt: skip
