"""The groups of a compressed-tensors config: which modules they are for, and what their weights and inputs are."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hardpoint.errors import ModelError
from hardpoint.weights.quantized.float8 import block_of
from hardpoint.weights.quantized.grids import Block
from hardpoint.weights.quantized.method import Stored, integer
from hardpoint_platforms.quant import Codes, Rounding

_CODES = {("float", 8): Codes.FLOAT8, ("int", 8): Codes.INT8}
#: The class that targets name for a module whose name ends so; every other one is a Linear.
_CLASSES = {"embed_tokens": "Embedding"}


@dataclass(frozen=True)
class Group:
    """One entry of `config_groups`.

    Attributes:
        targets: module names, patterns after "re:", or class names.
        bits, integers: of the weights: whole numbers or float8.
        symmetric: whether zero points are all zero.
        block: rows and columns per scale; None where the scales' own shape says whether it is one, or one per row.
        rounding: of the inputs.
        left_out: what the inputs should be rounded to where that has no neutral form; they stay as they are.
        format: where it is not the config's.
    """

    targets: tuple[str, ...]
    bits: int
    integers: bool
    symmetric: bool
    block: Block | None
    rounding: Rounding | None
    left_out: str
    format: str


def groups_of(config: Mapping[str, Any]) -> tuple[Group, ...]:
    """All groups of a `quantization_config`. Raises ModelError."""
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ModelError("config.json: 'quantization_config' of compressed-tensors has no 'config_groups'")
    return tuple(_group(str(name), group) for name, group in groups.items())


def find_group(groups: Sequence[Group], stored: Stored) -> Group:
    """The group of a weight: by its module's name, else by a pattern, else by its class. Raises WeightsError."""
    module = stored.module
    kind = next((kind for end, kind in _CLASSES.items() if module.endswith(end)), "Linear")
    ways: tuple[Callable[[str], bool], ...] = (
        lambda target: target == module,
        lambda target: target.startswith("re:") and re.match(target[3:], module) is not None,
        lambda target: target == kind,
        lambda target: target == "Linear",
    )
    for fits in ways:
        for group in groups:
            if any(fits(target) for target in group.targets):
                return group
    raise stored.wrong(
        "no group of 'quantization_config' has it as a target",
        stored.any,
        hint="config.json belongs to another model, or was changed",
    )


def _group(name: str, group: Any) -> Group:
    where = f"config.json: group {name!r} of 'quantization_config'"
    weights = group.get("weights") if isinstance(group, Mapping) else None
    targets = group.get("targets") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping) or not isinstance(targets, list):
        raise ModelError(f"{where} has no 'weights' or no 'targets'", hint="such groups have nothing to be read by")
    bits, kind, strategy = integer(weights, "num_bits"), weights.get("type", "int"), weights.get("strategy")
    size = weights.get("group_size")
    strategy = strategy or ("group" if isinstance(size, int) and size > 0 else "tensor")
    if kind not in ("int", "float") or (kind == "float" and bits != 8):
        raise ModelError(f"{where} has weights of type {kind!r} and {bits} bits; read are int, and float of 8")
    if strategy not in ("tensor", "channel", "group", "block"):
        raise ModelError(f"{where} has weights by {strategy!r}; read are tensor, channel, group, block")
    block = (1, integer(weights, "group_size")) if strategy == "group" else None
    if strategy == "block":
        block = block_of(weights.get("block_structure") or [128, 128], "block_structure")
    rounding, left_out = _rounding(group.get("input_activations"), block if strategy == "block" else None)
    symmetric = bool(weights.get("symmetric", True))
    kept = str(group.get("format") or "")
    return Group(tuple(map(str, targets)), bits, kind == "int", symmetric, block, rounding, left_out, kept)


def _rounding(inputs: Any, block: Block | None) -> tuple[Rounding | None, str]:
    """What inputs are rounded to, and what they should be rounded to where that has no neutral form."""
    if not isinstance(inputs, Mapping):
        return None, ""
    kind, bits, strategy = inputs.get("type", "int"), inputs.get("num_bits", 8), inputs.get("strategy", "tensor")
    codes = _CODES.get((kind, bits))
    if codes is None or not inputs.get("symmetric", True):
        return None, f"{kind} of {bits} bits{'' if inputs.get('symmetric', True) else ', not symmetric'}"
    if strategy in ("group", "block"):
        return Rounding(codes, inputs.get("group_size") or (block[1] if block else 128)), ""
    return Rounding(codes), ""
