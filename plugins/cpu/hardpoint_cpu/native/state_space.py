"""Native mixers with a recurrent state, and low-rank adapters."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hardpoint_cpu.native.abi import DTYPES, Code
from hardpoint_cpu.native.attention_plan import NativePlan
from hardpoint_cpu.native.provider import NativeProvider, PlannedProvider, rows_of_last
from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed, Weight
from hardpoint_platforms.ops.provider import Support
from hardpoint_platforms.state_cache import State

_MOST_TAPS = 16


class _Recurrent(PlannedProvider):
    """State at token 0 of each request's first page, rounded to the pool's dtype after each token."""

    def takes(self, instance: OpInstance) -> Support:
        return Support(True, "token by token in float32")


class NativeConvState(_Recurrent):
    """Short causal convolution."""

    name = "native conv_state"
    op = "conv_state"
    code = Code.CONV_STATE

    def takes(self, instance: OpInstance) -> Support:
        taps = instance.attrs["kernel"]
        return super().takes(instance) if taps <= _MOST_TAPS else Support(False, f"{taps} taps, at most {_MOST_TAPS}")

    def build(self, instance: OpInstance) -> Kernel:
        stage, attrs, biased = self.stage, instance.attrs, "bias" in instance.weights
        channels, silu = attrs["channels"], int(attrs["activation"] == "silu")
        layer, part = attrs["pool_layer"], attrs["part"]

        def kernel(x: torch.Tensor, state: State, plan: NativePlan, w: Packed) -> tuple[torch.Tensor, State]:
            x, pool = rows_of_last(x), state[layer][part]
            out = torch.empty(x.shape, device=x.device)
            shape = (channels, attrs["kernel"], silu, attrs["group"], DTYPES[pool.dtype])
            integers = (*shape, x.stride(0), channels, pool.stride(0))
            stage.call(Code.CONV_STATE, x.shape[0], (x, w[0], w[1] if biased else None, pool, out), integers, (), plan)
            return out, state

        return kernel


class NativeSsmScan(_Recurrent):
    """Mamba-2."""

    name = "native ssm_scan"
    op = "ssm_scan"
    code = Code.SSM_SCAN

    def build(self, instance: OpInstance) -> Kernel:
        stage, attrs = self.stage, instance.attrs
        sizes = tuple(attrs[name] for name in ("heads", "head_dim", "groups", "state_dim", "group"))
        layer, part, bounds = attrs["pool_layer"], attrs["part"], (attrs["dt_min"], attrs["dt_max"])
        place = {name: index for index, name in enumerate(instance.weights)}

        def kernel(
            x: torch.Tensor,
            dt: torch.Tensor,
            b: torch.Tensor,
            c: torch.Tensor,
            state: State,
            plan: NativePlan,
            w: Packed,
        ) -> tuple[torch.Tensor, State]:
            pool = state[layer][part]
            out = torch.empty(x.shape, device=x.device)
            given = [_flat(value) for value in (x, dt, b, c)]
            more = [w[place[name]] if name in place else None for name in ("a", "d", "dt_bias")]
            strides = [value.stride(0) for value in given]
            integers = (*sizes, DTYPES[pool.dtype], pool.stride(0), *strides, 0, int(attrs["dt_softplus"]))
            stage.call(Code.SSM_SCAN, x.shape[0], (*given, pool, *more, out), integers, bounds, plan)
            return out, state

        return kernel


class NativeGatedDelta(_Recurrent):
    """The gated delta rule."""

    name = "native gated_delta"
    op = "gated_delta"
    code = Code.GATED_DELTA

    def build(self, instance: OpInstance) -> Kernel:
        stage, attrs = self.stage, instance.attrs
        sizes = tuple(attrs[name] for name in ("heads", "k_heads", "k_dim", "v_dim", "group"))
        layer, part, scale = attrs["pool_layer"], attrs["part"], attrs["scale"]

        def kernel(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            decay: torch.Tensor,
            beta: torch.Tensor,
            state: State,
            plan: NativePlan,
            w: Packed = (),
        ) -> tuple[torch.Tensor, State]:
            pool = state[layer][part]
            out = torch.empty(v.shape, device=v.device)
            given = [_flat(value) for value in (q, k, v, decay, beta)]
            strides = [value.stride(0) for value in given]
            integers = (*sizes, DTYPES[pool.dtype], pool.stride(0), *strides, 0, int(attrs["l2norm"]))
            stage.call(Code.GATED_DELTA, v.shape[0], (*given, pool, out), integers, (scale,), plan)
            return out, state

        return kernel


class NativeLora(NativeProvider):
    """Low-rank adapters, a slot per token."""

    name = "native lora"
    op = "lora"
    code = Code.LORA

    def takes(self, instance: OpInstance) -> Support:
        return Support(True, "float32 sums")

    def build(self, instance: OpInstance) -> Kernel:
        stage, attrs = self.stage, instance.attrs
        sizes = tuple(attrs[name] for name in ("in_features", "out_features", "rank", "slots"))

        def kernel(y: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, w: Packed) -> torch.Tensor:
            y, x = rows_of_last(y), rows_of_last(x)
            integers = (*sizes, x.stride(0), y.stride(0), DTYPES[w[0].dtype])
            stage.call(Code.LORA, y.shape[0], (y, x, slots.contiguous(), w[0], w[1]), integers)
            return y

        return kernel

    def pack(self, instance: OpInstance, weights: Mapping[str, Weight]) -> Packed:
        return tuple(weight.contiguous() for weight in super().pack(instance, weights))


def _flat(value: torch.Tensor) -> torch.Tensor:
    """[tokens, all else side by side]."""
    flat = value.flatten(1) if value.dim() > 2 else value
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()
