"""Native linear, logits and embedding: weights repacked once at load, activations int8 per block or exact."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch

from hardpoint_cpu.native.abi import Code
from hardpoint_cpu.native.provider import NativeProvider, rows_of_last
from hardpoint_cpu.native.weights import is_laid_out, pack_matrix, pack_weights, products, weight_bytes
from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed, Weight
from hardpoint_platforms.ops.provider import Support
from hardpoint_platforms.quant import QuantTensor


class NativeLinear(NativeProvider):
    """y = x W^T + b."""

    name = "native linear"
    op = "linear"
    code = Code.LINEAR

    def takes(self, instance: OpInstance) -> Support:
        return products(instance, self.setting.exact)

    def build(self, instance: OpInstance) -> Kernel:
        stage, biased = self.stage, "bias" in instance.weights
        outputs, inputs = instance.weights["weight"].shape

        def kernel(x: torch.Tensor, w: Packed) -> torch.Tensor:
            flat = rows_of_last(x)
            rows = flat.shape[0]
            out = torch.empty((rows, outputs), device=x.device)
            bias = w[1] if biased else None
            weight = int(w[0].item())  # the address of the hp_weight
            stage.call(Code.LINEAR, rows, (flat, weight, bias, out), (inputs, outputs, flat.stride(0), outputs))
            return out if x.dim() == 2 else out.view(*x.shape[:-1], outputs)

        return kernel

    def pack(self, instance: OpInstance, weights: Mapping[str, Weight]) -> Packed:
        packed = pack_weights(self.stage, [weights["weight"]], self.setting.exact)
        if "bias" not in weights:
            return (packed,)
        bias = weights["bias"]
        plain = bias.dequantize() if isinstance(bias, QuantTensor) else bias
        return (packed, plain.to(torch.float32).contiguous())

    def held_bytes(self, tensor: torch.Tensor) -> Mapping[Hashable, int]:
        return weight_bytes(self.stage, tensor) if tensor.dtype is torch.int64 else super().held_bytes(tensor)


class NativeLogits(NativeLinear):
    """The output projection: scale and soft cap in a second pass, only where a model has them."""

    name = "native logits"
    op = "logits"

    def build(self, instance: OpInstance) -> Kernel:
        stage, project = self.stage, super().build(instance)
        scale, softcap = instance.attrs["scale"], instance.attrs["softcap"] or 0.0
        vocab = instance.weights["weight"].shape[0]

        def kernel(hidden: torch.Tensor, w: Packed) -> torch.Tensor:
            scores: torch.Tensor = project(hidden, w)
            if scale != 1.0 or softcap:
                stage.call(Code.SCALE_CAP, scores.shape[0], (scores,), (vocab, vocab), (scale, softcap))
            return scores

        return kernel


class NativeEmbedding(NativeProvider):
    """Rows of a table, which stays as it was loaded."""

    name = "native embedding"
    op = "embedding"
    code = Code.EMBED

    def takes(self, instance: OpInstance) -> Support:
        scheme = instance.weights["weight"].scheme
        if scheme is None or not is_laid_out(scheme):
            return Support(True, "rows copied" if scheme is None else f"{scheme.name} dequantized at load to float32")
        return Support(True, f"{scheme.name} rows dequantized on look-up")

    def build(self, instance: OpInstance) -> Kernel:
        stage, scale = self.stage, instance.attrs["scale"]
        width = instance.weights["weight"].shape[1]

        def kernel(ids: torch.Tensor, w: Packed) -> torch.Tensor:
            rows = ids.shape[0]
            out = torch.empty((rows, width), device=ids.device)
            stage.call(Code.EMBED, rows, (ids.contiguous(), w[0], out), (width,), (scale,))
            return out

        return kernel

    def pack(self, instance: OpInstance, weights: Mapping[str, Weight]) -> Packed:
        return pack_matrix(weights["weight"])
