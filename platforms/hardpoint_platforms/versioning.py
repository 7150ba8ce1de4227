"""Interface versions and the ranges that plugins declare.

Every SPI interface has its own `major.minor`. A minor only adds (a new field has a default, a new method an
implementation); a major may take away. A plugin's manifest states, per interface, the lowest and the highest version
that it was written against; the check runs before any of its code is imported.

A release serves two majors of an interface: the newest and the one before it. A major that has a successor gets no
more minors, so whoever serves it serves all of its minors:

    plugin speaks    release offers    they meet at
    1.0-1.2          1.0-1.4           1.2            newer minors only add
    1.3              1.0-1.2           nowhere        the plugin needs what this release has not
    1.0-1.2          1.0-2.1           1.2            the older major is still served
    1.0-2.3          1.0-2.1           2.1            the plugin reaches down
    1.2              2.0-3.0           nowhere        the plugin's major is no longer served
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass


@functools.total_ordering
@dataclass(frozen=True, slots=True)
class Version:
    """`major.minor` of an interface or of an op contract."""

    major: int
    minor: int

    @classmethod
    def parse(cls, text: str) -> Version:
        """Read "1.4". Raises ValueError for anything else."""
        major, dot, minor = text.partition(".")
        if not (dot and major.isdigit() and minor.isdigit()):
            raise ValueError(f"{text!r} is not a version of the form major.minor")
        return cls(int(major), int(minor))

    def __lt__(self, other: Version) -> bool:
        return (self.major, self.minor) < (other.major, other.minor)

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


@dataclass(frozen=True, slots=True)
class VersionRange:
    """The versions of one interface that a plugin speaks, both ends included."""

    lowest: Version
    highest: Version

    @classmethod
    def parse(cls, text: str) -> VersionRange:
        """Read "1.0-1.3" or "1.0". Raises ValueError for anything else."""
        low, dash, high = text.partition("-")
        lowest = Version.parse(low)
        highest = Version.parse(high) if dash else lowest
        if highest < lowest:
            raise ValueError(f"{text!r} ends before it starts")
        return cls(lowest, highest)

    def meet(self, offered: VersionRange) -> Version | None:
        """The newest version that a plugin with this range and a release that offers `offered` both know.

        None where there is none. `offered` is from the oldest version served, which ends in .0, to the newest.
        """
        if self.lowest > offered.highest or self.highest.major < offered.lowest.major:
            return None
        return min(self.highest, offered.highest)

    def accepts(self, offered: VersionRange) -> bool:
        """Whether a release that offers `offered` can drive a plugin with this range."""
        return self.meet(offered) is not None

    def __str__(self) -> str:
        return str(self.lowest) if self.lowest == self.highest else f"{self.lowest}-{self.highest}"


#: The newest version of each interface that this release of hardpoint-platforms offers.
INTERFACES: Mapping[str, Version] = {
    "manifest": Version(1, 0),
    "platform": Version(1, 0),
    "device": Version(1, 1),
    "ops": Version(1, 1),
    "attention": Version(1, 0),
    "state_cache": Version(1, 0),
    "streams": Version(1, 0),
    "sampling": Version(1, 0),
    "program": Version(1, 1),
    "communication": Version(1, 0),
    "kv_transfer": Version(1, 0),
}

#: The oldest major of each interface that this release still serves; never more than one below the newest.
OLDEST: Mapping[str, int] = dict.fromkeys(INTERFACES, 1)

#: A manifest must state these; the others it states only where it implements them.
REQUIRED_INTERFACES = ("platform", "device")


def offers(newest: Mapping[str, Version] = INTERFACES, oldest: Mapping[str, int] = OLDEST) -> dict[str, VersionRange]:
    """What a release serves of each interface, from the first minor of its oldest major to the newest version."""
    return {name: VersionRange(Version(oldest[name], 0), version) for name, version in newest.items()}
