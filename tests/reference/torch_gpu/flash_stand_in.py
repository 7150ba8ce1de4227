"""A stand-in for FlashInfer, whose wrappers compute from just what they were told, in float32."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from hardpoint_cuda import flash_decode, flash_infer


def attended(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int, cap: float | None
) -> torch.Tensor:
    """q [n, h, d] of the last tokens over keys and values [length, hk, d]; `window`: tokens to the left."""
    heads, length = q.shape[1], len(keys)
    keys, values = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (keys, values))
    distance = torch.arange(length - len(q), length)[:, None] - torch.arange(length)[None, :]
    seen = (distance >= 0) & ((distance <= window) | (window < 0))
    score = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if cap is not None:
        score = cap * torch.tanh(score / cap)
    weight = score.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weight, values)


class Wrapper:
    """Attends what `plan` was told, one row at a time, in float32."""

    made = 0

    def __init__(self, space: torch.Tensor, layout: str, *, backend: str) -> None:
        assert (layout, backend) == ("NHD", "fa2")

    def plan(self, starts: torch.Tensor, ends: torch.Tensor, pages: torch.Tensor, lasts: torch.Tensor, *shape: int,
             causal: bool, sm_scale: float, window_left: int, logits_soft_cap: float | None,
             q_data_type: torch.dtype) -> None:  # fmt: skip
        assert causal
        assert all(array.dtype == torch.int32 for array in (starts, ends, pages, lasts))
        assert int(ends[-1]) == len(pages)
        type(self).made += 1
        self.rows = [
            (slice(int(starts[r]), int(starts[r + 1])), pages[int(ends[r]) : int(ends[r + 1])].long(), int(lasts[r]))
            for r in range(len(lasts))
        ]
        self.shape, self.scale, self.window, self.cap = shape, sm_scale, window_left, logits_soft_cap

    def run(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        heads, _, width, page = self.shape
        assert q.shape[1:] == (heads, width)
        for part, pages, last in self.rows:
            keys, values = (pool[pages].flatten(0, 1)[: (len(pages) - 1) * page + last] for pool in cache)
            out[part] = attended(q[part], keys, values, self.scale, self.window, self.cap).to(out.dtype)
        return out


class DecodeWrapper:
    """Attends what its buffers hold when it runs, as a graph would; it may be planned for other lengths in between."""

    made, ran = 0, 0

    def __init__(self, space: torch.Tensor, layout: str, *, use_cuda_graph: bool, use_tensor_cores: bool,
                 paged_kv_indptr_buffer: torch.Tensor, paged_kv_indices_buffer: torch.Tensor,
                 paged_kv_last_page_len_buffer: torch.Tensor) -> None:  # fmt: skip
        assert use_cuda_graph
        assert layout == "NHD"
        assert not space.any()
        self.tensor_cores = use_tensor_cores
        self.ends, self.pages = paged_kv_indptr_buffer, paged_kv_indices_buffer
        self.lasts = paged_kv_last_page_len_buffer
        self.lists: torch.Tensor | None = None

    def reset_workspace_buffer(self, space: torch.Tensor, lists: torch.Tensor) -> None:
        self.lists = lists

    def plan(self, ends: torch.Tensor, pages: torch.Tensor, lasts: torch.Tensor, *shape: int, window_left: int,
             logits_soft_cap: float | None, q_data_type: torch.dtype, sm_scale: float) -> None:  # fmt: skip
        assert all(array.dtype == torch.int32 for array in (ends, pages, lasts))
        assert len(lasts) == len(self.lasts), "the number of rows is fixed"
        assert int(ends[-1]) == len(pages) <= len(self.pages)
        assert int(ends.diff().min()) > 0, "no row without pages"
        assert ((lasts > 0) & (lasts <= shape[-1])).all()
        type(self).made += 1
        self.ends.copy_(ends)
        self.pages[: len(pages)] = pages
        self.lasts.copy_(lasts)
        self.shape, self.scale, self.window, self.cap = shape, sm_scale, window_left, logits_soft_cap

    def run(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        heads, kv_heads, width, page = self.shape
        type(self).ran += 1
        assert q.shape == out.shape == (len(self.lasts), heads, width)
        assert self.tensor_cores is (heads >= 4 * kv_heads)
        for row, last in enumerate(self.lasts.tolist()):
            pages = self.pages[int(self.ends[row]) : int(self.ends[row + 1])].long()
            keys, values = (pool[pages].flatten(0, 1)[: (len(pages) - 1) * page + last] for pool in cache)
            out[row] = attended(q[row : row + 1], keys, values, self.scale, self.window, self.cap)[0].to(out.dtype)
        return out


def install(monkeypatch: Any) -> SimpleNamespace:
    """Put it in the place of the library; `on_disk` of what is returned says whether its kernels are compiled."""
    state = SimpleNamespace(on_disk=True)
    package, jit = ModuleType("flashinfer"), ModuleType("flashinfer.jit")
    package.BatchPrefillWithPagedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
    package.BatchDecodeWithPagedKVCacheWrapper = DecodeWrapper  # type: ignore[attr-defined]
    for name in ("gen_batch_prefill_module", "gen_batch_decode_module"):
        setattr(jit, name, lambda *kind: SimpleNamespace(is_compiled=state.on_disk, is_aot=False))
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.jit", jit)
    monkeypatch.setattr(flash_infer, "_WIDTHS", (16, 32))
    monkeypatch.setattr(flash_infer, "_WORKSPACE", 16)
    monkeypatch.setattr(flash_decode, "_LISTS", 16)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(synchronize=lambda: None, record=lambda: None))
    return state


def shorten_trials(monkeypatch: Any) -> None:
    """Measured choices by few tokens: the interpreter is slow."""
    monkeypatch.setattr(flash_infer.Trial, "_TOKENS", 16)
    monkeypatch.setattr(flash_infer.DecodeTrial, "_TOKENS", 16)
    monkeypatch.setattr(flash_infer.DecodeTrial, "_ROWS", 2)
