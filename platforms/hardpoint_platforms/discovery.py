"""Finding platform plugins, and loading one without letting it break the others.

    discover()        entry points and manifests are read; no plugin code runs
    registry.load()   one plugin is imported, registered with pluggy and validated
    registry.probe()  it looks for its devices

Whatever goes wrong with a plugin is kept as a `PluginError` under its name. It is raised where that plugin is asked
for, and shown by `doctor`; it is never raised anywhere else.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import importlib_metadata
from packaging.utils import canonicalize_name

from hardpoint_platforms.errors import DeviceUnavailable, PluginError
from hardpoint_platforms.hookspecs import GROUP
from hardpoint_platforms.manifest import Manifest, UnknownManifestVersion, read_manifest
from hardpoint_platforms.requirements import MissingRequirement, unmet
from hardpoint_platforms.versioning import INTERFACES, REQUIRED_INTERFACES, VersionRange, offers

if TYPE_CHECKING:
    from hardpoint_platforms.platform import Platform, ProbeResult

_SPI = "hardpoint-platforms"


@dataclass(frozen=True)
class PlatformEntry:
    """One announced platform.

    Attributes:
        name: what people write after --device.
        distribution, version: of the installed package that announces it.
        value: the entry point, "module" or "module:object".
        manifest: None if it could not be read.
        problem: why it cannot be used, found without importing it; None if nothing is known against it.
    """

    name: str
    distribution: str
    version: str
    value: str
    manifest: Manifest | None = None
    problem: PluginError | None = None


class PlatformRegistry:
    """The platforms of this environment. Owns what was loaded; safe to use from several threads."""

    def __init__(self, entries: Iterable[PlatformEntry]) -> None:
        self.entries: Mapping[str, PlatformEntry] = {entry.name: entry for entry in entries}
        self._loaded: dict[str, Platform | PluginError | DeviceUnavailable] = {}
        self._loading: set[str] = set()
        self._lock = threading.RLock()

    def entry(self, name: str) -> PlatformEntry:
        """The entry called `name`. Raises DeviceUnavailable, with what there is instead."""
        if name in self.entries:
            return self.entries[name]
        near = difflib.get_close_matches(name, self.entries, n=1)
        listed = ", ".join(sorted(self.entries)) or "none"
        raise DeviceUnavailable(
            f"no platform is called {name!r}; installed are: {listed}",
            hint=f"did you mean --device {near[0]}?" if near else f"pip install the plugin that brings {name!r}",
        )

    def load(self, name: str) -> Platform:
        """Import the plugin's code, once, and return its platform.

        Raises PluginError if it cannot be used, DeviceUnavailable if there is no such platform or if the plugin says
        that this is not its machine. Later calls give the same answer.
        """
        with self._lock:
            if name not in self._loaded:
                self._loaded[name] = self._load(self.entry(name))
            outcome = self._loaded[name]
        if isinstance(outcome, (PluginError, DeviceUnavailable)):
            raise outcome
        return outcome

    def probe(self, name: str) -> ProbeResult:
        """Load the platform and look for its devices. Raises as `load`; PluginError if the probe itself fails."""
        from hardpoint_platforms.validation import check_probe

        platform = self.load(name)
        entry = self.entry(name)
        with guard(entry, "probe", "probe() failed", f"run `hardpoint doctor` and see {entry.distribution}'s manual"):
            return check_probe(entry, platform.probe())

    def _load(self, entry: PlatformEntry) -> Platform | PluginError | DeviceUnavailable:
        from hardpoint_platforms.validation import load_platform

        if entry.problem is not None:
            return entry.problem
        if entry.name in self._loading:
            return plugin_error(entry, "import", "asks for itself while it is being loaded")
        self._loading.add(entry.name)
        try:
            platform = load_platform(entry)
        except PluginError as error:
            return error
        finally:
            self._loading.discard(entry.name)
        if platform is None:
            return DeviceUnavailable(f"platform {entry.name!r} ({entry.distribution}) says: not my machine")
        return platform


def discover() -> PlatformRegistry:
    """Enumerate the entry points of group `hardpoint.platforms` and check them, importing nothing."""
    found: dict[str, list[PlatformEntry]] = {}
    for entry, requires in _announced():
        found.setdefault(entry.name, []).append(_check(entry, requires))
    return PlatformRegistry(entries[0] if len(entries) == 1 else _conflict(entries) for entries in found.values())


def plugin_error(entry: PlatformEntry, cause: str, message: str, hint: str | None = None) -> PluginError:
    """A PluginError that names distribution and version."""
    return PluginError(entry.name, cause, f"{entry.distribution} {entry.version}: {message}", hint=hint)


@contextlib.contextmanager
def guard(entry: PlatformEntry, cause: str, doing: str, hint: str) -> Iterator[None]:
    """Run plugin code: what it prints goes to stderr, what it raises (SystemExit too) becomes a PluginError."""
    try:
        with stdout_to_stderr():
            yield
    except PluginError:
        raise
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        told = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise plugin_error(entry, cause, f"{doing}: {told}", hint) from error


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Keep stdout clean for machine-readable output, also from native code that writes to descriptor 1."""
    sys.stdout.flush()
    try:
        saved = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # no such descriptors: a daemon closed them
        with contextlib.redirect_stdout(sys.stderr):
            yield
        return
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def _announced() -> Iterator[tuple[PlatformEntry, list[str]]]:
    """Entry points and their distribution's requirements. Of two copies on sys.path the first counts."""
    seen: set[str] = set()
    for candidate in importlib_metadata.distributions():
        try:
            # Most have no such line; parsing everybody's metadata takes a second.
            if GROUP not in (candidate.read_text("entry_points.txt") or ""):
                continue
            name = candidate.metadata["Name"]
            if not name or canonicalize_name(name) in seen:
                continue
            seen.add(canonicalize_name(name))
            distribution = importlib_metadata.distribution(name)
            announced = list(distribution.entry_points.select(group=GROUP))
            version, requires = distribution.version, distribution.requires
        except Exception:
            # Metadata too broken to say that it is a plugin: pip's business, not ours.
            continue
        for point in announced:
            yield PlatformEntry(point.name, name, version, point.value), list(requires or ())


def _check(entry: PlatformEntry, requires: list[str]) -> PlatformEntry:
    package = entry.value.partition(":")[0].strip().partition(".")[0]
    again = f"pip install --force-reinstall {entry.distribution}"
    try:
        manifest = read_manifest(package, entry.name)
    except ModuleNotFoundError:
        message = f"its package {package!r} is not there"
        return replace(entry, problem=plugin_error(entry, "import", message, again))
    except UnknownManifestVersion as error:
        mend = _mend(entry, newer=error.version > INTERFACES["manifest"])
        return replace(entry, problem=plugin_error(entry, "version", f"{error} ({_SPI} {_spi_version()})", mend))
    except (ValueError, OSError, ImportError) as error:
        hint = f"{again}; if that does not help, tell its authors"
        return replace(entry, problem=plugin_error(entry, "manifest", str(error), hint))
    problem = check_versions(entry, manifest) or _check_requirements(entry, [*requires, *manifest.requires])
    return replace(entry, manifest=manifest, problem=problem)


def check_versions(
    entry: PlatformEntry, manifest: Manifest, offered: Mapping[str, VersionRange] | None = None
) -> PluginError | None:
    """Why a plugin with this manifest cannot run with a release that offers `offered`; None where it can.

    `offered` is this release's own offer if None. Interfaces that the release does not know are passed over: it makes
    no calls of them.
    """
    missing = [name for name in REQUIRED_INTERFACES if name not in manifest.interfaces]
    if missing:
        message = f"its manifest does not state the interface versions of {', '.join(missing)}"
        return plugin_error(entry, "manifest", message, f"pip install --upgrade {entry.distribution}")
    ours = offers() if offered is None else offered
    refused = [
        (name, spoken)
        for name, spoken in manifest.interfaces.items()
        if name in ours and not spoken.accepts(ours[name])
    ]
    if not refused:
        return None
    told = "; ".join(f"it speaks {name} {spoken}, this release offers {ours[name]}" for name, spoken in refused)
    newer = all(spoken.lowest > ours[name].highest for name, spoken in refused)
    return plugin_error(entry, "version", f"{told} ({_SPI} {_spi_version()})", _mend(entry, newer))


def _mend(entry: PlatformEntry, newer: bool) -> str:
    """What to install, the plugin being newer than this release or older."""
    if newer:
        return f"pip install --upgrade {_SPI} hardpoint   (or an older {entry.distribution} than {entry.version})"
    return f"pip install --upgrade {entry.distribution}   (or an older {_SPI} than {_spi_version()})"


def _check_requirements(entry: PlatformEntry, requires: list[str]) -> PluginError | None:
    missing = unmet(requires)
    if not missing:
        return None
    message = "; ".join(map(str, missing))
    return plugin_error(entry, "dependency", message, _mend_requirements(entry, missing))


def _mend_requirements(entry: PlatformEntry, missing: list[MissingRequirement]) -> str:
    if any(m.name in (_SPI, "hardpoint") for m in missing):
        return f"pip install --upgrade {entry.distribution}   (it was built for another release of Hardpoint)"
    return "pip install " + " ".join(f"'{m.requirement}'" for m in missing)


def _conflict(entries: list[PlatformEntry]) -> PlatformEntry:
    claims = " and ".join(sorted(f"{entry.distribution} {entry.version}" for entry in entries))
    first = entries[0]
    error = PluginError(
        first.name,
        "conflict",
        f"{claims} both claim this name",
        hint="pip uninstall " + "   or   pip uninstall ".join(sorted(e.distribution for e in entries)),
    )
    kinds = [entry for entry in entries if entry.manifest is not None]
    return replace(kinds[0] if kinds else first, distribution=claims, version="", problem=error)


def _spi_version() -> str:
    try:
        return importlib_metadata.version(_SPI)
    except importlib_metadata.PackageNotFoundError:
        return "unknown"
