"""What FlashInfer's kernels have in common: how a step is laid out for them, planned, and whether a kernel is there."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hardpoint_platforms.batch import AttentionBatch
from hardpoint_platforms.ops.contract import OpInstance


@dataclass(frozen=True)
class Kind:
    """What a plan is made for. Ops that agree in all of it share one."""

    group: int
    heads: int
    kv_heads: int
    width: int
    dtype: torch.dtype
    window: int | None
    softcap: float | None
    scale: float

    @classmethod
    def of(cls, instance: OpInstance) -> Kind:
        """From an `attention` op."""
        attrs = instance.attrs
        return cls(
            attrs["group"], attrs["heads"], attrs["kv_heads"], attrs["head_dim"], instance.dtype, attrs["window"],
            attrs["softcap"], attrs["scale"],
        )  # fmt: skip


def page_lists(batch: AttentionBatch, rows: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of `rows`, which lie together: first queries [R + 1], where each row's pages end [R + 1], and these pages."""
    starts = batch.query_start[rows[0] : rows[-1] + 2] - batch.query_start[rows[0]]
    table = batch.page_tables[group][rows]
    counts = -(-batch.sequence_lengths[rows] // batch.page_tokens)
    ends = np.concatenate([np.zeros(1, np.int32), np.cumsum(counts)])
    return starts, ends, table[np.arange(table.shape[1])[None, :] < counts[:, None]]


class Turns:
    """Two wrappers of a kind in turns: a wrapper's host buffer is free again when what it sent has arrived."""

    def __init__(self, make: Callable[[], Any]) -> None:
        """`make` gives a wrapper."""
        self._wrappers = [(make(), torch.cuda.Event()) for _ in range(2)]

    def plan(
        self,
        arrays: Sequence[np.ndarray],
        *sizes: int,
        named: Mapping[str, np.ndarray] | None = None,
        **settings: Any,
    ) -> Callable[..., torch.Tensor]:
        """The planned kernel. Arrays, by place or `named`, go to the wrapper as int32 on the host."""
        self._wrappers.reverse()
        wrapper, sent = self._wrappers[0]
        sent.synchronize()
        by_name = {name: _int32(array) for name, array in (named or {}).items()}
        wrapper.plan(*map(_int32, arrays), *sizes, **by_name, **settings)
        sent.record()
        run: Callable[..., torch.Tensor] = wrapper.run
        return run


def _int32(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, np.int32))


def lacking(module: Any, compile: bool) -> str:
    """Why the kernel of FlashInfer's `module` cannot be had, or ""; `compile`: whether it may be compiled now."""
    if module.is_compiled or module.is_aot:
        return ""
    if not compile:
        return "its kernel is not compiled yet: `--option flashinfer=compile` does so, in about a minute"
    return "" if shutil.which("nvcc") else "its kernel is not compiled, and there is no nvcc to do so"
