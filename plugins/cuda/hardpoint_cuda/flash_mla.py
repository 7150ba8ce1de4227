"""Latent attention by libraries where they are installed: prompts that continue by FlashInfer, decodes by FlashMLA.

FlashInfer plans a step on the host, once for all layers of a kind. DeepSeek's FlashMLA plans on the GPU, so that a
graph holds it; it wants pages of 64 tokens in which the latent and the rope key of a token lie next to each other, as
`LatentCache` puts them. Where a step is not of that form the Triton kernels take it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from hardpoint_torch_gpu.kernels.mla_decode import mla_decode
from hardpoint_torch_gpu.kernels.mla_prefill import mla_prefill
from hardpoint_torch_gpu.kernels.store import store
from hardpoint_torch_gpu.latent_plan import LatentPlan, LatentPlanner
from hardpoint_torch_gpu.mla import Prompts, TritonMla
from hardpoint_torch_gpu.pages import GpuStateCache
from hardpoint_torch_gpu.plan import GpuPlan, GpuPlanner

from hardpoint_cuda.flash_infer import backend_for, missing
from hardpoint_cuda.flash_plans import Turns, lacking, page_lists
from hardpoint_platforms.batch import AttentionBatch
from hardpoint_platforms.ops.contract import OpInstance
from hardpoint_platforms.ops.provider import OpProvider, Support
from hardpoint_platforms.state_cache import CacheLayout, State

Upload = Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]

#: Bytes that partial results of split rows may take.
_WORKSPACE = 128 << 20
#: Sizes of latent and rope key that both libraries have kernels for.
_WIDTHS = (512, 64)
_DTYPES = (torch.bfloat16, torch.float16)
#: Tokens per page of FlashMLA, and the compute capability that it is for.
_PAGE, _HOPPER = 64, (9, 0)
_TOLD = f"decodes by FlashMLA with --page-tokens {_PAGE}, by Triton with other pages"


@dataclass(frozen=True)
class LatentKind:
    """What a plan is made for. Layers that agree in all of it share one."""

    group: int
    heads: int
    dtype: torch.dtype
    scale: float


@dataclass(frozen=True, eq=False)
class FlashMlaPlan(GpuPlan):
    """A plan whose rows that bring several tokens after cached ones lie together: tokens first to last of the batch.

    `run` gives the planned kernel for a kind; the first layer of a kind plans for all of them.
    """

    first: int
    last: int
    run: Callable[[LatentKind], Callable[..., torch.Tensor]]


class FlashMlaPlanner(LatentPlanner):
    """Owns FlashInfer's wrappers for latents and their work space.

    Prompts with nothing cached before them are left to the Triton kernel over expanded keys: a third of the products.
    """

    def __init__(self, upload: Upload, device: torch.device, backend: str) -> None:
        super().__init__(upload)
        self._device, self._backend = device, backend
        self._space: torch.Tensor | None = None
        self._turns: dict[LatentKind, Turns] = {}

    def plan(self, batch: AttentionBatch) -> GpuPlan:
        plan = super().plan(batch)
        counts = np.diff(batch.query_start[: batch.num_requests + 1])
        rows = np.flatnonzero((counts > 1) & (counts < batch.sequence_lengths[: batch.num_requests]))
        if not len(rows) or rows[-1] - rows[0] + 1 != len(rows):
            return plan
        if not isinstance(plan, LatentPlan):
            return self._flash(plan, batch, rows)
        return replace(plan, rest=self._flash(plan.rest, batch, rows) if plan.rest is not None else None)

    def _flash(self, plan: GpuPlan, batch: AttentionBatch, rows: np.ndarray) -> FlashMlaPlan:
        first, last = int(batch.query_start[rows[0]]), int(batch.query_start[rows[-1] + 1])
        run = cache(partial(self._run, batch, rows))
        return FlashMlaPlan(**vars(plan), first=first, last=last, run=run)

    def _run(self, batch: AttentionBatch, rows: np.ndarray, kind: LatentKind) -> Callable[..., torch.Tensor]:
        starts, ends, held = page_lists(batch, rows, kind.group)
        lengths = batch.sequence_lengths[rows]
        if self._space is None:
            self._space = torch.empty(_WORKSPACE, dtype=torch.uint8, device=self._device)
        if kind not in self._turns:
            self._turns[kind] = Turns(self._wrapper)
        return self._turns[kind].plan(
            (),
            named={"qo_indptr": starts, "kv_indptr": ends, "kv_indices": held, "kv_len_arr": lengths},
            num_heads=kind.heads,
            head_dim_ckv=_WIDTHS[0],
            head_dim_kpe=_WIDTHS[1],
            page_size=batch.page_tokens,
            causal=True,
            sm_scale=kind.scale,
            q_data_type=kind.dtype,
            kv_data_type=kind.dtype,
        )

    def _wrapper(self) -> Any:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        return BatchMLAPagedAttentionWrapper(self._space, backend=self._backend)


def flash_prompts(
    q: torch.Tensor,
    rope: torch.Tensor,
    latents: torch.Tensor,
    keys: torch.Tensor,
    plan: GpuPlan,
    group: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """As `mla_prefill`, by FlashInfer where the rows lie together and the cache is of the activations' dtype."""
    if not isinstance(plan, FlashMlaPlan) or latents.dtype is not q.dtype:
        return mla_prefill(q, rope, latents, keys, plan, group, scale, out)
    part = slice(plan.first, plan.last)
    run = plan.run(LatentKind(group, q.shape[0], q.dtype, scale))
    run(
        q_nope=q[:, part].transpose(0, 1),
        q_pe=rope[part],
        ckv_cache=latents[:, :, 0],
        kpe_cache=keys[:, :, 0],
        out=out[:, part].transpose(0, 1),
    )
    return None


class FlashMlaDecode:
    """As `mla_decode`, by FlashMLA where the step holds decodes alone and the cache has its form.

    The library shares a step's keys out among multiprocessors on the GPU, which takes as long as attention of few rows
    does. Layers of a step do it once: the first one with a plan for all that follow. In a graph that is what its first
    layer finds at each replay; what was found before the recording is not taken into it.
    """

    def __init__(self) -> None:
        self._schedules: WeakKeyDictionary[GpuPlan, dict[Hashable, tuple[torch.Tensor, Any]]] = WeakKeyDictionary()

    def __call__(
        self,
        q: torch.Tensor,
        rope: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor] | None,
        latents: torch.Tensor,
        keys: torch.Tensor,
        plan: GpuPlan,
        group: int,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        whole = joined(latents, keys)
        unlike = latents.dtype is not q.dtype or latents.shape[1] != _PAGE or q.shape[1] != len(plan.lengths)
        if new is None or whole is None or unlike:
            return mla_decode(q, rope, new, latents, keys, plan, group, scale, out)
        store(new[0][:, None], new[1][:, None], plan.slots[group], latents, keys, plan.page_tokens)
        library = importlib.import_module("flash_mla")
        lengths, schedule = self._schedule(library, plan, len(q))
        queries = _with_rope(q, rope)[:, None]
        mixed, _ = library.flash_mla_with_kvcache(
            queries, whole, plan.tables[group], lengths, _WIDTHS[0], *schedule, softmax_scale=scale, causal=False
        )
        out.copy_(mixed[:, 0].transpose(0, 1))
        return None

    def _schedule(self, library: Any, plan: GpuPlan, heads: int) -> tuple[torch.Tensor, Any]:
        """Lengths that the library takes, and what it calls its metadata."""
        known, kind = self._schedules.setdefault(plan, {}), (heads, torch.cuda.is_current_stream_capturing())
        if kind not in known:
            lengths = plan.lengths.clamp(min=1)  # a row of padding sees page 0, which belongs to nobody
            known[kind] = lengths, library.get_mla_metadata(lengths, heads, 1)
        return known[kind]


def _with_rope(q: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """q [h, T, c] and rope [T, h, dr] as [T, h, c + dr], where `TritonMla` has left room for it behind q."""
    tokens, heads, turned = rope.shape
    width = q.shape[-1]
    if q.stride() != (width + turned, heads * (width + turned), 1):
        return torch.cat((q.transpose(0, 1), rope), dim=-1)
    whole = q.as_strided((tokens, heads, width + turned), (heads * (width + turned), width + turned, 1))
    whole[..., width:] = rope
    return whole


class FlashInferMla(TritonMla):
    """Prompts that continue what is cached by FlashInfer, all else by Triton."""

    name = "flashinfer + triton mla"

    def __init__(self, planner: GpuPlanner, backend: str, *, compile: bool) -> None:
        """backend: "fa2" or "fa3"; compile: whether a kernel that is on no disk yet may be compiled now (a minute)."""
        super().__init__(planner, prompts=flash_prompts)
        self._backend, self._compile = backend, compile

    def supports(self, instance: OpInstance) -> Support:
        why = _unlike(instance) or lacking(_module(instance.dtype, self._backend), self._compile)
        return Support(False, why) if why else Support(True, f"prompts that continue by FlashInfer's {self._backend}")


class FlashMla(TritonMla):
    """Decodes by FlashMLA; prompts by FlashInfer or Triton, as is given."""

    name = "flashmla + triton mla"

    def __init__(self, planner: GpuPlanner, prompts: Prompts, beside: FlashInferMla | None) -> None:
        """beside: who says whether FlashInfer takes the prompts; None for Triton."""
        super().__init__(planner, FlashMlaDecode(), prompts)
        self._beside = beside
        if beside is not None:
            self.name = "flashmla + flashinfer mla"

    def supports(self, instance: OpInstance) -> Support:
        why = _unlike(instance)
        if not why and self._beside is not None:
            answer = self._beside.supports(instance)
            why = "" if answer else answer.reason
        return Support(False, why) if why else Support(True, _TOLD)


class LatentCache(GpuStateCache):
    """The latent and the rope key of a token lie next to each other; the parts are views, and all else is as ever."""

    def allocate(self, layout: CacheLayout, num_pages: int) -> State:
        return tuple(self._layer(layout, num_pages, layer.parts) for layer in layout.pool)

    def _layer(
        self, layout: CacheLayout, num_pages: int, parts: Sequence[tuple[str, int, int]]
    ) -> tuple[torch.Tensor, ...]:
        if [name for name, _, _ in parts] == ["latent", "rope_key"]:
            widths = [width for _, _, width in parts]
            whole = self._device.zeros((num_pages, layout.page_tokens, 1, sum(widths)), layout.dtype)
            return tuple(whole.split(widths, dim=-1))
        return tuple(
            self._device.zeros((num_pages, layout.page_tokens, heads, width), layout.dtype) for _, heads, width in parts
        )


def joined(latents: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
    """The one tensor [pages, page, 1, c + dr] of which both are views, side by side; None where they are not."""
    width = latents.shape[-1] + keys.shape[-1]
    beside = keys.data_ptr() == latents.data_ptr() + latents.shape[-1] * latents.element_size()
    if not beside or latents.stride(1) != width or latents.stride() != keys.stride():
        return None
    return latents.as_strided((*latents.shape[:-1], width), latents.stride())


def has_flash_mla(capability: tuple[int, int]) -> bool:
    """Whether DeepSeek's package is there and made for this GPU."""
    return capability == _HOPPER and importlib.util.find_spec("flash_mla") is not None


def mla_providers(
    upload: Upload, device: torch.device, capability: tuple[int, int], wanted: str
) -> tuple[OpProvider, ...]:
    """What is installed, best first; `wanted` is the option `flashinfer`: "auto", "compile" or "off"."""
    alone = (FlashMla(LatentPlanner(upload), mla_prefill, None),) if has_flash_mla(capability) else ()
    if wanted == "off" or missing():
        return alone
    backend = backend_for(capability)
    planner = FlashMlaPlanner(upload, device, backend)
    beside = FlashInferMla(planner, backend, compile=wanted == "compile")
    return (FlashMla(planner, flash_prompts, beside), beside, *alone) if alone else (beside,)


def _unlike(instance: OpInstance) -> str:
    attrs = instance.attrs
    if instance.dtype not in _DTYPES:
        return f"{instance.dtype} products, the library has 16-bit ones"
    widths = (attrs["latent_dim"], attrs["rope_dim"])
    if widths != _WIDTHS:
        return f"latent and rope key of {widths[0]} and {widths[1]} numbers, the library has {_WIDTHS}"
    return ""


def _module(dtype: torch.dtype, backend: str) -> Any:
    """FlashInfer's description of the kernel: whether it is on disk, and how it is compiled."""
    from flashinfer.jit import gen_batch_mla_module

    return gen_batch_mla_module(backend, dtype, dtype, dtype, torch.int32, *_WIDTHS, False)
