"""A stand-in for AITER: functions with its published argument lists (0.1.20.post1), computed on the host in float32.

It holds what is passed against what AITER's source asks for: dtypes, shapes, strides, ends of rows. It says nothing of
AITER's kernels, which nobody here has run.
"""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import torch
from flash_stand_in import attended

FLOATS = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
HALVES = (torch.bfloat16, torch.float16)
BLOCK = 128
#: Names of the functions that were called.
CALLS: list[str] = []


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, min_seqlen_q=0, dropout_p=0.0, softmax_scale=None,
    logits_soft_cap=0.0, causal=False, window_size=(-1, -1, 0), bias=None, alibi_slopes=None, deterministic=False,
    return_lse=False, return_attn_probs=False, how_v3_bf16_cvt=1, block_table=None, out=None, cu_seqlens_q_padded=None,
    cu_seqlens_k_padded=None, sink_ptr=None,
):  # fmt: skip
    """q [Tq, h, d], k [Tk, hk, d], v [Tk, hk, dv]; the last query of a row sees its last key."""
    CALLS.append("flash_attn_varlen_func")
    assert q.dtype == k.dtype == v.dtype == out.dtype
    assert q.dtype in HALVES
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == out.stride(-1) == 1
    assert k.shape == v.shape
    assert q.shape == out.shape
    assert q.shape[-1] == k.shape[-1]
    assert q.shape[-1] % 8 == 0
    assert q.shape[1] % k.shape[1] == 0
    assert causal
    for ends, rows, most in ((cu_seqlens_q, q, max_seqlen_q), (cu_seqlens_k, k, max_seqlen_k)):
        assert ends.dtype == torch.int32
        assert ends.is_contiguous()
        assert int(ends[0]) == 0
        assert int(ends[-1]) == len(rows)
        assert int(ends.diff().max()) == most
        assert type(most) is int
    assert len(cu_seqlens_q) == len(cu_seqlens_k)
    left, right = window_size[:2]
    assert right == (-1 if left < 0 else 0)
    for row in range(len(cu_seqlens_q) - 1):
        queries = slice(int(cu_seqlens_q[row]), int(cu_seqlens_q[row + 1]))
        keys = slice(int(cu_seqlens_k[row]), int(cu_seqlens_k[row + 1]))
        assert keys.stop - keys.start >= queries.stop - queries.start
        out[queries] = attended(q[queries], k[keys], v[keys], softmax_scale, left, None).to(out.dtype)
    return out


def gemm_a8w8_CK(XQ, WQ, x_scale, w_scale, bias=None, dtype=torch.bfloat16, splitK=None):
    """XQ [M, K], WQ [N, K], scales [M, 1] and [N, 1]."""
    CALLS.append("gemm_a8w8_CK")
    _hold(XQ, WQ, x_scale, w_scale, dtype, (*FLOATS, torch.int8))
    assert x_scale.shape == (len(XQ), 1)
    assert w_scale.shape == (len(WQ), 1)
    assert bias is None
    return ((XQ.float() * x_scale) @ (WQ.float() * w_scale).t()).to(dtype)


def gemm_a8w8_blockscale(XQ, WQ, x_scale, w_scale, dtype=torch.bfloat16, isBpreshuffled=False):
    """XQ [M, K], WQ [N, K], scales [M, K / 128] and [N / 128, K / 128]."""
    CALLS.append("gemm_a8w8_blockscale")
    _hold(XQ, WQ, x_scale, w_scale, dtype, FLOATS)
    assert not isBpreshuffled
    assert not any(size % BLOCK for size in WQ.shape)
    groups = WQ.shape[1] // BLOCK
    assert x_scale.shape == (len(XQ), groups)
    assert w_scale.shape == (len(WQ) // BLOCK, groups)
    x = XQ.float() * x_scale.repeat_interleave(BLOCK, 1)
    w = WQ.float() * w_scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return (x @ w.t()).to(dtype)


def _hold(x: Any, w: Any, x_scale: Any, w_scale: Any, dtype: torch.dtype, kinds: tuple[torch.dtype, ...]) -> None:
    assert x.dtype == w.dtype
    assert x.dtype in kinds
    assert x_scale.dtype == w_scale.dtype == torch.float32
    assert dtype in HALVES
    assert all(part.is_contiguous() for part in (x, w, x_scale, w_scale))
    assert x.shape[1] == w.shape[1]


def package() -> ModuleType:
    """A module `aiter` with these functions."""
    made = ModuleType("aiter")
    made.__spec__ = importlib.machinery.ModuleSpec("aiter", None)
    for function in (flash_attn_varlen_func, gemm_a8w8_CK, gemm_a8w8_blockscale):
        setattr(made, function.__name__, function)
    return made


def install(monkeypatch: Any) -> ModuleType:
    """Put it in the place of AITER, until the test ends; it may be changed."""
    made = package()
    monkeypatch.setitem(sys.modules, "aiter", made)
    CALLS.clear()
    return made
