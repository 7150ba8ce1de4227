"""What the device `strict` raises: each error says which rule was broken, where, and what to write instead."""

from __future__ import annotations

from hardpoint_platforms.errors import PlatformError


class StrictViolation(PlatformError):
    """A rule of static-shape devices was broken by the step, by a kernel, or by the core."""


class StaleState(StrictViolation):
    """A state handle was used after a step, an op or a page operation had taken it."""


class HostReadBack(StrictViolation):
    """A value or a tensor went to the host inside a step."""


class DynamicShape(StrictViolation):
    """A shape that depends on data."""


class HiddenRandomness(StrictViolation):
    """A generator with a state of its own inside a step."""


class ForbiddenWrite(StrictViolation):
    """A write in place that a compiler drops, or that changes what belongs to the caller."""


class ForeignTensor(StrictViolation):
    """A tensor that is not on the device, or was not passed to the step."""


class SignatureChanged(StrictViolation):
    """A program got inputs of another form than those it was prepared with, or than its bucket promises."""


class UnplannedProgram(StrictViolation):
    """A program was built after serving began, or run before it was prepared."""
