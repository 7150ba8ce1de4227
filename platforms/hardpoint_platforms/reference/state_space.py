"""Recurrent mixers over paged state: short convolution, Mamba-2, gated delta rule.

A request's state lies in the first page of its table, at token 0 of the page. A request that starts (nothing computed
before) starts from zero, whatever the page holds. Decode rows go together; longer requests one by one, in blocks of
BLOCK tokens whose inner sums are matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed
from hardpoint_platforms.reference.plan import ReferencePlan
from hardpoint_platforms.state_cache import State

#: Tokens handled at once within a request.
BLOCK = 64

#: (inputs of B requests, each [B, n, ...], state [B, heads, width]) -> (outputs [B, n, ...], new state)
Mixer = Callable[[tuple[torch.Tensor, ...], torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def mix_requests(
    inputs: tuple[torch.Tensor, ...], cache: torch.Tensor, plan: ReferencePlan, group: int, mixer: Mixer
) -> torch.Tensor:
    """Run `mixer` over the requests of a batch and keep their new states in cache[pages, page_tokens, heads, width]."""
    pieces: list[torch.Tensor] = []
    for block in plan.blocks:
        slots = block.tables[group][:, 0]
        before = cache[slots, 0].to(torch.float32)
        before = torch.where((block.last > 0)[:, None, None], before, 0.0)
        out, after = mixer(tuple(x.index_select(0, block.tokens)[:, None] for x in inputs), before)
        cache[slots, 0] = after.to(cache.dtype)
        pieces.append(out[:, 0])
    for chunk in plan.chunks:
        slots = chunk.tables[group][:1]
        before = cache[slots, 0].to(torch.float32)
        if chunk.computed == 0:
            before = torch.zeros_like(before)
        out, after = mixer(tuple(x[None, chunk.start : chunk.stop] for x in inputs), before)
        cache[slots, 0] = after.to(cache.dtype)
        pieces.append(out[0])
    if not pieces:
        return torch.zeros_like(inputs[0])
    return plan.join(pieces)


def build_conv_state(instance: OpInstance) -> Kernel:
    """conv_state(x[T, C], state, plan, (weight[C, k], bias[C]?)) -> (y[T, C], state)."""
    attrs = instance.attrs
    kernel, silu = attrs["kernel"], attrs["activation"] == "silu"

    def conv_state(x: torch.Tensor, state: State, plan: ReferencePlan, w: Packed) -> tuple[torch.Tensor, State]:
        taps = w[0].to(torch.float32)

        def mixer(inputs: tuple[torch.Tensor, ...], before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            row = torch.cat((before, inputs[0].to(torch.float32)), dim=1)
            count = inputs[0].shape[1]
            y = row[:, :count] * taps[:, 0]
            for tap in range(1, kernel):
                y = y + row[:, tap : tap + count] * taps[:, tap]
            if len(w) > 1:
                y = y + w[1]
            return (F.silu(y) if silu else y).to(x.dtype), row[:, count:]

        cache = state[attrs["pool_layer"]][attrs["part"]]
        return mix_requests((x,), cache, plan, attrs["group"], mixer), state

    return conv_state


def _decays(log_decay: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of log decays [B, n, h]: running sums [B, h, n] and exp(sum over (s, t]) [B, h, t, s], 0 above the diagonal."""
    running = log_decay.transpose(1, 2).cumsum(-1)
    between = running[..., :, None] - running[..., None, :]
    count = running.shape[-1]
    later = torch.ones((count, count), dtype=torch.bool, device=running.device).triu(1)
    return running, between.masked_fill(later, float("-inf")).exp()


def build_ssm_scan(instance: OpInstance) -> Kernel:
    """ssm_scan(x[T,h,p], dt[T,h], b[T,g,n], c[T,g,n], state, plan, (a[h], d[h]?, dt_bias[h]?)) -> (y[T,h,p], state)."""
    attrs = instance.attrs
    heads, head_dim, size = attrs["heads"], attrs["head_dim"], attrs["state_dim"]
    low, high = attrs["dt_min"], attrs["dt_max"]

    def ssm_scan(
        x: torch.Tensor,
        dt: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        state: State,
        plan: ReferencePlan,
        w: Packed,
    ) -> tuple[torch.Tensor, State]:
        named = dict(zip(instance.weights, w, strict=True))
        step = dt.to(torch.float32)
        if "dt_bias" in named:
            step = step + named["dt_bias"]
        if attrs["dt_softplus"]:
            step = F.softplus(step)
        step = step.clamp(low, high)

        def mixer(inputs: tuple[torch.Tensor, ...], before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y, after = scan(inputs, before.unflatten(-1, (head_dim, size)), named)
            return y.to(x.dtype), after.flatten(-2)

        cache = state[attrs["pool_layer"]][attrs["part"]]
        repeat = heads // b.shape[1]
        parts = (x, step, b.repeat_interleave(repeat, 1), c.repeat_interleave(repeat, 1))
        return mix_requests(parts, cache, plan, attrs["group"], mixer), state

    return ssm_scan


def scan(
    inputs: tuple[torch.Tensor, ...], carried: torch.Tensor, w: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence over rows, block by block.

    inputs: x[B, t, h, p], step sizes [B, t, h], b and c [B, t, h, n]; carried: float32 [B, h, p, n]. w: a[h] and, where
    the op has it, d[h]. Returns y[B, t, h, p], float32, and the new state.
    """
    outs = []
    for x, dt, b, c in zip(*(part.split(BLOCK, dim=1) for part in inputs), strict=True):
        y, carried = ssd_block(x, dt, b, c, w["a"], carried)
        outs.append(y)
    y = torch.cat(outs, dim=1)
    return (y + inputs[0].to(torch.float32) * w["d"][:, None] if "d" in w else y), carried


def ssd_block(
    x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor, a: torch.Tensor, before: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One block of the recurrence S = exp(dt a) S + dt x b^T, y = S c (Dao, Gu 2024), state [B, h, p, n]."""
    running, decay = _decays(dt * a)
    inputs = (x.to(torch.float32) * dt[..., None]).transpose(1, 2)  # [B, h, t, p]
    keys, queries = b.to(torch.float32).transpose(1, 2), c.to(torch.float32).transpose(1, 2)  # [B, h, t, n]
    y = (queries @ keys.transpose(-1, -2) * decay) @ inputs
    y = y + queries @ before.transpose(-1, -2) * running.exp()[..., None]
    to_end = (running[..., -1:] - running).exp()[..., None]
    after = before * running[..., -1].exp()[..., None, None] + (inputs * to_end).transpose(-1, -2) @ keys
    return y.transpose(1, 2), after


def build_gated_delta(instance: OpInstance) -> Kernel:
    """gated_delta(q[T,hk,dk], k[T,hk,dk], v[T,h,dv], decay[T,h], beta[T,h], state, plan) -> (out[T,h,dv], state)."""
    attrs = instance.attrs
    heads, k_dim, v_dim = attrs["heads"], attrs["k_dim"], attrs["v_dim"]
    scale, unit = attrs["scale"], attrs["l2norm"]

    def prepare(x: torch.Tensor) -> torch.Tensor:
        x = x.to(torch.float32)
        if unit:
            x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
        return x.repeat_interleave(heads // x.shape[1], 1)

    def mixer(inputs: tuple[torch.Tensor, ...], before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, after = delta(inputs, before.unflatten(-1, (k_dim, v_dim)))
        return out, after.flatten(-2)

    def gated_delta(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        state: State,
        plan: ReferencePlan,
    ) -> tuple[torch.Tensor, State]:
        wide = (v.to(torch.float32), prepare(q) * scale, prepare(k), decay.float(), beta.float())
        cache = state[attrs["pool_layer"]][attrs["part"]]
        return mix_requests(wide, cache, plan, attrs["group"], mixer).to(v.dtype), state

    return gated_delta


def delta(inputs: tuple[torch.Tensor, ...], carried: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The delta rule over rows, block by block. inputs: v, q, k, decay, beta, as `delta_block` takes them."""
    outs = []
    for v, q, k, decay, beta in zip(*(part.split(BLOCK, dim=1) for part in inputs), strict=True):
        out, carried = delta_block(v, q, k, decay, beta, carried)
        outs.append(out)
    return torch.cat(outs, dim=1), carried


def delta_block(
    v: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    before: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One block of S = a S + k u^T with u = beta (v - (a S)^T k), out = S^T q (Yang et al. 2024), state [B, h, dk, dv].

    The u of a block depend on each other linearly: (1 + M) u = beta (v - decayed S^T k), M strictly lower triangular.
    """
    running, decay = _decays(log_decay)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, h, t, d]
    strength = beta.transpose(1, 2)[..., None]
    from_start = running.exp()[..., None]
    system = strength * (k @ k.transpose(-1, -2)) * decay
    wanted = strength * (v - from_start * (k @ before))
    u = torch.linalg.solve_triangular(system.tril(-1), wanted, upper=False, unitriangular=True)
    out = from_start * (q @ before) + (q @ k.transpose(-1, -2) * decay) @ u
    to_end = (running[..., -1:] - running).exp()[..., None]
    after = before * running[..., -1].exp()[..., None, None] + (k * to_end).transpose(-1, -2) @ u
    return out.transpose(1, 2), after
