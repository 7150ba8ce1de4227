"""Each function of AITER that is in use, tried once when the device is opened, against plain arithmetic on the host.

A trial is small, and the first one of an installation may take minutes: AITER compiles what is called. The conformance
kit calls the ops; its samples of products have too few rows to reach AITER, so these are what checks them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hardpoint_rocm.aiter_library import ATTENTION, BLOCKS

#: Error that 16-bit results may have, of the largest number wanted.
_TOLERANCE = 0.02
#: Rows of x, rows and columns of a weight, columns and rows per scale.
_ROWS, _HEIGHT, _WIDTH, _BLOCK = 160, 256, 512, 128
#: Queries and keys of each prompt; heads, heads of keys and their size.
_PROMPTS = ((5, 5), (9, 40), (150, 200))
_HEADS, _KV_HEADS, _SIZE = 4, 2, 128


class Trial:
    """Tries on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, name: str, call: Callable[..., torch.Tensor], float8: torch.dtype) -> str:
        """What is wrong with function `name`, or "". Raises what the function raises."""
        if name == ATTENTION:
            cases = {f"with a window of {window}" if window else "": self._attention(call, window) for window in (0, 8)}
        elif name == BLOCKS:
            cases = {"": self._product(call, float8, blocks=True)}
        else:
            cases = {f"of {dtype}": self._product(call, dtype, blocks=False) for dtype in (float8, torch.int8)}
        wrong = {case: error for case, error in cases.items() if not error <= _TOLERANCE}  # NaN is wrong too
        case, error = next(iter(wrong.items()), ("", 0.0))
        return f"{case} is wrong by {error:.2g} of the largest number".strip() if wrong else ""

    def _attention(self, call: Callable[..., torch.Tensor], window: int) -> float:
        """window: tokens that a query looks back, itself included; 0 for all."""
        source = torch.Generator().manual_seed(1)
        queries, lengths = zip(*_PROMPTS, strict=True)
        q = torch.randn(sum(queries), _HEADS, _SIZE, generator=source).bfloat16()
        k, v = (torch.randn(sum(lengths), _KV_HEADS, _SIZE, generator=source).bfloat16() for _ in range(2))
        there = [x.to(self._device) for x in (q, k, v)]
        out = torch.full_like(there[0], float("nan"))
        found = call(
            q=there[0],
            k=there[1],
            v=there[2],
            cu_seqlens_q=self._ends(queries),
            cu_seqlens_k=self._ends(lengths),
            max_seqlen_q=max(queries),
            max_seqlen_k=max(lengths),
            softmax_scale=0.07,
            causal=True,
            window_size=(window - 1, 0) if window else (-1, -1),
            out=out,
        )
        wanted = [
            attended(*rows, 0.07, window)
            for rows in zip(q.split(queries), k.split(lengths), v.split(lengths), strict=True)
        ]
        return _apart(found, torch.cat(wanted))

    def _ends(self, counts: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor((0, *counts)).cumsum(0).to(self._device, torch.int32)

    def _product(self, call: Callable[..., torch.Tensor], dtype: torch.dtype, *, blocks: bool) -> float:
        source = torch.Generator().manual_seed(2)
        x, w = (
            (torch.randn(rows, _WIDTH, generator=source) * 20).clamp(-100, 100).to(dtype) for rows in (_ROWS, _HEIGHT)
        )
        groups, heights = (_WIDTH // _BLOCK, _HEIGHT // _BLOCK) if blocks else (1, _HEIGHT)
        x_scale = torch.rand(_ROWS, groups, generator=source) + 0.5
        w_scale = torch.rand(heights, groups, generator=source) + 0.5
        codes = [part.to(self._device) for part in (x, w)]
        scales = [part.to(self._device) for part in (x_scale, w_scale)]
        found = call(XQ=codes[0], WQ=codes[1], x_scale=scales[0], w_scale=scales[1], dtype=torch.bfloat16)
        plain_x = x.float() * x_scale.repeat_interleave(_WIDTH // groups, 1)
        plain_w = w.float() * w_scale.repeat_interleave(_HEIGHT // heights, 0).repeat_interleave(_WIDTH // groups, 1)
        return _apart(found, plain_x @ plain_w.t())


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int) -> torch.Tensor:
    """float32 [n, h, d]: q [n, h, d] are the last tokens of keys and values [length, hk, d]; window: 0 for all."""
    heads, length = q.shape[1], len(k)
    k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    distance = torch.arange(length - len(q), length)[:, None] - torch.arange(length)[None, :]
    hidden = (distance < 0) | (distance >= (window or length))
    score = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    return torch.einsum("hqk,khd->qhd", score.masked_fill(hidden, float("-inf")).softmax(-1), v)


def _apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference, as a share of the largest number wanted; NaN where a number is missing."""
    if found.shape != wanted.shape:
        return float("inf")
    return float((found.cpu().float() - wanted).abs().max() / wanted.abs().max())
