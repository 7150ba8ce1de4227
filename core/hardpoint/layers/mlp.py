"""The gated feed-forward block: claimed whole where a device has it, with the norm before it or without, else two
linears and an activation."""

from __future__ import annotations

from typing import Any

import torch

from hardpoint.layers.linear import Linear, Product, Projection, Projections, bind_linear, fuse, projection
from hardpoint.layers.norm import AddNorm, done
from hardpoint.layers.op import LayerBuilder, Part
from hardpoint.layers.shard import after
from hardpoint.models.spec import MLPSpec, Names
from hardpoint_platforms.ops.contract import Kernel
from hardpoint_platforms.program import Weights


class GatedBlock:
    """A whole gated MLP as one op."""

    __slots__ = ("_kernel", "_slot")

    def __init__(self, kernel: Kernel, slot: int) -> None:
        self._kernel = kernel
        self._slot = slot

    def __call__(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        return self._kernel(x, weights[self._slot])  # type: ignore[no-any-return]


class GatedMLP:
    """down(act(gate(x)) * up(x)) from its parts."""

    __slots__ = ("_activate", "_down", "_gate_up")

    def __init__(self, gate_up: Projections, activate: Kernel, down: Linear) -> None:
        self._gate_up = gate_up
        self._activate = activate
        self._down = down

    def __call__(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        return self._down(self._activate(self._gate_up.joined(x, weights)), weights)


def mlp(
    build: LayerBuilder, path: str, hidden: int, spec: MLPSpec, names: Names, before: AddNorm | None = None
) -> Product:
    """Bind x [T, hidden] -> [T, hidden]; a rank's output is that of its columns, a part of a sum.

    before: the norm of its input, which becomes one op with it where a device has that; bound here.
    """
    width = spec.intermediate
    mine = build.shard.mine(width, "columns of a feed-forward block")
    fused_path = f"{path}.{names.gate_up or 'gate_up_proj'}"
    if names.gate_up is not None:
        rows = [mine, after(width, mine)]
        parts = [projection(build, fused_path, hidden, 2 * width, spec.bias, rows=rows)]
    else:
        parts = [
            projection(build, f"{path}.{name}", hidden, width, spec.bias, rows=[mine])
            for name in (names.gate, names.up)
        ]
    down = projection(build, f"{path}.{names.down}", width, hidden, spec.bias, columns=mine)
    gate_up = fuse(fused_path, parts)
    weights = None if gate_up is None else _weights(gate_up, down)
    inner = down.weight.spec.shape[1]
    attrs: dict[str, Any] = {"hidden": hidden, "intermediate": inner, "kind": spec.activation}
    activation = f"{path}.act_fn"
    ops = [("linear", fused_path), ("gated_activation", activation), ("linear", down.path)]
    if weights is not None and before is not None:
        whole = [("gated_mlp", path), *ops]
        if before.claim(build, "norm_gated_mlp", path, weights, whole, **attrs):
            return done
    if before is not None:
        before.bind(build)
    block = None if weights is None else build.claim("gated_mlp", path, weights, ops, **attrs)
    if block is not None:
        return GatedBlock(block.kernel, block.slot)
    activate = build.bind("gated_activation", activation, kind=spec.activation)
    both = Projections(build, fused_path, [(part, [part.out_features]) for part in parts])
    return GatedMLP(both, activate.kernel, bind_linear(build, down))


def _weights(gate_up: Projection, down: Projection) -> dict[str, Part]:
    """Of the blocks, which need gate and up as one weight."""
    biases = {"gate_up_bias": gate_up.bias, "down_bias": down.bias}
    given = {name: bias for name, bias in biases.items() if bias is not None}
    return {"gate_up": gate_up.weight, "down": down.weight, **given}
