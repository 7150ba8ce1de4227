"""Products with weights: the vendor's library through torch, a Triton GEMV where one row is read faster by it, and
Triton kernels over quantized weights, which stay so."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed, Weight
from hardpoint_platforms.ops.provider import OpProvider, Support
from hardpoint_platforms.quant import QuantTensor
from hardpoint_platforms.versioning import Version
from hardpoint_torch_gpu.kernels.gemv import gemv
from hardpoint_torch_gpu.kernels.quant_gemm import gather
from hardpoint_torch_gpu.pointwise import TorchEmbedding
from hardpoint_torch_gpu.quantized import PARTS, pack, quant_product, refusal, unpacked

#: Rows of w from which the vendor's library reads as fast.
_WIDE = 65536


def product(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., K], w [N, K] -> [..., N]."""
    if x.numel() == w.shape[1] and w.dtype is not torch.float32 and w.shape[0] < _WIDE:
        y = gemv(x.view(1, -1), w, bias, x.dtype)
        return y.view(*x.shape[:-1], w.shape[0])
    return F.linear(x, w, bias)


def _wide_product(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Like `product`, float32 [R, V]: on a GPU the library writes its own sums."""
    if x.is_cuda and w.dtype is not torch.float32 and bias is None:
        return torch.mm(x, w.t(), out_dtype=torch.float32)
    return product(x, w, bias).to(torch.float32)


def _support(instance: OpInstance, plain: str) -> Support:
    scheme = instance.weights["weight"].scheme
    if scheme is None:
        return Support(True, plain)
    against = refusal(instance)
    return Support(True, f"{scheme.name} dequantized at load: {against}" if against else f"{scheme.name} stays packed")


def _stays_packed(instance: OpInstance) -> bool:
    return instance.weights["weight"].scheme is not None and not refusal(instance)


class _Dense(OpProvider):
    """An op with a weight, packed if the kernels take it, and perhaps a bias."""

    version = Version(1, 0)

    def pack(self, instance: OpInstance, weights: Mapping[str, Weight]) -> Packed:
        weight = weights["weight"]
        if not (_stays_packed(instance) and isinstance(weight, QuantTensor)):
            return super().pack(instance, weights)
        others = {name: other for name, other in weights.items() if name != "weight"}
        return (*pack(weight, instance.dtype), *super().pack(instance, others))


class TorchLinear(_Dense):
    """Linear layers."""

    name = "torch linear"
    op = "linear"

    def supports(self, instance: OpInstance) -> Support:
        return _support(instance, "one row by a Triton GEMV, more by the vendor's library")

    def build(self, instance: OpInstance) -> Kernel:
        def linear(x: torch.Tensor, w: Packed) -> torch.Tensor:
            return product(x, w[0], w[1] if len(w) > 1 else None)

        def quantized(x: torch.Tensor, w: Packed) -> torch.Tensor:
            return quant_product(x, unpacked(instance, w), w[PARTS] if len(w) > PARTS else None, x.dtype)

        return quantized if _stays_packed(instance) else linear


class TorchLogits(_Dense):
    """Projection onto the vocabulary."""

    name = "torch logits"
    op = "logits"

    def supports(self, instance: OpInstance) -> Support:
        return _support(instance, "")

    def build(self, instance: OpInstance) -> Kernel:
        scale, softcap, packed = instance.attrs["scale"], instance.attrs["softcap"], _stays_packed(instance)

        def logits(hidden: torch.Tensor, w: Packed) -> torch.Tensor:
            if packed:
                bias = w[PARTS] if len(w) > PARTS else None
                scores = quant_product(hidden, unpacked(instance, w), bias, torch.float32)
            else:
                scores = _wide_product(hidden, w[0], w[1] if len(w) > 1 else None)
            if scale != 1.0:
                scores = scores * scale
            return scores if softcap is None else softcap * torch.tanh(scores / softcap)

        return logits


class TableEmbedding(_Dense, TorchEmbedding):
    """Rows of a table; of a quantized one they are dequantized as they are read."""

    def supports(self, instance: OpInstance) -> Support:
        return _support(instance, "")

    def build(self, instance: OpInstance) -> Kernel:
        if not _stays_packed(instance):
            return super().build(instance)
        scale = float(instance.attrs["scale"])

        def embedding(token_ids: torch.Tensor, w: Packed) -> torch.Tensor:
            return gather(unpacked(instance, w), token_ids, scale, instance.dtype)

        return embedding
