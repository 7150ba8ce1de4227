"""Mixers with a recurrent state through Triton kernels: short convolution, Mamba-2, gated delta rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed, Weight
from hardpoint_platforms.ops.provider import AttentionPlanner, OpProvider, Support
from hardpoint_platforms.state_cache import State
from hardpoint_platforms.versioning import Version
from hardpoint_torch_gpu.kernels.conv_state import conv_state
from hardpoint_torch_gpu.kernels.gated_delta import DeltaRule, gated_delta
from hardpoint_torch_gpu.kernels.ssm_scan import SsmRule, ssm_scan
from hardpoint_torch_gpu.plan import GpuPlan
from hardpoint_torch_gpu.seams import Seam, unowned

#: Widest state of a head, both ways, whose block fits into a multiprocessor's registers.
WIDEST = 256


class _Recurrent(OpProvider):
    """An op whose state lies at token 0 of the first page of each request."""

    version = Version(1, 0)

    def __init__(self, planner: AttentionPlanner) -> None:
        self._planner = planner

    def planner(self) -> AttentionPlanner:
        return self._planner


#: mix(inputs, out, plan): of tensors [T, ...] and a plan into `out`.
Mix = Callable[[tuple[torch.Tensor, ...], torch.Tensor, GpuPlan], None]


def _mixed(mix: Mix, inputs: tuple[torch.Tensor, ...], like: torch.Tensor, plan: GpuPlan | Seam) -> torch.Tensor:
    """What `mix` makes, like `like`; zeros where some tokens get nothing. At a seam it is made when the step runs."""
    given, out = _close(*inputs), torch.empty(like.shape, dtype=like.dtype, device=like.device)
    if isinstance(plan, Seam):
        plan.cut(partial(_mix_into, mix, tuple(map(unowned, given)), unowned(out)))
    else:
        _mix_into(mix, given, out, plan)
    return out


def _mix_into(mix: Mix, inputs: tuple[torch.Tensor, ...], out: torch.Tensor, plan: GpuPlan) -> None:
    if plan.padded:
        out.zero_()
    mix(inputs, out, plan)


def _close(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each with the numbers of a vector next to each other."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in given)


class TritonConvState(_Recurrent):
    """Short causal convolution."""

    name = "triton conv_state"
    op = "conv_state"

    def supports(self, instance: OpInstance) -> Support:
        return Support(True, "one launch for decodes, all tokens at once for prompts")

    def pack(self, instance: OpInstance, weights: Mapping[str, Weight]) -> Packed:
        """The weight as [k, C]."""
        weight, *bias = super().pack(instance, weights)
        return (weight.t().contiguous(), *bias)

    def build(self, instance: OpInstance) -> Kernel:
        attrs = instance.attrs
        layer, part, group, silu = attrs["pool_layer"], attrs["part"], attrs["group"], attrs["activation"] == "silu"

        def kernel(x: torch.Tensor, state: State, plan: GpuPlan | Seam, w: Packed) -> tuple[torch.Tensor, State]:
            cache, bias = state[layer][part], w[1] if len(w) > 1 else None

            def mix(inputs: tuple[torch.Tensor, ...], y: torch.Tensor, plan: GpuPlan) -> None:
                conv_state(inputs[0], w[0], bias, silu, cache, plan, group, y)

            return _mixed(mix, (x,), x, plan), state

        return kernel


class TritonSsmScan(_Recurrent):
    """Mamba-2."""

    name = "triton ssm_scan"
    op = "ssm_scan"

    def supports(self, instance: OpInstance) -> Support:
        size = instance.attrs["state_dim"]
        if size > WIDEST:
            return Support(False, f"state of {size} numbers per channel, the kernels take up to {WIDEST}")
        return Support(True, "one launch for decodes, blocks of matrix products for prompts")

    def build(self, instance: OpInstance) -> Kernel:
        attrs = instance.attrs
        layer, part, group = attrs["pool_layer"], attrs["part"], attrs["group"]
        rule = SsmRule(attrs["dt_softplus"], float(attrs["dt_min"]), float(attrs["dt_max"]))
        place = {name: index for index, name in enumerate(instance.weights)}

        def kernel(
            x: torch.Tensor,
            dt: torch.Tensor,
            b: torch.Tensor,
            c: torch.Tensor,
            state: State,
            plan: GpuPlan | Seam,
            w: Packed,
        ) -> tuple[torch.Tensor, State]:
            cache = state[layer][part]
            d, bias = (w[place[name]] if name in place else None for name in ("d", "dt_bias"))

            def mix(inputs: tuple[torch.Tensor, ...], y: torch.Tensor, plan: GpuPlan) -> None:
                ssm_scan(inputs, (w[place["a"]], d, bias), rule, cache, plan, group, y)

            return _mixed(mix, (x, dt, b, c), x, plan), state

        return kernel


class TritonGatedDelta(_Recurrent):
    """The gated delta rule."""

    name = "triton gated_delta"
    op = "gated_delta"

    def supports(self, instance: OpInstance) -> Support:
        size = instance.attrs["k_dim"]
        if size > WIDEST:
            return Support(False, f"keys of {size} numbers, the kernels take up to {WIDEST}")
        return Support(True, "one launch for decodes, blocks of matrix products for prompts")

    def build(self, instance: OpInstance) -> Kernel:
        attrs = instance.attrs
        layer, part, group = attrs["pool_layer"], attrs["part"], attrs["group"]
        rule = DeltaRule(float(attrs["scale"]), attrs["l2norm"])

        def kernel(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            decay: torch.Tensor,
            beta: torch.Tensor,
            state: State,
            plan: GpuPlan | Seam,
            w: Packed = (),
        ) -> tuple[torch.Tensor, State]:
            cache = state[layer][part]

            def mix(inputs: tuple[torch.Tensor, ...], out: torch.Tensor, plan: GpuPlan) -> None:
                gated_delta(inputs, rule, cache, plan, group, out)

            return _mixed(mix, (q, k, v, decay, beta), v, plan), state

        return kernel
