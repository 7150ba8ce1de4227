"""How far two results are apart, and whether a result has the form that the contract gives it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hardpoint_platforms.conformance.checks import Wrong
from hardpoint_platforms.ops.contract import Tolerance

#: Of products with quantized weights: |ours - reference| over |reference|, as Euclidean lengths. Activations that are
#: rounded to eight bits per group of at least 16 stay inside.
QUANTIZED_SHARE = 0.02


@dataclass(frozen=True)
class Distance:
    """The worst element: |ours - reference| there and what was allowed there."""

    error: float = 0.0
    tolerance: float = 0.0

    @property
    def ratio(self) -> float:
        if self.error == 0.0:
            return 0.0
        return self.error / self.tolerance if self.tolerance else float("inf")

    def worse(self, other: Distance) -> Distance:
        """The one that is farther out."""
        return other if other.ratio > self.ratio or (self.tolerance == 0.0 and other.tolerance) else self


def require_close(found: Any, wanted: Any, tolerance: Tolerance, code: object, what: str = "the result") -> Distance:
    """Compare trees of host tensors. Returns the worst distance; raises Wrong beyond the tolerance or the form."""
    worst = Distance()
    for place, ours, theirs in pairs(found, wanted, what, code):
        distance, where = _distance(ours, theirs, tolerance)
        worst = worst.worse(distance)
        if not distance.ratio <= 1.0:
            raise Wrong(
                f"{place} is off by {distance.error:.3g} at {where}, allowed is {distance.tolerance:.3g} "
                f"(ours {_at(ours, where)}, reference {_at(theirs, where)})",
                subject_code=code,
                error=distance.error,
                tolerance=distance.tolerance,
            )
    return worst


def require_near(found: Any, wanted: Any, code: object, share: float = QUANTIZED_SHARE) -> Distance:
    """Compare by length, for products that round their inputs. Raises Wrong."""
    worst = Distance()
    for place, ours, theirs in pairs(found, wanted, "the result", code):
        length = float(theirs.double().norm())
        error = float((ours.double() - theirs.double()).norm())
        worst = worst.worse(Distance(error, share * length))
        if not error <= share * length:
            raise Wrong(
                f"{place} differs by {error / (length or 1.0):.3g} of its length, allowed is {share:g} for "
                "quantized weights",
                subject_code=code,
                error=error,
                tolerance=share * length,
            )
    return worst


def require_equal(found: torch.Tensor, wanted: torch.Tensor, what: str, code: object = None) -> None:
    """Bit by bit, NaN equal to NaN. Raises Wrong."""
    _check_form(found, wanted, what, code)
    require_close(found, wanted, Tolerance(0.0, 0.0), code, what)


def pairs(found: Any, wanted: Any, what: str, code: object) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(place, ours, theirs) of every tensor. Raises Wrong where the trees differ in form."""
    if wanted is None:
        return
    if isinstance(wanted, torch.Tensor):
        _check_form(found, wanted, what, code)
        yield what, found, wanted
    elif isinstance(wanted, (tuple, list)):
        if not isinstance(found, (tuple, list)) or len(found) != len(wanted):
            raise Wrong(f"{what} is {_form(found)}, the contract returns {len(wanted)} values", subject_code=code)
        for index, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
            yield from pairs(ours, theirs, f"{what}[{index}]", code)
    elif dataclasses.is_dataclass(wanted):
        if type(found) is not type(wanted):
            raise Wrong(f"{what} is {_form(found)}, the contract returns {type(wanted).__name__}", subject_code=code)
        for part in dataclasses.fields(wanted):
            ours, theirs = getattr(found, part.name), getattr(wanted, part.name)
            yield from pairs(ours, theirs, f"{what}.{part.name}", code)
    else:
        raise TypeError(f"{what}: a reference returned {type(wanted).__name__}")


def _check_form(found: Any, wanted: torch.Tensor, what: str, code: object) -> None:
    if not isinstance(found, torch.Tensor):
        raise Wrong(f"{what} is {_form(found)}, not a tensor", subject_code=code)
    if found.shape != wanted.shape:
        shapes = f"{list(found.shape)}, the contract says {list(wanted.shape)}"
        raise Wrong(f"{what} has the shape {shapes}", subject_code=code)
    if found.dtype != wanted.dtype:
        raise Wrong(f"{what} is {found.dtype}, the contract says {wanted.dtype}", subject_code=code)


def _distance(ours: torch.Tensor, theirs: torch.Tensor, tolerance: Tolerance) -> tuple[Distance, tuple[int, ...]]:
    if ours.numel() == 0:
        return Distance(), ()
    if not theirs.dtype.is_floating_point:
        different = (ours != theirs).long()
        place = _unravel(int(different.argmax()), theirs.shape)
        return Distance(float(different.sum()), 0.0), place
    a, b = ours.double(), theirs.double()
    same = (a == b) | (a.isnan() & b.isnan())
    error = torch.where(same, 0.0, (a - b).abs()).nan_to_num(float("inf"), float("inf"))
    allowed = (tolerance.atol + tolerance.rtol * b.abs()).nan_to_num(0.0, 0.0)
    ratio = torch.where(same, 0.0, error / allowed.clamp(min=1e-300))
    place = _unravel(int(ratio.argmax()), theirs.shape)
    return Distance(float(error[place]), float(allowed[place])), place


def _unravel(index: int, shape: torch.Size) -> tuple[int, ...]:
    place = []
    for size in reversed(shape):
        place.append(index % size)
        index //= size
    return tuple(reversed(place))


def _at(tensor: torch.Tensor, place: tuple[int, ...]) -> str:
    value = tensor[place].item() if tensor.numel() else None
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _form(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"{len(value)} values"
    return f"{value!r:.40} ({type(value).__name__})"
