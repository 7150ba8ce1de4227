"""Recurrent mixers. The chip has no scan unit: the host drives it token by token, so these calls split programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from acme_npu.memory import CHIP
from acme_npu.ops.attention import Attention, requests
from acme_npu.ops.plan import AcmePlan
from acme_npu.ops.provider import AcmeProvider
from acme_npu.pages import BlockedPart, read_rows, write_rows
from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed
from hardpoint_platforms.state_cache import State

#: (tokens' inputs, state before, weights) -> (tokens' outputs, state after); state float32 [heads, width].
Mixer = Callable[[tuple[torch.Tensor, ...], torch.Tensor, Packed], tuple[torch.Tensor, torch.Tensor]]


class Recurrent(Attention):
    """Runs `mixer` request by request over the state at token 0 of each request's first page."""

    host = True

    def refuses(self, instance: OpInstance) -> str:
        return AcmeProvider.refuses(self, instance)

    def mixer(self, instance: OpInstance) -> Mixer:
        """The recurrence of one request."""
        raise NotImplementedError

    def build(self, instance: OpInstance) -> Kernel:
        attrs, mixer = instance.attrs, self.mixer(instance)
        group = attrs["group"]

        def scan(inputs: Any, blocks: torch.Tensor, width: int, plan: AcmePlan, w: Packed) -> torch.Tensor:
            outs = torch.zeros_like(inputs[0])
            for run in requests(plan, group, None):
                page = run.pages[:1]
                before = read_rows(blocks, page, 0, width)[0].float() * (run.first > 0)
                rows = tuple(x[run.start : run.stop].float() for x in inputs)
                out, after = mixer(rows, before, w)
                outs[run.start : run.stop] = out.to(outs.dtype)
                write_rows(blocks, page, 0, after[None])
            return outs

        scan.__name__ = self.op

        def kernel(*args: Any) -> tuple[torch.Tensor, State]:
            w = args[-1] if instance.weights else ()
            *inputs, state, plan = args[:-1] if instance.weights else args
            part: BlockedPart = state[attrs["pool_layer"]][attrs["part"]]
            return CHIP.launch(scan, tuple(inputs), part.blocks, part.width, plan, w, host=True), state

        return kernel


class ConvState(Recurrent):
    """Causal depthwise convolution."""

    op = "conv_state"

    def mixer(self, instance: OpInstance) -> Mixer:
        taps, silu = instance.attrs["kernel"], instance.attrs["activation"] == "silu"

        def convolve(inputs: tuple[torch.Tensor, ...], before: torch.Tensor, w: Packed) -> Any:
            row = torch.cat((before, inputs[0]))
            count = len(inputs[0])
            out = torch.stack([row[tap : tap + count] * w[0][:, tap] for tap in range(taps)]).sum(0)
            out = out + w[1] if len(w) > 1 else out
            return F.silu(out) if silu else out, row[count:]

        return convolve


class SsmScan(Recurrent):
    """Mamba-2, one token after another."""

    op = "ssm_scan"

    def refuses(self, instance: OpInstance) -> str:
        if instance.attrs["dt_max"] != float("inf"):
            return "bounds dt from below, not from above"
        return super().refuses(instance)

    def mixer(self, instance: OpInstance) -> Mixer:
        attrs, names = instance.attrs, tuple(instance.weights)

        def scan(inputs: tuple[torch.Tensor, ...], before: torch.Tensor, w: Packed) -> Any:
            x, dt, b, c = inputs
            named = dict(zip(names, w, strict=True))
            dt = dt + named["dt_bias"] if "dt_bias" in named else dt
            dt = (F.softplus(dt) if attrs["dt_softplus"] else dt).clamp(min=attrs["dt_min"])
            b, c = (part.repeat_interleave(attrs["heads"] // attrs["groups"], 1) for part in (b, c))
            carried, outs = before.unflatten(-1, (attrs["head_dim"], -1)), []
            for t in range(len(x)):
                fresh = (dt[t, :, None] * x[t])[..., None] * b[t, :, None]
                carried = (dt[t] * named["a"]).exp()[:, None, None] * carried + fresh
                outs.append((carried @ c[t, ..., None])[..., 0])
            out = torch.stack(outs)
            return out + x * named["d"][:, None] if "d" in named else out, carried.flatten(1)

        return scan


class GatedDelta(Recurrent):
    """Gated delta rule, one token after another. The result's rows are those of v."""

    op = "gated_delta"

    def refuses(self, instance: OpInstance) -> str:
        return super().refuses(instance) if instance.attrs["l2norm"] else "queries and keys must be normalized here"

    def build(self, instance: OpInstance) -> Kernel:
        scan = super().build(instance)

        def kernel(q: Any, k: Any, v: Any, decay: Any, beta: Any, state: State, plan: AcmePlan) -> Any:
            return scan(v, q, k, decay, beta, state, plan)

        return kernel

    def mixer(self, instance: OpInstance) -> Mixer:
        attrs = instance.attrs

        def unit(x: torch.Tensor) -> torch.Tensor:
            x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
            return x.repeat_interleave(attrs["heads"] // attrs["k_heads"], 1)

        def delta(inputs: tuple[torch.Tensor, ...], before: torch.Tensor, w: Packed) -> Any:
            v, q, k, decay, beta = inputs
            q, k = unit(q) * attrs["scale"], unit(k)
            carried, outs = before.unflatten(-1, (attrs["k_dim"], -1)), []
            for t in range(len(v)):
                carried = decay[t].exp()[:, None, None] * carried
                told = torch.einsum("hkv,hk->hv", carried, k[t])
                carried = carried + k[t][..., None] * (beta[t][:, None] * (v[t] - told))[:, None]
                outs.append(torch.einsum("hkv,hk->hv", carried, q[t]))
            return torch.stack(outs), carried.flatten(1)

        return delta
