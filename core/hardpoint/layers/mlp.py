"""The gated feed-forward block: claimed whole where a device has it, with the norm before it or without, else two
linears and an activation."""

from __future__ import annotations

import torch

from hardpoint.layers.linear import Linear, Product, Projection, Projections, bind_linear, fuse, projection
from hardpoint.layers.norm import AddNorm, done
from hardpoint.layers.op import Block, LayerBuilder, Part
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
    activation = f"{path}.act_fn"
    block: Block | None = None
    if gate_up is not None:
        attrs = {"hidden": hidden, "intermediate": down.weight.spec.shape[1], "kind": spec.activation}
        ops = (("linear", fused_path), ("gated_activation", activation), ("linear", down.path))
        block = Block("gated_mlp", path, _weights(gate_up, down), attrs, ops)
    if before is not None:
        if block is not None and before.claim(build, block):
            return done
        before.bind(build)
    whole = None if block is None else build.claim(block)
    if whole is not None:
        return GatedBlock(whole.kernel, whole.slot)
    activate = build.bind("gated_activation", activation, kind=spec.activation)
    both = Projections(build, fused_path, [(part, [part.out_features]) for part in parts])
    return GatedMLP(both, activate.kernel, bind_linear(build, down))


def _weights(gate_up: Projection, down: Projection) -> dict[str, Part]:
    """Of the blocks, which need gate and up as one weight."""
    biases = {"gate_up_bias": gate_up.bias, "down_bias": down.bias}
    given = {name: bias for name, bias in biases.items() if bias is not None}
    return {"gate_up": gate_up.weight, "down": down.weight, **given}
