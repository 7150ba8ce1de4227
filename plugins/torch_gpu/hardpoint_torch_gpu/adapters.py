"""Low-rank adapters of tokens through Triton kernels."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed, Weight
from hardpoint_platforms.ops.provider import OpProvider, Support
from hardpoint_platforms.versioning import Version
from hardpoint_torch_gpu.kernels.lora import add_adapters

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class TritonLora(OpProvider):
    """Down to the rank and up again, each token by its own adapter, into y in place."""

    name, op, version = "triton lora", "lora", Version(1, 0)

    def supports(self, instance: OpInstance) -> Support:
        if instance.dtype not in _DTYPES:
            return Support(False, f"activations are {str(instance.dtype).removeprefix('torch.')}")
        schemes = sorted({spec.scheme.name for spec in instance.weights.values() if spec.scheme is not None})
        kept = [f"{', '.join(schemes)} dequantized at load"] if schemes else []
        return Support(True, "; ".join(("in place, two launches or three", *kept)))

    def pack(self, instance: OpInstance, weights: Mapping[str, Weight]) -> Packed:
        """As they come, numbers of a row next to each other."""
        return tuple(part.contiguous() for part in super().pack(instance, weights))

    def build(self, instance: OpInstance) -> Kernel:
        def lora(y: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, w: Packed) -> torch.Tensor:
            y = y if y.stride(-1) == 1 else y.contiguous()
            add_adapters(y, x, slots.contiguous(), *w)
            return y

        return lora
