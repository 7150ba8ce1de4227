"""What a quantization method answers: which tensors make one weight, what it will look like, and the weight itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hardpoint.errors import ModelError, WeightsError
from hardpoint.weights.source import WeightSource
from hardpoint_platforms.ops.contract import Weight
from hardpoint_platforms.quant import QuantScheme, QuantTensor, Rounding, unpack_codes

#: Dtypes that scales come in; float8_e8m0fnu holds powers of two.
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)


@dataclass(frozen=True)
class Stored:
    """One weight as a checkpoint keeps it.

    Attributes:
        name: of the weight that a model asks for ("model.layers.0.mlp.down_proj.weight").
        parts: names of its tensors by their part in it: "values", "scales", "zeros", "order" ...
        files: where the tensors lie.
    """

    name: str
    parts: Mapping[str, str]
    files: WeightSource

    @property
    def module(self) -> str:
        """The name of the module, as configs spell it."""
        return self.name.removesuffix(".weight")

    def has(self, part: str) -> bool:
        """Whether the checkpoint holds this part."""
        return part in self.parts

    def shape(self, part: str, dtypes: Sequence[torch.dtype], axes: Sequence[int] = (2,)) -> tuple[int, ...]:
        """Shape of a part. Raises WeightsError if it is missing, or has another dtype or number of axes."""
        shape = self._shape(part, dtypes)
        if len(shape) not in axes:
            raise self.wrong(f"the {part} have shape {list(shape)}, must have {' or '.join(map(str, axes))} axes", part)
        return shape

    def expect(self, part: str, dtypes: Sequence[torch.dtype], *shapes: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of a part that must be one of `shapes`. Raises WeightsError."""
        found = self._shape(part, dtypes)
        if found not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
            raise self.wrong(f"the {part} have shape {list(found)}, must have {wanted}", part)
        return found

    def _shape(self, part: str, dtypes: Sequence[torch.dtype]) -> tuple[int, ...]:
        if part not in self.parts:
            there = ", ".join(repr(name) for name in self.parts.values())
            raise self.wrong(f"the {part} are missing; there is only {there}", self.any)
        spec = self.files.spec(self.parts[part])
        if spec.dtype not in dtypes:
            wanted = ", ".join(map(_word, dtypes))
            raise self.wrong(f"the {part} are {_word(spec.dtype)}, must be {wanted}", part)
        return spec.shape

    def load(self, part: str) -> torch.Tensor:
        """The tensor of a part."""
        tensor = self.files.load(self.parts[part])
        if isinstance(tensor, QuantTensor):
            raise TypeError(f"{self.parts[part]} is quantized itself")
        return tensor

    @property
    def any(self) -> str:
        """A part that is there."""
        return next(iter(self.parts))

    def wrong(self, reason: str, part: str = "values", hint: str | None = None) -> WeightsError:
        """An error that names file and tensor."""
        where = self.parts.get(part) or self.parts[self.any]
        told = hint or "the download is incomplete, or config.json belongs to another model"
        return WeightsError(f"{self.files.describe(where)}: of {self.name!r} {reason}", hint=told)


@dataclass(frozen=True)
class Layout:
    """What is known of a weight before its data are read.

    Attributes:
        shape: logical shape.
        scheme: None where no scheme holds it: it becomes plain when it is read.
    """

    shape: tuple[int, ...]
    scheme: QuantScheme | None


class Method(ABC):
    """One `quant_method`.

    Class attributes:
        ends: what the names of its tensors end in, and their part in a weight. What is left names the weight.
        named: what is put in the end's place.
        own: the part that a tensor under the weight's own name is, where there is one.
    """

    ends: Mapping[str, str]
    named: str = ""
    own: str | None = None

    def __init__(self, config: Mapping[str, Any]) -> None:
        """`config`: of `quantization_config`. Raises ModelError for what is not read."""
        self.config = config

    @abstractmethod
    def layout(self, stored: Stored) -> Layout:
        """Shape and scheme, from headers (and tensors of a few bytes). Raises WeightsError."""

    @abstractmethod
    def read(self, stored: Stored, layout: Layout) -> Weight:
        """The weight: quantized in `layout.scheme`, plain where that is None."""

    def notes(self) -> list[str]:
        """What in the config is not followed, for people."""
        return []


def columns_in_groups(stored: Stored, columns: int, group: int) -> int:
    """Columns per scale: `group`, or the whole row where that is not positive or no shorter.

    Raises WeightsError where groups do not divide the columns.
    """
    if group <= 0 or group >= columns:
        return columns
    if columns % group:
        raise stored.wrong(
            f"{columns} columns do not divide into groups of {group}",
            hint="use a checkpoint with a group size that divides them, or the unquantized model",
        )
    return group


def rounding_of(stored: Stored, rounding: Rounding | None, columns: int) -> Rounding | None:
    """The rounding of inputs of `columns` columns: a group as long is the whole row. Raises WeightsError."""
    if rounding is None:
        return None
    group = columns_in_groups(stored, columns, rounding.group)
    return Rounding(rounding.codes, group if group < columns else 0)


def in_order(weight: QuantTensor, order: torch.Tensor) -> torch.Tensor:
    """The plain weight, float32 [rows, columns], of one whose column c has the scales of group order[c].

    `weight` must have one level of scales, one row each, and as many groups as it has scales.
    """
    wide = unpack_codes(weight.values, weight.scheme.packing).to(torch.float32)
    wide = wide.mul_(weight.scales.to(torch.float32)[:, order])
    return wide if weight.offsets is None else wide.add_(weight.offsets.to(torch.float32)[:, order])


def is_in_order(stored: Stored, columns: int, group: int) -> bool:
    """Whether column c belongs to group c // group, as it does where the checkpoint holds no order of its own."""
    if not stored.has("order"):
        return True
    if stored.shape("order", (torch.int32, torch.int64), (1,)) == (0,):
        return True
    stored.expect("order", (torch.int32, torch.int64), (columns,))
    order = stored.load("order").long()
    if bool((order < 0).all()) or not bool(order.any()):
        return True  # never filled in: all -1, or all 0
    if int(order.min()) < 0 or int(order.max()) >= columns // group:
        raise stored.wrong(f"the order of columns names groups outside 0..{columns // group - 1}", "order")
    return torch.equal(order, torch.arange(columns) // group)


def plain_if(layout: Layout, condition: bool) -> Layout:
    """The layout without its scheme where the neutral form cannot hold the weight."""
    return replace(layout, scheme=None) if condition else layout


def integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """An integer of a config. Raises ModelError."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelError(f"config.json: 'quantization_config' says {key!r} is {value!r}, must be an integer")
    return value


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
