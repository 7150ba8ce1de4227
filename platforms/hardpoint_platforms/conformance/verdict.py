"""What a check comes to, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """What a check came to."""

    PASS = "pass"
    FAIL = "fail"
    REFUSED = "refused"  # the device said no, with a reason
    UNVERIFIED = "unverified"  # could not be tried here


@dataclass(frozen=True)
class Verdict:
    """One check on one device.

    Attributes:
        case: its id, what --case takes.
        group, contract, level, dtype, phase: where it stands in the tables; dtype and phase may be empty.
        status: what it came to; message: why, empty for a plain pass.
        error: largest |ours - reference|, where something was compared; tolerance: what was allowed at that place.
        seconds, reference_seconds: of one call, where one was timed.
        seed: of the run.
        blame: "file:line in function" of the plugin's code, where a check failed.
        repeat: command that runs this check alone.
        required: whether its level needs a pass of this contract from the device's own kernels.
    """

    case: str
    group: str
    contract: str
    level: int
    status: Status
    dtype: str = ""
    phase: str = ""
    message: str = ""
    error: float | None = None
    tolerance: float | None = None
    seconds: float | None = None
    reference_seconds: float | None = None
    seed: int = 0
    blame: str = ""
    repeat: str = ""
    required: bool = False

    @property
    def ratio(self) -> float | None:
        """Error over tolerance; above 1 is too far. None where nothing was compared."""
        if self.error is None or self.tolerance is None:
            return None
        if self.error == 0.0:
            return 0.0
        return self.error / self.tolerance if self.tolerance > 0.0 else float("inf")


@dataclass(frozen=True)
class Report:
    """A run of the kit.

    Attributes:
        device: "cpu:0"; name: what people call it; distribution, version: of the plugin.
        seed: of the run; asked: highest level that was run; partial: whether a filter left checks out.
        reached: level reached, -1 for none; None where the run was partial.
        next_step: what to do for the next level.
        seconds: of the whole run; machine: software and hardware it ran on.
    """

    device: str
    name: str
    distribution: str
    version: str
    seed: int
    asked: int
    partial: bool
    reached: int | None
    next_step: str
    verdicts: tuple[Verdict, ...]
    seconds: float
    machine: Mapping[str, str]

    def failures(self) -> tuple[Verdict, ...]:
        """Verdicts that failed, in order."""
        return tuple(verdict for verdict in self.verdicts if verdict.status is Status.FAIL)

    def as_json(self) -> dict[str, Any]:
        """Everything, as what json.dumps takes; infinities and NaN become text."""
        document = asdict(self)
        document["verdicts"] = [_plain(asdict(verdict)) for verdict in self.verdicts]
        document["counts"] = counts(self.verdicts)
        return document


def counts(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """How many of each status."""
    found = dict.fromkeys((status.value for status in Status), 0)
    for verdict in verdicts:
        found[verdict.status.value] += 1
    return found


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinities."""
    return {
        key: str(value) if (isinstance(value, float) and abs(value) in (float("inf"),)) or value != value else value
        for key, value in row.items()
    }
