"""Native attention over paged keys and values: the pool's pages and the batch's page tables are read as they are."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hardpoint_cpu.native.abi import DTYPES, Code
from hardpoint_cpu.native.attention_plan import NativePlan
from hardpoint_cpu.native.provider import PlannedProvider, heads_together
from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed, Weight
from hardpoint_platforms.ops.provider import Support
from hardpoint_platforms.state_cache import State


class NativeAttention(PlannedProvider):
    """Prefill, decode and mixtures; grouped heads, windows, soft cap, sinks, ALiBi."""

    name = "native attention"
    op = "attention"
    code = Code.ATTENTION

    def takes(self, instance: OpInstance) -> Support:
        return Support(True, "paged, online softmax in float32")

    def build(self, instance: OpInstance) -> Kernel:
        stage, attrs = self.stage, instance.attrs
        heads, kv_heads, width, v_width = (attrs[n] for n in ("heads", "kv_heads", "head_dim", "v_head_dim"))
        pool_layer, has_sinks = attrs["pool_layer"], "sinks" in instance.weights
        shape = (heads, kv_heads, width, v_width, attrs["group"], attrs["window"] or 0)
        factors = (attrs["scale"], attrs["softcap"] or 0.0)
        slopes = torch.tensor(attrs["alibi"], dtype=torch.float32) if attrs["alibi"] else None

        def kernel(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: State, plan: NativePlan, w: Packed = ()
        ) -> tuple[torch.Tensor, State]:
            keys, values = state[pool_layer]
            q, k, v = heads_together(q), heads_together(k), heads_together(v)
            rows = q.shape[0]
            out = torch.empty((rows, heads, v_width), device=q.device)
            strides = (q.stride(0), k.stride(0), v.stride(0), heads * v_width)
            pointers = (q, k, v, keys, values, out, w[0] if has_sinks else None, slopes)
            stage.call(Code.ATTENTION, rows, pointers, (*shape, *strides, DTYPES[keys.dtype]), factors, plan)
            return out, state

        return kernel


class NativeLatentAttention(PlannedProvider):
    """Attention over compressed keys and values; kv_b is applied to queries and outputs, not to every key."""

    name = "native mla attention"
    op = "mla_attention"
    code = Code.MLA

    def takes(self, instance: OpInstance) -> Support:
        return Support(True, "paged latents, online softmax in float32")

    def build(self, instance: OpInstance) -> Kernel:
        stage, attrs = self.stage, instance.attrs
        names = ("heads", "nope_dim", "rope_dim", "latent_dim", "v_head_dim", "group")
        shape = tuple(attrs[name] for name in names)
        heads, v_width, pool_layer = attrs["heads"], attrs["v_head_dim"], attrs["pool_layer"]

        def kernel(
            q_nope: torch.Tensor,
            q_rope: torch.Tensor,
            latent: torch.Tensor,
            k_rope: torch.Tensor,
            state: State,
            plan: NativePlan,
            w: Packed,
        ) -> tuple[torch.Tensor, State]:
            latents, ropes = state[pool_layer]
            q_nope, q_rope = heads_together(q_nope), heads_together(q_rope)
            latent = latent if latent.stride(1) == 1 else latent.contiguous()
            k_rope = k_rope if k_rope.stride(1) == 1 else k_rope.contiguous()
            rows = q_nope.shape[0]
            out = torch.empty((rows, heads, v_width), device=q_nope.device)
            strides = (q_nope.stride(0), q_rope.stride(0), latent.stride(0), k_rope.stride(0))
            pointers = (q_nope, q_rope, latent, k_rope, latents, ropes, w[0], out)
            integers = (*shape, *strides, DTYPES[latents.dtype])
            stage.call(Code.MLA, rows, pointers, integers, (attrs["scale"],), plan)
            return out, state

        return kernel

    def pack(self, instance: OpInstance, weights: Mapping[str, Weight]) -> Packed:
        (kv_b,) = super().pack(instance, weights)
        return (kv_b.contiguous(),)
