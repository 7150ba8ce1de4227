"""Products with weights: the vendor's library through torch, Triton kernels where x has few rows, and
Triton kernels over quantized weights, which stay so, with x as it is or rounded too."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed, Weight
from hardpoint_platforms.ops.provider import OpProvider, Support
from hardpoint_platforms.quant import QuantTensor, round_input
from hardpoint_platforms.versioning import Version
from hardpoint_torch_gpu import eight_bits
from hardpoint_torch_gpu.few_rows import FewRows
from hardpoint_torch_gpu.kernels.quant_gemm import gather
from hardpoint_torch_gpu.kernels.round_input import Rounded
from hardpoint_torch_gpu.pointwise import TorchEmbedding
from hardpoint_torch_gpu.quantized import PARTS, pack, quant_product, refusal, unpacked
from hardpoint_torch_gpu.rounded_input import TakesRounded


def _wide_product(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [R, K], w [V, K] -> float32 [R, V]: on a GPU the library writes its own sums."""
    if x.is_cuda and w.dtype is not torch.float32 and bias is None:
        return torch.mm(x, w.t(), out_dtype=torch.float32)
    return F.linear(x, w, bias).to(torch.float32)


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


class TorchLinear(_Dense, TakesRounded):
    """Linear layers."""

    name = "torch linear"
    op = "linear"

    def __init__(self, float8: bool = True, few: FewRows | None = None) -> None:
        """float8: whether the device multiplies float8_e4m3fn; few: what was measured, if anything was."""
        self._float8, self.few = float8, few or FewRows()

    def supports(self, instance: OpInstance) -> Support:
        scheme = instance.weights["weight"].scheme
        if scheme is None or scheme.rounding is None:
            return _support(instance, "few rows by Triton kernels, more by the vendor's library")
        against = eight_bits.refusal(instance, self._float8)
        if not against:
            return Support(True, f"{scheme.name} stays packed, products of 8-bit numbers")
        return Support(True, f"{_support(instance, '').reason}; x rounded apart: {against}")

    def against(self, instance: OpInstance) -> str:
        scheme = instance.weights["weight"].scheme
        if scheme is None or scheme.rounding is None:
            return "weight is no product of 8-bit numbers"
        return eight_bits.refusal(instance, self._float8)

    def pack(self, instance: OpInstance, weights: Mapping[str, Weight]) -> Packed:
        weight = weights["weight"]
        if self.against(instance) or not isinstance(weight, QuantTensor):
            packed = super().pack(instance, weights)
            if not _stays_packed(instance):
                self.few.learn(packed[0])
            return packed
        others = {name: other for name, other in weights.items() if name != "weight"}
        return (*eight_bits.pack(weight), *OpProvider.pack(self, instance, others))

    def build(self, instance: OpInstance) -> Kernel:
        spec = instance.weights["weight"]
        if spec.scheme is None or spec.scheme.rounding is None:
            return self._held(instance)
        rounding, kernel = spec.scheme.rounding, self._held(instance)
        if self.against(instance):
            # In the dtype of x, as the weight then is, and not in float32: a product as fast as any other.
            return lambda x, w: kernel(round_input(x, rounding).to(x.dtype), w)
        return TakesRounded.build(self, instance)

    def of_rounded(self, instance: OpInstance) -> Callable[[Rounded, Packed], torch.Tensor]:
        spec = instance.weights["weight"]
        assert spec.scheme is not None
        step = eight_bits.step_of(spec.scheme, spec.shape[-1])

        def linear(x: Rounded, w: Packed) -> torch.Tensor:
            bias = w[eight_bits.PARTS] if len(w) > eight_bits.PARTS else None
            return eight_bits.rounded_product(x, eight_bits.unpacked(instance, w), bias, step)

        return linear

    def _held(self, instance: OpInstance) -> Kernel:
        """linear as the weight is held, x taken as it is."""
        product = self.few.product

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
