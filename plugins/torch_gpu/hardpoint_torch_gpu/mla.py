"""Latent attention through Triton: the queries take up kv_b's key half, the results its value half.

    (W_k latent) . q  =  latent . (W_k^T q)           sum of weights x (W_v latent)  =  W_v (sum of weights x latent)

so that cached latents are read as they lie (DeepSeek-V2, 2024, arXiv:2405.04434). Both products are batched over heads
and belong to the vendor's library; between them the kernels attend in the space of latents. Prompts with nothing cached
before them have their keys and values expanded instead, where the planner is a `LatentPlanner`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as F

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed, Weight
from hardpoint_platforms.ops.provider import AttentionPlanner, OpProvider, Support
from hardpoint_platforms.state_cache import State
from hardpoint_platforms.versioning import Version
from hardpoint_torch_gpu.kernels.mla_decode import mla_decode
from hardpoint_torch_gpu.kernels.mla_expanded import mla_expanded
from hardpoint_torch_gpu.kernels.mla_prefill import mla_prefill
from hardpoint_torch_gpu.kernels.store import store
from hardpoint_torch_gpu.latent_plan import LatentPlan
from hardpoint_torch_gpu.plan import GpuPlan
from hardpoint_torch_gpu.seams import Seam, unowned

#: Widest latent and widest rope key that leave room in a multiprocessor's registers and shared memory.
WIDEST, WIDEST_ROPE = 512, 64
#: Numbers of absorbed queries at a time: a long prompt with many heads goes through in slices of heads.
_SCRATCH = 1 << 27


#: decode(q, rope, new, latents, keys, plan, group, scale, out): rows of `plan` that bring one token; see `mla_decode`.
Decode = Callable[
    [
        torch.Tensor,
        torch.Tensor,
        tuple[torch.Tensor, torch.Tensor] | None,
        torch.Tensor,
        torch.Tensor,
        GpuPlan,
        int,
        float,
        torch.Tensor,
    ],
    None,
]
#: prompts(q, rope, latents, keys, plan, group, scale, out): rows that bring several; see `mla_prefill`.
Prompts = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, GpuPlan, int, float, torch.Tensor],
    None,
]


class TritonMla(OpProvider):
    """Latents up to `WIDEST`. A plugin with better kernels derives and hands them in."""

    name = "triton mla"
    op = "mla_attention"
    version = Version(1, 0)

    def __init__(self, planner: AttentionPlanner, decode: Decode = mla_decode, prompts: Prompts = mla_prefill) -> None:
        self._planner, self._decode, self._prompts = planner, decode, prompts

    def supports(self, instance: OpInstance) -> Support:
        latent, rope = instance.attrs["latent_dim"], instance.attrs["rope_dim"]
        if latent > WIDEST or rope > WIDEST_ROPE:
            return Support(
                False, f"latent {latent} and rope key {rope}, the kernels take up to {WIDEST} and {WIDEST_ROPE}"
            )
        scheme = instance.weights["kv_b"].scheme
        how = "each cached latent read once, prompts expanded"
        if scheme is not None:
            how += f"; kv_b, {scheme.name}, dequantized at load: its halves multiply head by head"
        return Support(True, how)

    def planner(self) -> AttentionPlanner:
        return self._planner

    def pack(self, instance: OpInstance, weights: Mapping[str, Weight]) -> Packed:
        """The key half [h, dn, c] and the value half [h, dv, c] of kv_b."""
        (kv_b,) = super().pack(instance, weights)
        attrs = instance.attrs
        sizes = [attrs["nope_dim"], attrs["v_head_dim"]]
        halves = kv_b.view(attrs["heads"], sum(sizes), attrs["latent_dim"]).split(sizes, dim=1)
        return tuple(half.contiguous() for half in halves)

    def build(self, instance: OpInstance) -> Kernel:
        attrs = instance.attrs
        pool_layer, group, scale = attrs["pool_layer"], attrs["group"], attrs["scale"]
        decode, prompts = self._decode, self._prompts

        def attend(given: tuple[torch.Tensor, ...], plan: GpuPlan) -> None:
            q, rope, latent, k_rope, latents, keys, out = given
            new = None if plan.padded or len(plan.tile_rows) else (latent, k_rope)
            if new is None:
                store(latent[:, None], k_rope[:, None], plan.slots[group], latents, keys, plan.page_tokens)
            if plan.padded:
                out.zero_()
            decode(q, rope, new, latents, keys, plan, group, scale, out)
            prompts(q, rope, latents, keys, plan, group, scale, out)

        def mla_attention(
            q_nope: torch.Tensor,
            q_rope: torch.Tensor,
            latent: torch.Tensor,
            k_rope: torch.Tensor,
            state: State,
            plan: GpuPlan | Seam,
            w: Packed,
        ) -> tuple[torch.Tensor, State]:
            q_nope, q_rope, latent, k_rope = (
                x if x.stride(-1) == 1 else x.contiguous() for x in (q_nope, q_rope, latent, k_rope)
            )
            tokens, heads, _ = q_nope.shape
            out = torch.empty((tokens, heads, w[1].shape[1]), dtype=q_nope.dtype, device=q_nope.device)
            if isinstance(plan, LatentPlan):
                self._with_prompts((q_nope, q_rope, latent, k_rope), state[pool_layer], plan, instance, w, out)
                return out, state
            for some in _slices(tokens, heads, latent.shape[-1]):
                absorbed = _absorbed(q_nope[:, some], w[0][some], q_rope.shape[-1])
                mixed = _by_token(absorbed)
                given = (absorbed, q_rope[:, some], latent, k_rope, *state[pool_layer], mixed)
                if isinstance(plan, Seam):
                    plan.cut(partial(attend, tuple(map(unowned, given))))
                else:
                    attend(given, plan)
                torch.bmm(mixed, w[1][some].transpose(1, 2), out=out[:, some].transpose(0, 1))
            return out, state

        return mla_attention

    def _with_prompts(
        self,
        given: tuple[torch.Tensor, ...],
        cache: tuple[torch.Tensor, torch.Tensor],
        plan: LatentPlan,
        instance: OpInstance,
        w: Packed,
        out: torch.Tensor,
    ) -> None:
        """A step with prompts that have nothing cached before them: these over keys and values of every head."""
        q_nope, q_rope, latent, k_rope = given
        attrs, (tokens, heads, _) = instance.attrs, q_nope.shape
        group, scale = attrs["group"], attrs["scale"]
        store(latent[:, None], k_rope[:, None], plan.slots[group], *cache, plan.page_tokens)
        if plan.padded:
            out.zero_()
        for some in _slices(tokens, heads, latent.shape[-1]):
            rope = q_rope[:, some]
            if plan.rest is not None:
                absorbed = _absorbed(q_nope[:, some], w[0][some], rope.shape[-1])
                mixed = _by_token(absorbed).zero_()
                self._decode(absorbed, rope, None, *cache, plan.rest, group, scale, mixed)
                self._prompts(absorbed, rope, *cache, plan.rest, group, scale, mixed)
                torch.bmm(mixed, w[1][some].transpose(1, 2), out=out[:, some].transpose(0, 1))
            k, v = (F.linear(latent, half[some].flatten(0, 1)).unflatten(-1, (-1, half.shape[1])) for half in w)
            mla_expanded(q_nope[:, some], rope, k, k_rope, v, plan.fresh, scale, out[:, some])


def _absorbed(q: torch.Tensor, expand: torch.Tensor, room: int) -> torch.Tensor:
    """q [T, h, dn] in the space of latents: [h, T, c], a view of [T, h, c + room], whose end may take rotated ones."""
    tokens, heads, _ = q.shape
    width = expand.shape[-1]
    whole = torch.empty((tokens, heads, width + room), dtype=q.dtype, device=q.device)
    return torch.bmm(q.transpose(0, 1), expand, out=whole[..., :width].transpose(0, 1))


def _by_token(absorbed: torch.Tensor) -> torch.Tensor:
    """Room for results of the shape of `absorbed`, [h, T, c], those of a token side by side."""
    heads, tokens, width = absorbed.shape
    return torch.empty((tokens, heads, width), dtype=absorbed.dtype, device=absorbed.device).transpose(0, 1)


def _slices(tokens: int, heads: int, width: int) -> Iterator[slice]:
    """Heads at a time."""
    step = max(_SCRATCH // max(tokens * width, 1), 1)
    for first in range(0, heads, step):
        yield slice(first, first + step)
