"""The gated feed-forward block: claimed whole where a device has it, else two linears and an activation."""

from __future__ import annotations

import torch

from hardpoint.layers.linear import Linear, Projection, Projections, bind_linear, fuse, projection
from hardpoint.layers.op import LayerBuilder
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


MLP = GatedBlock | GatedMLP


def mlp(build: LayerBuilder, path: str, hidden: int, spec: MLPSpec, names: Names) -> MLP:
    """Bind x [T, hidden] -> [T, hidden]; a rank's output is that of its columns, a part of a sum."""
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
    block = _claim(build, path, hidden, spec, fuse(fused_path, parts), down)
    if block is not None:
        return block
    activate = build.bind("gated_activation", f"{path}.act_fn", kind=spec.activation)
    gate_up = Projections(build, fused_path, [(part, [part.out_features]) for part in parts])
    return GatedMLP(gate_up, activate.kernel, bind_linear(build, down))


def _claim(
    build: LayerBuilder,
    path: str,
    hidden: int,
    spec: MLPSpec,
    gate_up: Projection | None,
    down: Projection,
) -> GatedBlock | None:
    """The block op needs gate and up as one weight."""
    if gate_up is None:
        return None
    weights = {"gate_up": gate_up.weight, "down": down.weight}
    if gate_up.bias is not None:
        weights["gate_up_bias"] = gate_up.bias
    if down.bias is not None:
        weights["down_bias"] = down.bias
    width = down.weight.spec.shape[1]
    op = build.claim("gated_mlp", path, weights, hidden=hidden, intermediate=width, kind=spec.activation)
    return None if op is None else GatedBlock(op.kernel, op.slot)
