"""Attention of prompts by FlashInfer, where it is installed: its kernels are faster than Triton's on long prompts.

FlashInfer (Ye et al. 2025, arXiv:2501.01005) plans a step on the host, once for all layers of a kind, and compiles a
kernel per kind of attention. Rows that bring one token stay with the Triton kernel, whose plan costs the host nothing,
unless FlashInfer's was measured faster (`flash_decode.py`) and they share no pages to speak of.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from hardpoint_torch_gpu.attention import Decodes, Prompts, TritonAttention, of_shared_pages
from hardpoint_torch_gpu.measured import Measurements
from hardpoint_torch_gpu.plan import GpuPlan, GpuPlanner
from hardpoint_torch_gpu.rule import ScoreRule

from hardpoint_cuda.flash_decode import FlashDecodes, by_flash, why_not
from hardpoint_cuda.flash_plans import Kind, Turns, lacking, page_lists
from hardpoint_platforms.batch import AttentionBatch
from hardpoint_platforms.ops.contract import OpInstance
from hardpoint_platforms.ops.provider import Support

#: Bytes that partial results of split rows may take.
_WORKSPACE = 256 << 20
_WIDTHS = (64, 128, 256)
_HOPPER = (9, 0)
#: Seconds that Triton's decode saves in a step and not alone: it starts while the kernel before it ends, and no plan is
#: made for it on the host.
_HEAD_START = 2.5e-6


@dataclass(frozen=True, eq=False)
class FlashPlan(GpuPlan):
    """A plan whose rows with several tokens lie together: they are tokens first to last of the batch.

    `run` gives the planned kernel for a kind; the first op of a kind plans for all of them.
    """

    first: int
    last: int
    run: Callable[[Kind], Callable[..., torch.Tensor]]


class FlashPlanner(GpuPlanner):
    """Owns FlashInfer's wrappers and their work space."""

    def __init__(
        self,
        upload: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]],
        device: torch.device,
        backend: str,
    ) -> None:
        super().__init__(upload)
        self._device, self._backend = device, backend
        self._space: torch.Tensor | None = None
        self._turns: dict[Kind, Turns] = {}
        #: Kinds whose decodes are FlashInfer's, too.
        self.decodes = FlashDecodes(upload, self.space)

    def space(self) -> torch.Tensor:
        """Memory for partial results; zeros at first."""
        if self._space is None:
            self._space = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=self._device)
        return self._space

    def plan(self, batch: AttentionBatch) -> GpuPlan:
        plan = super().plan(batch)
        if not len(plan.tile_rows):
            return self.decodes.planned(plan, batch)
        rows = np.flatnonzero(np.diff(batch.query_start[: batch.num_requests + 1]) > 1)
        if rows[-1] - rows[0] + 1 != len(rows):
            return plan
        first, last = int(batch.query_start[rows[0]]), int(batch.query_start[rows[-1] + 1])
        run = cache(partial(self._run, batch, rows))
        return FlashPlan(**vars(plan), first=first, last=last, run=run)

    def apart(self, batch: AttentionBatch, kind: Kind) -> GpuPlan:
        """For decodes of one kind, in buffers that no step uses."""
        decodes = FlashDecodes(self._upload, self.space)
        decodes.take(kind)
        return decodes.planned(super().plan(batch), batch)

    def _run(self, batch: AttentionBatch, rows: np.ndarray, kind: Kind) -> Callable[..., torch.Tensor]:
        starts, ends, held = page_lists(batch, rows, kind.group)
        lasts = (batch.sequence_lengths[rows] - 1) % batch.page_tokens + 1
        if kind not in self._turns:
            self._turns[kind] = Turns(self._wrapper)
        return self._turns[kind].plan(
            (starts, ends, held, lasts),
            kind.heads,
            kind.kv_heads,
            kind.width,
            batch.page_tokens,
            causal=True,
            sm_scale=kind.scale,
            window_left=-1 if kind.window is None else kind.window - 1,
            logits_soft_cap=kind.softcap,
            q_data_type=kind.dtype,
        )

    def _wrapper(self) -> Any:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        return BatchPrefillWithPagedKVCacheWrapper(self.space(), "NHD", backend=self._backend)


class FlashInferAttention(TritonAttention):
    """Prompts by FlashInfer, rows of one token by Triton, unless FlashInfer was measured faster at those, too."""

    name = "flashinfer + triton attention"

    def __init__(self, planner: FlashPlanner, backend: str, measurements: Measurements, *, compile: bool) -> None:
        """backend: "fa2" or "fa3"; compile: whether a kernel that is on no disk yet may be compiled now (a minute)."""
        super().__init__(planner)
        self._flash_planner, self._backend, self._compile = planner, backend, compile
        self._measurements = measurements

    def supports(self, instance: OpInstance) -> Support:
        answer = super().supports(instance)
        if not answer:
            return answer
        why = _unlike(instance) or lacking(_module(Kind.of(instance), self._backend), self._compile)
        if why:
            return Support(False, why)
        kind = Kind.of(instance)
        decodes = why_not(kind, self._compile) or (
            "" if self._measurements.knows(_of_decodes(kind)) else "`--option measure=true` tries FlashInfer's kernel"
        )
        told = f"decodes by Triton's ({decodes})" if decodes else "decodes by the faster of both"
        return Support(True, f"prompts by FlashInfer's {self._backend}, {told}{of_shared_pages(instance)}")

    def decodes(self, instance: OpInstance) -> Decodes:
        kind, otherwise = Kind.of(instance), super().decodes(instance)
        question = _of_decodes(kind)
        if why_not(kind, self._compile) or not self._measurements.knows(question):
            return otherwise
        flash, rule = by_flash(kind, otherwise), ScoreRule.of(instance.attrs)
        trial = DecodeTrial(kind, self._flash_planner)
        ways = {"triton": partial(trial.run, otherwise, rule), "flashinfer": partial(trial.run, flash, rule)}
        if self._measurements.fastest(question, ways, _HEAD_START) != "flashinfer":
            return otherwise
        self._flash_planner.decodes.take(kind)
        return flash

    def prompts(self, instance: OpInstance) -> Prompts:
        kind, otherwise = Kind.of(instance), super().prompts(instance)

        def flash(
            q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: GpuPlan, sinks: torch.Tensor | None,
            out: torch.Tensor,
        ) -> None:  # fmt: skip
            if not isinstance(plan, FlashPlan) or keys.dtype is not kind.dtype:
                return otherwise(q, keys, values, plan, sinks, out)
            part = slice(plan.first, plan.last)
            plan.run(kind)(q[part], (keys, values), out=out[part])
            return None

        question = f"attention of prompts, {kind.heads} over {kind.kv_heads} heads of {kind.width}, {kind.dtype}"
        if not self._measurements.knows(question):
            return flash
        trial = Trial(kind, self._flash_planner)
        ways = {"flashinfer": partial(trial.run, flash), "triton": partial(trial.run, otherwise)}
        return flash if self._measurements.fastest(question, ways) == "flashinfer" else otherwise


class Trial:
    """Prompts to time kernels with: a few long ones, as they come when a step is full of them."""

    _ROWS, _TOKENS, _PAGE = 4, 1024, 16

    def __init__(self, kind: Kind, planner: FlashPlanner) -> None:
        self._kind, self._planner = kind, planner
        self._made: tuple[torch.Tensor, torch.Tensor, torch.Tensor, GpuPlan] | None = None

    def run(self, kernel: Prompts) -> None:
        """One call."""
        q, cache, out, plan = self._made = self._made or self._make()
        kernel(q, cache, cache, plan, None, out)

    def _make(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, GpuPlan]:
        kind, rows, tokens = self._kind, self._ROWS, self._ROWS * self._TOKENS
        pages = tokens // self._PAGE
        table = np.arange(pages, dtype=np.int32).reshape(rows, -1)
        batch = AttentionBatch(
            query_start=np.arange(rows + 1, dtype=np.int32) * self._TOKENS,
            sequence_lengths=np.full(rows, self._TOKENS, np.int32),
            page_tables=(table,) * (kind.group + 1),
            slot_mapping=(np.arange(tokens, dtype=np.int32),) * (kind.group + 1),
            page_tokens=self._PAGE,
            num_requests=rows,
            num_tokens=tokens,
        )
        plan = self._planner.plan(batch)
        numbers = partial(_numbers, kind.dtype, plan.starts.device)
        q, cache = numbers(tokens, kind.heads, kind.width), numbers(pages, self._PAGE, kind.kv_heads, kind.width)
        return q, cache, torch.empty_like(q), plan


class DecodeTrial:
    """Decodes to time kernels with: as many rows as keep a GPU busy, of a length that is common."""

    _ROWS, _TOKENS, _PAGE = 64, 1024, 16

    def __init__(self, kind: Kind, planner: FlashPlanner) -> None:
        self._kind, self._planner = kind, planner
        self._made: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, GpuPlan] | None = None

    def run(self, kernel: Decodes, rule: ScoreRule) -> None:
        """One call."""
        q, new, cache, out, plan = self._made = self._made or self._make()
        kernel(q, (new, new), cache, cache, plan, self._kind.group, rule, None, out)

    def _make(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, GpuPlan]:
        kind, rows = self._kind, self._ROWS
        table = np.arange(rows * self._TOKENS // self._PAGE, dtype=np.int32).reshape(rows, -1)
        slots = ((table[:, -1] + 1) * self._PAGE - 1).astype(np.int32)
        batch = AttentionBatch(
            query_start=np.arange(rows + 1, dtype=np.int32),
            sequence_lengths=np.full(rows, self._TOKENS, np.int32),
            page_tables=(table,) * (kind.group + 1),
            slot_mapping=(slots,) * (kind.group + 1),
            page_tokens=self._PAGE,
            num_requests=rows,
            num_tokens=rows,
        )
        plan = self._planner.apart(batch, kind)
        numbers = partial(_numbers, kind.dtype, plan.starts.device)
        q, new = numbers(rows, kind.heads, kind.width), numbers(rows, kind.kv_heads, kind.width)
        return q, new, numbers(table.size, self._PAGE, kind.kv_heads, kind.width), torch.empty_like(q), plan


def _numbers(dtype: torch.dtype, device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float32, device=device).to(dtype)


def _of_decodes(kind: Kind) -> str:
    return f"attention of decodes, {kind.heads} over {kind.kv_heads} heads of {kind.width}, {kind.dtype}"


def backend_for(capability: tuple[int, int]) -> str:
    """FlashInfer's family of kernels for a GPU: the third FlashAttention's is Hopper's alone."""
    return "fa3" if capability == _HOPPER else "fa2"


def missing() -> str:
    """Why FlashInfer cannot be used at all, or ""."""
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed (pip install flashinfer-python): prompts are attended by Triton's kernel"
    try:
        importlib.import_module("flashinfer.jit")
    except Exception as error:  # a broken installation is no reason not to serve
        return f"FlashInfer cannot be imported ({type(error).__name__}: {error})"
    return ""


def _unlike(instance: OpInstance) -> str:
    attrs = instance.attrs
    if instance.dtype not in (torch.bfloat16, torch.float16):
        return f"{instance.dtype} products, FlashInfer has 16-bit ones"
    if attrs["head_dim"] not in _WIDTHS or attrs["v_head_dim"] != attrs["head_dim"]:
        return f"head sizes {attrs['head_dim']} and {attrs['v_head_dim']}, FlashInfer has {_WIDTHS}"
    if attrs["alibi"] is not None or "sinks" in instance.weights:
        return "a score with a bias by distance or with sinks"
    return ""


def _module(kind: Kind, backend: str) -> Any:
    """FlashInfer's description of the kernel: whether it is on disk, and how it is compiled."""
    from flashinfer.jit import gen_batch_prefill_module

    return gen_batch_prefill_module(
        backend, kind.dtype, kind.dtype, kind.dtype, torch.int32, kind.width, kind.width, 0, kind.window is not None,
        kind.softcap is not None, False,
    )  # fmt: skip
