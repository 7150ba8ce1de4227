"""What an op contract is: data that says what an op takes, returns and may change, with a reference and samples.

A contract knows no model and no vendor. It stands at one of three altitudes. The core asks for the highest first: a
device that claims a *block* gets it whole; what nobody claims is decomposed into *composites*; every composite and
primitive has a reference in plain PyTorch.

A new attribute is a new minor version with a default. An instance needs only the minor of the attributes that it sets
away from their defaults, so a plugin that speaks an older minor still gets every instance that it can serve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch

from hardpoint_platforms.quant import QuantScheme, QuantTensor
from hardpoint_platforms.versioning import Version

#: Weights as a kernel wants them: made once at load by `OpProvider.pack`, passed to each call.
Packed = tuple[torch.Tensor, ...]
#: A bound op: a plain callable. Its signature is the contract's `signature`.
Kernel = Callable[..., Any]
#: A weight as the core loads it.
Weight = torch.Tensor | QuantTensor


class Altitude(IntEnum):
    """How much of the model one op covers."""

    PRIMITIVE = 1
    COMPOSITE = 2
    BLOCK = 3


@dataclass(frozen=True)
class Attribute:
    """A static property of an op instance.

    `default` is what instances have that do not set it; `since` the contract's minor that brought it; `choices` the
    values it may have, empty for any.
    """

    doc: str
    default: Any = None
    required: bool = False
    since: int = 0
    choices: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Tolerance:
    """How far a kernel may be from the reference: |a - b| <= atol + rtol * |b|."""

    atol: float
    rtol: float


@dataclass(frozen=True)
class WeightSpec:
    """What is known of a weight before it is loaded.

    Attributes:
        shape: logical shape.
        dtype: of a plain weight; for a quantized one the dtype it would dequantize to.
        scheme: None for a plain weight.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    scheme: QuantScheme | None = None


@dataclass(frozen=True)
class OpInstance:
    """One op at one place of one model, asked of every provider once, at build time.

    Attributes:
        op: contract name.
        where: place in the model ("layers.3.mlp.down_proj"), for people.
        attrs: every attribute of the contract, defaults filled in.
        dtype: activations' dtype.
        weights: by argument name, in the contract's order.
        wide_weights: those of the contract's weights that stay float32 whatever `dtype` is.
    """

    op: str
    where: str
    attrs: Mapping[str, Any]
    dtype: torch.dtype
    weights: Mapping[str, WeightSpec] = field(default_factory=dict)
    wide_weights: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sample:
    """One concrete call for tests: an instance, its weights, and the arguments of the kernel in order.

    `make` builds fresh arguments on the CPU (kernels may write into some of them).
    """

    instance: OpInstance
    weights: Mapping[str, Weight]
    make: Callable[[], tuple[Any, ...]]


@dataclass(frozen=True)
class OpContract:
    """One op, described.

    Attributes:
        name, version: identity; the major changes when an argument does.
        altitude: see above.
        signature: the kernel's Python signature with shapes, for people and docs.
        doc: meaning, with the source (paper or formula).
        attributes: by name.
        weights: names of the packed weights, in order; those ending in "?" may be absent.
        wide_weights: names of weights that stay float32 whatever the activations' dtype (tables, norms, biases of
            routers): a rounded rope table is wrong at long positions.
        mutates: arguments a kernel may write into.
        tolerance: by dtype of the activations.
        reference: `build(instance) -> Kernel` in plain PyTorch.
        samples: `samples(dtype) -> Sample...`, edge cases included; seeded.
        decomposition: for a block, the ops that stand in for it; one of them may be a block again.
    """

    name: str
    version: Version
    altitude: Altitude
    signature: str
    doc: str
    attributes: Mapping[str, Attribute]
    reference: Callable[[OpInstance], Kernel] | None
    samples: Callable[[torch.dtype], Iterable[Sample]]
    tolerance: Mapping[torch.dtype, Tolerance]
    weights: tuple[str, ...] = ()
    mutates: tuple[str, ...] = ()
    decomposition: tuple[str, ...] = ()
    wide_weights: tuple[str, ...] = ()

    def instance(
        self,
        where: str,
        dtype: torch.dtype,
        weights: Mapping[str, WeightSpec] | None = None,
        **attrs: Any,
    ) -> OpInstance:
        """Make an instance with defaults filled in.

        Raises ValueError for an unknown attribute, a missing required one, a value that is not among an attribute's
        choices, or a weight the contract does not name.
        """
        given = weights or {}
        names = [name.rstrip("?") for name in self.weights]
        unknown = attrs.keys() - self.attributes.keys()
        missing = {name for name, a in self.attributes.items() if a.required} - attrs.keys()
        strange = given.keys() - set(names)
        if unknown or missing or strange:
            raise ValueError(
                f"{self.name} at {where}: unknown attributes {sorted(unknown)}, missing {sorted(missing)}, "
                f"unknown weights {sorted(strange)}"
            )
        full = {name: attrs.get(name, attribute.default) for name, attribute in self.attributes.items()}
        for name, attribute in self.attributes.items():
            if attribute.choices and full[name] not in attribute.choices:
                raise ValueError(f"{self.name} at {where}: {name}={full[name]!r} is none of {attribute.choices}")
        ordered = {name: given[name] for name in names if name in given}
        return OpInstance(self.name, where, full, dtype, ordered, self.wide_weights)

    def minor_needed(self, instance: OpInstance) -> int:
        """The lowest minor version whose attributes can express `instance`."""
        used = (
            attribute.since
            for name, attribute in self.attributes.items()
            if instance.attrs.get(name, attribute.default) != attribute.default
        )
        return max(used, default=0)
