"""Products whose weights stay quantized in the device's memory and become numbers inside the program.

    rounded input, one scale per row    int8 x int8 or float8 x float8, then both scales
    rounded input, otherwise            the rounded input by the weight's numbers, in float32
    anything else                       the weight's numbers in the activations' dtype, by the input

XLA joins the arithmetic that makes the numbers with what reads them where its back end can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed, Weight, WeightSpec
from hardpoint_platforms.ops.provider import Support
from hardpoint_platforms.quant import Codes, QuantTensor, round_input
from hardpoint_tpu.kernels_table import TpuProvider
from hardpoint_tpu.runtime import lifted

_PARTS = ("values", "scales", "offsets", "super_scales", "super_offsets", "codebook")
OPS = ("embedding", "linear", "logits")


class QuantizedProvider(TpuProvider):
    """embedding, linear and logits over a quantized weight, a bias beside it or not."""

    name = "quantized"

    def supports(self, instance: OpInstance) -> Support:
        scheme = instance.weights["weight"].scheme if "weight" in instance.weights else None
        if scheme is None:
            return Support(False, "the weight is not quantized")
        if instance.op == "embedding" and scheme.group_rows > 1:
            return Support(False, f"{scheme.name}: rows of an embedding cannot be taken out of blocks of rows")
        how = "whole-number products" if _by_codes(instance) else "made into numbers inside the program"
        return Support(True, f"{scheme.name} stays quantized, {how}")

    def pack(self, instance: OpInstance, weights: Mapping[str, Weight]) -> Packed:
        weight = weights["weight"]
        assert isinstance(weight, QuantTensor), "supports() took a quantized weight"
        parts = [part for part in (getattr(weight, name) for name in _PARTS) if part is not None]
        bias = weights.get("bias")
        return (*parts, *([] if bias is None else [bias.to(instance.dtype)]))  # type: ignore[union-attr]

    def build(self, instance: OpInstance) -> Kernel:
        make = {"embedding": _embedding, "linear": _linear, "logits": _logits}[instance.op]
        return self.kernels.bind(self, instance, lambda placed: make(placed, self.runtime.wrap))


def unpacked(spec: WeightSpec, packed: Packed) -> tuple[QuantTensor, Packed]:
    """The quantized weight at the beginning of `packed`, and what comes behind it."""
    scheme = spec.scheme
    assert scheme is not None
    present = {
        "values": True,
        "scales": True,
        "offsets": scheme.offset,
        "super_scales": bool(scheme.super_group),
        "super_offsets": bool(scheme.super_group) and scheme.offset,
        "codebook": scheme.codebook,
    }
    names = [name for name in _PARTS if present[name]]
    weight = QuantTensor(scheme, spec.shape, **dict(zip(names, packed, strict=False)))
    return weight, packed[len(names) :]


def _by_codes(instance: OpInstance) -> bool:
    """Whether the product is one of codes: one scale per row of the weight and of the input, and nothing besides."""
    spec = instance.weights["weight"]
    scheme = spec.scheme
    if instance.op != "linear" or scheme is None or scheme.rounding is None:
        return False
    plain = not (scheme.offset or scheme.codebook or scheme.super_group or scheme.group_rows > 1)
    return plain and scheme.group == spec.shape[-1] and scheme.rounding.group in (0, spec.shape[-1])


def _embedding(instance: OpInstance, wrap: Any) -> Kernel:
    spec, scale, dtype = instance.weights["weight"], instance.attrs["scale"], instance.dtype

    def embedding(ids: torch.Tensor, w: Packed) -> torch.Tensor:
        weight, _ = unpacked(spec, w)
        taken = {
            name: part if name == "codebook" else part.index_select(0, ids)
            for name, part in ((name, getattr(weight, name)) for name in _PARTS)
            if part is not None
        }
        rows = QuantTensor(weight.scheme, (ids.shape[0], spec.shape[1]), **taken).dequantize(dtype)
        return rows if scale == 1.0 else rows * scale

    return embedding


def _linear(instance: OpInstance, wrap: Callable[[Any], torch.Tensor]) -> Kernel:
    spec = instance.weights["weight"]
    scheme = spec.scheme
    assert scheme is not None
    rounding, dtype = scheme.rounding, instance.dtype
    multiply = lifted(_product_of_codes, wrap)
    by_codes = _by_codes(instance)

    def linear(x: torch.Tensor, w: Packed) -> torch.Tensor:
        weight, rest = unpacked(spec, w)
        if rounding is None:
            out = F.linear(x.to(dtype), weight.dequantize(dtype))
            return out + rest[0] if rest else out
        if by_codes:
            codes, scale = _codes(x, rounding.codes)
            out = multiply(codes, weight.values) * scale * weight.scales.to(torch.float32).T
        else:
            out = F.linear(round_input(x, rounding), weight.dequantize())
        return (out + rest[0].to(torch.float32) if rest else out).to(x.dtype)

    return linear


def _logits(instance: OpInstance, wrap: Any) -> Kernel:
    spec = instance.weights["weight"]
    scale, softcap, dtype = instance.attrs["scale"], instance.attrs["softcap"], instance.dtype

    def logits(hidden: torch.Tensor, w: Packed) -> torch.Tensor:
        weight, rest = unpacked(spec, w)
        scores = F.linear(hidden, weight.dequantize(dtype))
        scores = (scores + rest[0] if rest else scores).to(torch.float32)
        scores = scores * scale if scale != 1.0 else scores
        return scores if softcap is None else softcap * torch.tanh(scores / softcap)

    return logits


def _codes(x: torch.Tensor, codes: Codes) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K] as codes of its dtype and scales float32 [..., 1]; see `Rounding`."""
    wide = x.to(torch.float32)
    whole = codes is Codes.INT8
    scale = wide.abs().amax(-1, keepdim=True) / (127.0 if whole else torch.finfo(torch.float8_e4m3fn).max)
    ratio = wide / torch.where(scale > 0, scale, 1.0)
    return (ratio.round().to(torch.int8) if whole else ratio.to(torch.float8_e4m3fn)), scale


def _product_of_codes(x: Any, weight: Any) -> Any:
    """float32 [..., N] of codes [..., K] and [N, K]; whole numbers are summed in 32 bits."""
    total = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    contracted = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight, contracted, preferred_element_type=total).astype(jnp.float32)
