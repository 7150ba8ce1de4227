"""Products with plain weights: the vendor's library through torch, a Triton GEMV where one row is read faster by it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed
from hardpoint_platforms.ops.provider import OpProvider, Support
from hardpoint_platforms.versioning import Version
from hardpoint_torch_gpu.kernels.gemv import gemv

#: Rows of w per program, columns per step, warps: the best of 45 on an H200 for three of the four layers of Llama 8B.
_GEMV = (2, 2048, 2)
#: Rows of w from which the vendor's library reads as fast.
_WIDE = 65536


def product(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., K], w [N, K] -> [..., N]."""
    if x.numel() == w.shape[1] and w.dtype is not torch.float32 and w.shape[0] < _WIDE:
        y = gemv(x.view(1, -1), w, bias, x.dtype, *_GEMV)
        return y.view(*x.shape[:-1], w.shape[0])
    return F.linear(x, w, bias)


def _wide_product(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Like `product`, float32 [R, V]: on a GPU the library writes its own sums."""
    if x.is_cuda and w.dtype is not torch.float32 and bias is None:
        return torch.mm(x, w.t(), out_dtype=torch.float32)
    return product(x, w, bias).to(torch.float32)


class TorchLinear(OpProvider):
    """Linear layers. Quantized weights are dequantized at load."""

    name = "torch linear"
    op = "linear"
    version = Version(1, 0)

    def supports(self, instance: OpInstance) -> Support:
        scheme = instance.weights["weight"].scheme
        if scheme is not None:
            return Support(True, f"{scheme.name} dequantized at load")
        return Support(True, "one row by a Triton GEMV, more by the vendor's library")

    def build(self, instance: OpInstance) -> Kernel:
        def linear(x: torch.Tensor, w: Packed) -> torch.Tensor:
            return product(x, w[0], w[1] if len(w) > 1 else None)

        return linear


class TorchLogits(OpProvider):
    """Projection onto the vocabulary."""

    name = "torch logits"
    op = "logits"
    version = Version(1, 0)

    def supports(self, instance: OpInstance) -> Support:
        scheme = instance.weights["weight"].scheme
        return Support(True, "" if scheme is None else f"{scheme.name} dequantized at load")

    def build(self, instance: OpInstance) -> Kernel:
        scale, softcap = instance.attrs["scale"], instance.attrs["softcap"]

        def logits(hidden: torch.Tensor, w: Packed) -> torch.Tensor:
            scores = _wide_product(hidden, w[0], w[1] if len(w) > 1 else None)
            if scale != 1.0:
                scores = scores * scale
            return scores if softcap is None else softcap * torch.tanh(scores / softcap)

        return logits
