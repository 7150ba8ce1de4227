"""What a check is: a named piece of work on the device under test that returns a measure or raises why not."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hardpoint_platforms.conformance.subject import Subject

_OTHERS = re.compile(r"[^A-Za-z0-9._]+")
#: Seconds after which a check counts as hung.
PATIENCE = 60.0


class Wrong(Exception):
    """The device does something else than the interface says.

    `subject_code` is an object of the plugin (kernel, method, class) whose place in the source is named; `place` is
    that place, where another process found it.
    """

    def __init__(
        self,
        message: str,
        *,
        subject_code: object = None,
        error: float | None = None,
        tolerance: float | None = None,
        place: str = "",
    ) -> None:
        super().__init__(message)
        self.subject_code = subject_code
        self.place = place
        self.error = error
        self.tolerance = tolerance


class Refused(Exception):
    """The device said no, with a reason."""


class Unverified(Exception):
    """This could not be tried here, with a reason."""


@dataclass(frozen=True)
class Measure:
    """What a check that passed has to tell; see `Verdict`."""

    message: str = ""
    error: float | None = None
    tolerance: float | None = None
    seconds: float | None = None
    reference_seconds: float | None = None


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        group, contract, name: make its id, with the dtype; level: of the ladder.
        body: does the work with the subject and a seed of its own. Raises Wrong, Refused or Unverified; anything else
            that it raises is the plugin's failure too.
        dtype, phase: columns of the matrix.
        required: its level needs at least one pass of this contract among the required checks.
        patience: seconds after which it counts as hung.
        beside: as its group says.
    """

    group: str
    contract: str
    name: str
    level: int
    body: Callable[[Subject, int], Measure]
    dtype: str = ""
    phase: str = ""
    required: bool = False
    patience: float = PATIENCE
    beside: bool = False

    @property
    def id(self) -> str:
        """ "ops/linear/q8_0/float32": what --case takes. Shells leave it alone."""
        parts = (self.group, self.contract, self.name, self.dtype)
        return "/".join(_OTHERS.sub("-", part).strip("-") for part in parts if part)

    def seed(self, run_seed: int) -> int:
        """This check's own seed in a run: the same whether it runs alone or among others."""
        return zlib.crc32(f"{run_seed}/{self.id}".encode())


#: Makes the checks of one group for a device.
CheckMaker = Callable[["Subject"], Iterable[Check]]


@dataclass(frozen=True)
class Group:
    """A group of checks.

    Attributes:
        title: for reports; made: yields the checks.
        beside: whether they may run beside others on the same device (--jobs): they neither look at its free memory nor
            use it up.
    """

    name: str
    title: str
    made: CheckMaker
    beside: bool = False
