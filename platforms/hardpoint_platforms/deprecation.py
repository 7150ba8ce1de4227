"""What of the SPI goes with the next major: plugins that still write it get a warning under their own name.

Within a major nothing is taken away. What will go is listed here first, for as long as that major is the newest; a
plugin that overrides it works as before and gets a DeprecationWarning that names its distribution, its line, and what
to write instead. Python hides such warnings from users; pytest shows them, and so does `python -W default`.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hardpoint_platforms.versioning import Version

if TYPE_CHECKING:
    from hardpoint_platforms.discovery import PlatformEntry

_OURS = __name__.partition(".")[0]


@dataclass(frozen=True)
class Deprecation:
    """One name that plugins should no longer write.

    Attributes:
        interface: as manifests call it ("device").
        owner: class that has the name ("Device"); name: of the method, property, class attribute or field.
        since: version of the interface that put something better beside it.
        removed: the first version without it; a major, because minors only add.
        instead: what to write, as the end of a sentence ("override `to_device`").
    """

    interface: str
    owner: str
    name: str
    since: Version
    removed: Version
    instead: str

    def __post_init__(self) -> None:
        if self.removed.minor or self.removed.major <= self.since.major:
            raise ValueError(
                f"{self.owner}.{self.name}: deprecated since {self.since}, it may go with a later major, "
                f"not with {self.removed}"
            )


#: Nothing yet: every interface is in its first major.
DEPRECATED: tuple[Deprecation, ...] = ()


def warn_overrides(
    entry: PlatformEntry, subject: object, interface: type, table: Iterable[Deprecation] | None = None
) -> None:
    """Warn of each deprecated name of `interface` that the class of `subject` defines itself.

    Where `interface` is a dataclass: of each deprecated field that `subject` has away from its default. `table` is
    DEPRECATED if None. Where warnings are made errors, raises DeprecationWarning.
    """
    for old in DEPRECATED if table is None else table:
        if old.owner != interface.__name__:
            continue
        if _sets_field(subject, old.name):
            _warn(entry, old, old.owner, entry.value, 0)
        for writer in _writers(type(subject), interface):
            if old.name in vars(writer):
                _warn(entry, old, writer.__name__, *_place(vars(writer)[old.name], writer))
                break


def _sets_field(subject: object, name: str) -> bool:
    if not dataclasses.is_dataclass(subject) or isinstance(subject, type):
        return False
    found = {field.name: field for field in dataclasses.fields(subject)}.get(name)
    if found is None:
        return False
    made = found.default_factory
    default = found.default if made is dataclasses.MISSING else made()
    return bool(getattr(subject, name) != default)


def _writers(kind: type, interface: type) -> list[type]:
    """The classes between `kind` and `interface` that are not the SPI's own."""
    above = kind.__mro__[: kind.__mro__.index(interface)] if interface in kind.__mro__ else kind.__mro__
    return [writer for writer in above if writer.__module__.partition(".")[0] not in (_OURS, "builtins")]


def _warn(entry: PlatformEntry, old: Deprecation, writer: str, file: str, line: int) -> None:
    message = (
        f"{entry.distribution} {entry.version}: {writer}.{old.name} is deprecated since "
        f"{old.interface} {old.since} and goes with {old.interface} {old.removed}; {old.instead} instead"
    )
    warnings.warn_explicit(message, DeprecationWarning, file, line, module=entry.value)


def _place(written: object, writer: type) -> tuple[str, int]:
    """File and line of what was written, or of the class where it has none."""
    inner = written.fget if isinstance(written, property) else getattr(written, "__func__", written)
    for candidate in (inner, writer):
        try:
            return inspect.getsourcefile(candidate) or "?", inspect.getsourcelines(candidate)[1]  # type: ignore[arg-type]
        except (TypeError, OSError):
            continue
    return writer.__module__, 0
