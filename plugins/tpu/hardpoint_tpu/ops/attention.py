"""`attention` by this plugin's Pallas kernel, where its tiles fit; on the processor it is interpreted."""

from __future__ import annotations

import jax.numpy as jnp
import torch

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed
from hardpoint_platforms.ops.provider import Support
from hardpoint_tpu.kernels.ragged_attention import Shape, ragged_attention
from hardpoint_tpu.kernels_table import TpuProvider
from hardpoint_tpu.plan import RaggedPlan
from hardpoint_tpu.runtime import array_of
from hardpoint_tpu.state import Pools

#: Widths that fill the lanes of a tile.
_LANES = 128


class PallasAttention(TpuProvider):
    """Prompts, decodes and mixtures: stores and attends in one kernel."""

    name = "pallas"

    def supports(self, instance: OpInstance) -> Support:
        widths = {instance.attrs["head_dim"], instance.attrs["v_head_dim"]}
        if not self.runtime.on_tpu:
            return Support(True, "own ragged kernel, interpreted: slow, for tests")
        odd = sorted(width for width in widths if width % _LANES)
        if odd:
            return Support(False, f"heads of {odd[0]} do not fill the {_LANES} lanes of a tile")
        return Support(True, "own ragged kernel, stores and attends")

    def build(self, instance: OpInstance) -> Kernel:
        return self.kernels.bind(self, instance, self._attention, dense=False)

    def _attention(self, instance: OpInstance) -> Kernel:
        attrs, wrap, interpret = instance.attrs, self.runtime.wrap, not self.runtime.on_tpu
        group, heads, slopes = attrs["group"], attrs["heads"], attrs["alibi"]

        def attention(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pools: Pools, plan: RaggedPlan, w: Packed = ()
        ) -> tuple[torch.Tensor, Pools]:
            shape = Shape(
                heads=heads,
                kv_heads=attrs["kv_heads"],
                width=attrs["head_dim"],
                v_width=attrs["v_head_dim"],
                page_tokens=plan.page_tokens,
                block=plan.block,
                scale=attrs["scale"],
                window=attrs["window"],
                softcap=attrs["softcap"],
                alibi=slopes is not None,
            )
            given = (array_of(q), array_of(k), array_of(v))
            keys, values = pools.layers[0]
            sinks = array_of(w[0]).astype(jnp.float32) if w else jnp.full((heads,), -jnp.inf, jnp.float32)
            extra = (sinks, jnp.asarray(slopes or (0.0,) * heads, jnp.float32))
            work = (array_of(plan.work), array_of(plan.tables[group]))
            held = (array_of(keys), array_of(values))
            out, *after = ragged_attention(*given, held, work, extra, shape, interpret)
            real = jnp.arange(out.shape[0]) < array_of(plan.starts)[-1]
            out = jnp.where(real[:, None, None], out, 0.0)
            return wrap(out), Pools((tuple(map(wrap, after)),), pools.shapes)

        return attention
