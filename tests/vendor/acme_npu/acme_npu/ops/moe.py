"""Mixture of experts: the router's choice, and a grouped product over the tokens of each expert."""

from __future__ import annotations

import torch

from acme_npu.ops.pointwise import ACTIVATIONS, gated
from acme_npu.ops.provider import AcmeProvider
from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed


class Route(AcmeProvider):
    """Softmax or sigmoid of all logits; groups of experts are left to the reference."""

    op = "moe_route"

    def refuses(self, instance: OpInstance) -> str:
        return "chooses among all experts, not among groups" if instance.attrs["groups"] > 1 else ""

    def build(self, instance: OpInstance) -> Kernel:
        attrs = instance.attrs
        top_k, score, scale, renormalize = (attrs[name] for name in ("top_k", "score", "scale", "renormalize"))
        late = score.startswith("topk_")  # the score is taken over the chosen ones

        def weigh(x: torch.Tensor) -> torch.Tensor:
            return x.softmax(-1) if score.endswith("softmax") else x.sigmoid()

        def moe_route(logits: torch.Tensor, w: Packed = ()) -> tuple[torch.Tensor, torch.Tensor]:
            scores = logits.float() if late else weigh(logits.float())
            wanted = scores + w[0] if w else scores
            ids = wanted.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
            chosen = scores.gather(1, ids)
            chosen = weigh(chosen) if late else chosen
            if renormalize and not late:
                chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
            return chosen * scale, ids

        return self.launched(moe_route)


class Experts(AcmeProvider):
    """Quantized experts are dequantized at load."""

    op = "experts"

    def refuses(self, instance: OpInstance) -> str:
        kind = instance.attrs["activation"]
        return super().refuses(instance) if kind in ACTIVATIONS else f"the vector unit has no {kind}"

    def build(self, instance: OpInstance) -> Kernel:
        attrs = instance.attrs

        def inner(x: torch.Tensor) -> torch.Tensor:
            if not attrs["gated"]:
                return ACTIVATIONS[attrs["activation"]](x.float())
            gate, up = (x[:, 0::2], x[:, 1::2]) if attrs["interleaved"] else x.chunk(2, dim=-1)
            return gated(gate.float(), up.float(), attrs["activation"], attrs["limit"], attrs["up_offset"])

        def experts(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, w: Packed) -> torch.Tensor:
            total = torch.zeros(x.shape)
            for expert in range(attrs["experts"]):
                token, choice = (ids == expert).nonzero(as_tuple=True)
                if len(token) == 0:
                    continue
                share = weights[token, choice][:, None]
                rows = (x[token] * share).to(x.dtype) if attrs["weight_on_input"] else x[token]
                up, down, *bias = (part[expert] for part in w)
                out = inner(torch.nn.functional.linear(rows, up, *bias[:1])).to(x.dtype)
                out = torch.nn.functional.linear(out, down, *bias[1:]).float()
                total.index_add_(0, token, out if attrs["weight_on_input"] else out * share)
            return total.to(x.dtype)

        return self.launched(experts)
