"""Matrix products: linear layers over plain, 8-bit and 4-bit weights, logits, and the embedding table."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from acme_npu.memory import CHIP
from acme_npu.ops.provider import AcmeProvider
from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed, Weight
from hardpoint_platforms.ops.provider import Support
from hardpoint_platforms.quant import Packing, QuantScheme, QuantTensor


def refused_scheme(scheme: QuantScheme) -> str:
    """Why the matrix unit does not read a scheme; "" where it does."""
    if scheme.codebook:
        return f"{scheme.name}: the unit has no table for codes"
    if scheme.packing is Packing.FLOAT8 or scheme.rounding is not None:
        return f"{scheme.name}: the unit multiplies no 8-bit floats and no rounded inputs"
    if scheme.group_rows > 1:
        return f"{scheme.name}: scales that rows share are not read"
    if scheme.super_group:
        return f"{scheme.name}: scales of two levels are not read"
    return ""


class Linear(AcmeProvider):
    """Quantized weights keep their bits; the other ones are taken as they are."""

    op = "linear"

    def supports(self, instance: OpInstance) -> Support:
        scheme = instance.weights["weight"].scheme
        reason = self.refuses(instance) or (refused_scheme(scheme) if scheme else "")
        if reason:
            return Support(False, reason)
        return Support(True, f"{scheme.name}, repacked" if scheme else "")

    def refuses(self, instance: OpInstance) -> str:
        if instance.dtype not in (torch.float32, torch.bfloat16) and self.fault != "claims_dtype":
            return f"the matrix unit multiplies float32 and bfloat16, not {instance.dtype}"
        return ""

    def pack(self, instance: OpInstance, weights: Mapping[str, Weight]) -> Packed:
        weight = weights["weight"]
        if not isinstance(weight, QuantTensor):
            return super().pack(instance, weights)
        rest = super().pack(instance, {name: w for name, w in weights.items() if name != "weight"})
        offsets = () if weight.offsets is None else (weight.offsets,)
        tiles: Packed = CHIP.launch(tile, weight.values, weight.scheme, weight.scales, *offsets)
        return (*tiles, *rest)

    def build(self, instance: OpInstance) -> Kernel:
        scheme, bias, rows = instance.weights["weight"].scheme, instance.attrs["bias"], instance.attrs["out_features"]
        shift = 1 if self.fault == "neighbour_scale" else 0

        def linear(x: torch.Tensor, w: Packed) -> torch.Tensor:
            if x.dtype is torch.float16:
                raise TypeError("the matrix unit has no float16")
            if scheme is None:
                return F.linear(x, *w)
            parts = w[:-1] if bias else w
            weight = untile(parts, scheme, rows, shift).to(x.dtype)
            return F.linear(x, weight, w[-1] if bias else None)

        return self.launched(linear)


def tile(values: torch.Tensor, scheme: QuantScheme, scales: torch.Tensor, *offsets: torch.Tensor) -> Packed:
    """The unit's layout: codes, then scales and offsets float32 [N, K / group].

    8-bit codes stay as they are; 4-bit ones lie two *rows* in a byte, [N / 2, K], the even row in the low half, rows
    filled up to an even number: a byte then feeds two accumulators.
    """
    wide = [part.float() for part in (scales, *offsets)]
    if scheme.packing is Packing.INT8:
        return values.clone(), *wide
    codes = torch.stack((values & 15, values >> 4), dim=-1).flatten(1)
    codes = F.pad(codes, (0, 0, 0, codes.shape[0] % 2))
    return codes[0::2] | (codes[1::2] << 4), *wide


def untile(parts: Packed, scheme: QuantScheme, rows: int, shift: int = 0) -> torch.Tensor:
    """float32 [N, K] of `tile`. `shift`: groups that 4-bit scales are off by, 0 unless something is wrong."""
    codes, scales = parts[0], parts[1]
    if scheme.packing is Packing.INT8:
        weight = codes.float()
    else:
        scales = scales.roll(shift, 1) if shift else scales
        weight = torch.empty(2 * codes.shape[0], codes.shape[1])
        weight[0::2], weight[1::2] = codes & 15, codes >> 4
        weight = weight[:rows]
    groups = weight.unflatten(1, (-1, scheme.group)).mul_(scales[..., None])
    if scheme.offset:
        groups = groups.add_(parts[2][..., None])
    full: torch.Tensor = groups.flatten(1)
    return full


class Logits(AcmeProvider):
    """Projection onto the vocabulary."""

    op = "logits"

    def build(self, instance: OpInstance) -> Kernel:
        scale, softcap, fault = instance.attrs["scale"], instance.attrs["softcap"], self.fault

        def logits(hidden: torch.Tensor, w: Packed) -> torch.Tensor:
            scores = F.linear(hidden, *w).float() * scale
            if fault == "wrong_shape":
                scores = scores[:, :-1]
            capped: torch.Tensor = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            return capped

        return self.launched(logits)


class Embedding(AcmeProvider):
    """Rows of a table."""

    op = "embedding"

    def build(self, instance: OpInstance) -> Kernel:
        scale, dtype = instance.attrs["scale"], instance.dtype

        def embedding(ids: torch.Tensor, w: Packed) -> torch.Tensor:
            rows: torch.Tensor = w[0][ids].to(dtype) * scale
            return rows

        return self.launched(embedding)
