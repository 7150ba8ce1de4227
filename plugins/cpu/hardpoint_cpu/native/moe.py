"""Native mixture of experts: routing, and all experts of all tokens in one call."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch

from hardpoint_cpu.native.abi import Code
from hardpoint_cpu.native.provider import NativeProvider, rows_of_last
from hardpoint_cpu.native.weights import expert_slices, pack_weights, products, weight_bytes
from hardpoint_platforms.ops.activation import KINDS
from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed, Weight
from hardpoint_platforms.ops.provider import Support
from hardpoint_platforms.quant import QuantTensor


class NativeExperts(NativeProvider):
    """Tokens sorted by expert inside the library, nothing read back."""

    name = "native experts"
    op = "experts"
    code = Code.EXPERTS

    def takes(self, instance: OpInstance) -> Support:
        return products(instance, self.setting.exact)

    def build(self, instance: OpInstance) -> Kernel:
        stage, attrs = self.stage, instance.attrs
        shape = tuple(attrs[name] for name in ("hidden", "intermediate", "experts", "top_k"))
        kind = (KINDS.index(attrs["activation"]), int(attrs["gated"]), int(attrs["weight_on_input"]))
        limits = (attrs["limit"] or 0.0, attrs["up_offset"])
        place = {name: index for index, name in enumerate(instance.weights)}

        def kernel(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, w: Packed) -> torch.Tensor:
            x = x.contiguous()
            out = torch.empty(x.shape, device=x.device)
            biases = [w[place[name]] if name in place else None for name in ("gate_up_bias", "down_bias")]
            pointers = (x, weights.contiguous(), ids.contiguous(), w[0], w[1], out, *biases)
            stage.call(Code.EXPERTS, x.shape[0], pointers, (*shape, *kind), limits)
            return out

        return kernel

    def pack(self, instance: OpInstance, weights: Mapping[str, Weight]) -> Packed:
        interleaved, exact = instance.attrs["interleaved"] and instance.attrs["gated"], self.setting.exact
        packed = [
            pack_weights(self.stage, expert_slices(weights["gate_up"], interleaved), exact),
            pack_weights(self.stage, expert_slices(weights["down"], False), exact),
        ]
        for name in ("gate_up_bias", "down_bias"):
            if name in weights:
                bias = weights[name]
                plain = bias.dequantize() if isinstance(bias, QuantTensor) else bias.to(torch.float32)
                if interleaved and name == "gate_up_bias":
                    plain = torch.cat((plain[:, 0::2], plain[:, 1::2]), 1)
                packed.append(plain.contiguous())
        return tuple(packed)

    def held_bytes(self, tensor: torch.Tensor) -> Mapping[Hashable, int]:
        return weight_bytes(self.stage, tensor) if tensor.dtype is torch.int64 else super().held_bytes(tensor)


#: How logits become weights, and what a group is worth: codes of HP_ROUTE.
SCORES = ("softmax", "sigmoid", "topk_softmax", "topk_sigmoid")
GROUP_SCORES = ("max", "top2")


class NativeRoute(NativeProvider):
    """Experts of each token and their weights."""

    name = "native moe_route"
    op = "moe_route"
    code = Code.ROUTE

    def takes(self, instance: OpInstance) -> Support:
        return Support(True, instance.attrs["score"])

    def build(self, instance: OpInstance) -> Kernel:
        stage, attrs = self.stage, instance.attrs
        experts, count = attrs["experts"], attrs["top_k"]
        group = (attrs["groups"], attrs["top_groups"], GROUP_SCORES.index(attrs["group_score"]))
        shape = (experts, count, SCORES.index(attrs["score"]), int(attrs["renormalize"]), *group)

        def kernel(logits: torch.Tensor, w: Packed = ()) -> tuple[torch.Tensor, torch.Tensor]:
            logits = rows_of_last(logits)
            rows = logits.shape[0]
            weights = torch.empty((rows, count), device=logits.device)
            ids = torch.empty((rows, count), dtype=torch.int64, device=logits.device)
            pointers = (logits, w[0] if w else None, weights, ids)
            stage.call(Code.ROUTE, rows, pointers, (*shape, logits.stride(0)), (attrs["scale"],))
            return weights, ids

        return kernel
