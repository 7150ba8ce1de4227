"""Contracts: activation functions, plain and gated."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hardpoint_platforms.ops.contract import Altitude, Attribute, OpContract, Sample
from hardpoint_platforms.ops.samples import POINTWISE, sample
from hardpoint_platforms.reference.activation import FUNCTIONS, build_activation, build_gated_activation
from hardpoint_platforms.versioning import Version

KINDS = tuple(FUNCTIONS)

KIND = Attribute(
    "silu; gelu (exact); gelu_tanh; gelu_quick = x sigmoid(1.702 x); relu; relu2 = relu(x)^2; sigmoid; tanh; softplus",
    required=True,
    choices=KINDS,
)
#: Attributes of whatever gates: min(gate, limit), clamp(up, -limit, limit), up + up_offset.
GATE = {
    "limit": Attribute("largest gate value and absolute up value, None for no limit"),
    "up_offset": Attribute("added to the up half", 0.0),
}


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    for kind in KINDS:
        yield sample(ACTIVATION, kind, dtype, lambda s: (s.normal(5, 33, dtype=dtype, scale=4.0),), kind=kind)


def _gated_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for kind in KINDS:
        yield sample(GATED_ACTIVATION, kind, dtype, lambda s: (s.normal(5, 66, dtype=dtype, scale=4.0),), kind=kind)
    yield sample(
        GATED_ACTIVATION,
        "limit and offset",
        dtype,
        lambda s: (s.normal(1, 48, dtype=dtype, scale=8.0),),
        kind="gelu_quick",
        limit=7.0,
        up_offset=1.0,
    )


ACTIVATION = OpContract(
    name="activation",
    version=Version(1, 0),
    altitude=Altitude.PRIMITIVE,
    signature="activation(x: [...]) -> [...]",
    doc="A function of each element.",
    attributes={"kind": KIND},
    reference=build_activation,
    samples=_samples,
    tolerance=POINTWISE,
)

GATED_ACTIVATION = OpContract(
    name="gated_activation",
    version=Version(1, 0),
    altitude=Altitude.COMPOSITE,
    signature="gated_activation(x: [..., 2F]) -> [..., F]",
    doc="activation(gate) * up (Shazeer 2020): the first half of the last dimension is the gate, the second is up.",
    attributes={"kind": KIND, **GATE},
    reference=build_gated_activation,
    samples=_gated_samples,
    tolerance=POINTWISE,
)
