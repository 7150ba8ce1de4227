"""Recurrent mixers of static shape: each request is a row, and places without a token leave the state as it was."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed
from hardpoint_platforms.reference.state_space import delta, scan
from hardpoint_platforms.state_cache import State
from hardpoint_platforms.strict.static.attention import with_layer
from hardpoint_platforms.strict.static.plan import StaticPlan


class _Place:
    """Where an op finds its state: token 0 of the first page of each request's table."""

    def __init__(self, instance: OpInstance) -> None:
        self._group, self._layer, self._part = (instance.attrs[name] for name in ("group", "pool_layer", "part"))

    def read(self, state: State, plan: StaticPlan) -> torch.Tensor:
        """float32 [R, heads, width]; 0 for a request that starts."""
        before = state[self._layer][self._part][plan.tables[self._group][:, 0], 0].to(torch.float32)
        return torch.where(plan.fresh[:, None, None], 0.0, before)

    def written(self, state: State, plan: StaticPlan, after: torch.Tensor) -> State:
        """The tree with new states, [R, heads, width]."""
        parts, slots = state[self._layer], plan.tables[self._group][:, 0]
        cache = parts[self._part]
        cache = cache.index_put((slots, torch.zeros_like(slots)), after.to(cache.dtype))
        return with_layer(state, self._layer, (*parts[: self._part], cache, *parts[self._part + 1 :]))


def build_conv_state(instance: OpInstance) -> Kernel:
    """conv_state(x[T, C], state, plan, (weight[C, k], bias[C]?)) -> (y[T, C], state)."""
    kernel, silu = instance.attrs["kernel"], instance.attrs["activation"] == "silu"
    place = _Place(instance)

    def conv_state(x: torch.Tensor, state: State, plan: StaticPlan, w: Packed) -> tuple[torch.Tensor, State]:
        taps = w[0].to(torch.float32)
        fresh = plan.to_rows(x).to(torch.float32)
        row, count = torch.cat((place.read(state, plan), fresh), dim=1), fresh.shape[1]
        y = row[:, :count] * taps[:, 0]
        for tap in range(1, kernel):
            y = y + row[:, tap : tap + count] * taps[:, tap]
        if len(w) > 1:
            y = y + w[1]
        last = plan.valid.sum(1)[:, None] + torch.arange(kernel - 1, device=x.device)
        after = row.gather(1, last[..., None].expand(*last.shape, row.shape[-1]))
        y = plan.to_tokens((F.silu(y) if silu else y).to(x.dtype))
        return y, place.written(state, plan, after)

    return conv_state


def build_ssm_scan(instance: OpInstance) -> Kernel:
    """ssm_scan(x[T,h,p], dt[T,h], b[T,g,n], c[T,g,n], state, plan, (a[h], d[h]?, dt_bias[h]?)) -> (y[T,h,p], state)."""
    attrs = instance.attrs
    sizes, place = (attrs["head_dim"], attrs["state_dim"]), _Place(instance)

    def ssm_scan(
        x: torch.Tensor,
        dt: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        state: State,
        plan: StaticPlan,
        w: Packed,
    ) -> tuple[torch.Tensor, State]:
        named = dict(zip(instance.weights, w, strict=True))
        step = dt.to(torch.float32)
        step = step + named["dt_bias"] if "dt_bias" in named else step
        step = F.softplus(step) if attrs["dt_softplus"] else step
        # a step of no length neither decays the state nor adds to it: to_rows gives 0 where there is no token
        steps = plan.to_rows(step.clamp(attrs["dt_min"], attrs["dt_max"]))
        repeat = attrs["heads"] // b.shape[1]
        xs, bs, cs = (
            plan.to_rows(part) for part in (x, b.repeat_interleave(repeat, 1), c.repeat_interleave(repeat, 1))
        )
        y, carried = scan((xs, steps, bs, cs), place.read(state, plan).unflatten(-1, sizes), named)
        return plan.to_tokens(y.to(x.dtype)), place.written(state, plan, carried.flatten(-2))

    return ssm_scan


def build_gated_delta(instance: OpInstance) -> Kernel:
    """gated_delta(q[T,hk,dk], k[T,hk,dk], v[T,h,dv], decay[T,h], beta[T,h], state, plan) -> (out[T,h,dv], state)."""
    attrs = instance.attrs
    sizes, place = (attrs["k_dim"], attrs["v_dim"]), _Place(instance)

    def prepared(x: torch.Tensor) -> torch.Tensor:
        x = x.to(torch.float32)
        if attrs["l2norm"]:
            x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
        return x.repeat_interleave(attrs["heads"] // x.shape[1], 1)

    def gated_delta(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        state: State,
        plan: StaticPlan,
    ) -> tuple[torch.Tensor, State]:
        wide = (v.to(torch.float32), prepared(q) * attrs["scale"], prepared(k), decay.float(), beta.float())
        rows, carried = delta(tuple(map(plan.to_rows, wide)), place.read(state, plan).unflatten(-1, sizes))
        out = plan.to_tokens(rows)
        return out.to(v.dtype), place.written(state, plan, carried.flatten(-2))

    return gated_delta
