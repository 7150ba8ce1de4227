"""The manifest: what a plugin says about itself in `hardpoint.json`, read without importing any of its code.

The file lies in the top-level package of the entry point. One platform:

    {"manifest": "1.0", "name": "acme", "vendor": "Acme", "kind": "accelerator", "priority": 50,
     "interfaces": {"platform": "1.0", "device": "1.0", "ops": "1.0-1.2"},
     "options_schema": {"properties": {"threads": {"type": "integer", "minimum": 1, "description": "..."}}},
     "process_exclusive": ["acme-runtime"], "requires": ["acme_runtime"]}

Several platforms in one package: {"manifest": "1.0", "platforms": {"acme": {...}, "acme-sim": {...}}}.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from hardpoint_platforms.versioning import INTERFACES, Version, VersionRange

MANIFEST_FILE = "hardpoint.json"
OPTION_TYPES = ("string", "integer", "number", "boolean")
_KEYS = frozenset(
    [
        "manifest",
        "name",
        "vendor",
        "kind",
        "interfaces",
        "options_schema",
        "process_exclusive",
        "requires",
        "priority",
        "platforms",
    ]
)


class Kind(Enum):
    """What a platform runs on; `auto` looks at accelerators first, then at hosts, never at tests."""

    ACCELERATOR = "accelerator"
    HOST = "host"
    TEST = "test"


@dataclass(frozen=True)
class OptionSpec:
    """One option of a platform. `default` None means that the platform chooses."""

    name: str
    type: str
    description: str = ""
    default: Any = None
    enum: tuple[Any, ...] = ()
    minimum: float | None = None
    maximum: float | None = None

    def describe(self) -> str:
        """`threads (integer, at least 1): ...` on one line."""
        facts = [self.type]
        if self.enum:
            facts.append("one of " + ", ".join(map(str, self.enum)))
        if self.minimum is not None:
            facts.append(f"at least {self.minimum:g}")
        if self.maximum is not None:
            facts.append(f"at most {self.maximum:g}")
        if self.default is not None:
            facts.append(f"default {self.default}")
        return f"{self.name} ({', '.join(facts)})" + (f": {self.description}" if self.description else "")


@dataclass(frozen=True)
class Manifest:
    """Static facts of one platform.

    Attributes:
        version: of the manifest format.
        name: what people write after --device; equals the entry point's name.
        vendor: for people.
        kind: see `Kind`.
        interfaces: versions of each SPI interface that the plugin was written against.
        options: what `Platform.open` takes.
        process_exclusive: things of which one process can hold one (a runtime, a driver lock).
        requires: import names or requirements beyond the distribution's own metadata.
        priority: the highest wins among accelerators (or among hosts) under `auto`.
    """

    version: Version
    name: str
    vendor: str
    kind: Kind
    interfaces: Mapping[str, VersionRange]
    options: Mapping[str, OptionSpec] = field(default_factory=dict)
    process_exclusive: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    priority: int = 0


class UnknownManifestVersion(ValueError):
    """The manifest is written in a newer format than this release reads."""

    def __init__(self, version: Version) -> None:
        super().__init__(f"its manifest has format {version}, this release reads {INTERFACES['manifest']}")
        self.version = version


def read_manifest(package: str, name: str) -> Manifest:
    """The manifest of platform `name` in the top-level package `package`, which is located but not imported.

    Raises ModuleNotFoundError if there is no such package, ValueError for a missing or wrong manifest.
    """
    return parse_manifest(_read(package), name)


def parse_manifest(text: str, name: str) -> Manifest:
    """Read the text of a manifest. Raises ValueError that names the field at fault."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{MANIFEST_FILE} is not JSON: {error}") from None
    data = _expect(data, dict, "the whole file")
    version = _version(data)
    if "platforms" in data:
        platforms = _expect(data["platforms"], dict, "platforms")
        if name not in platforms:
            raise ValueError(f"{MANIFEST_FILE}: platforms has no {name!r}, it has {sorted(platforms)}")
        data = {"name": name} | _expect(platforms[name], dict, f"platforms.{name}")
    unknown = sorted(data.keys() - _KEYS)
    # A newer minor may have added fields; within the known minor an unknown one is a slip.
    if unknown and version <= INTERFACES["manifest"]:
        raise ValueError(f"{MANIFEST_FILE}: unknown fields {unknown}")
    if data.get("name") != name:
        raise ValueError(f"{MANIFEST_FILE}: name is {data.get('name')!r}, the entry point's name is {name!r}")
    return Manifest(
        version=version,
        name=name,
        vendor=_expect(data.get("vendor", ""), str, "vendor"),
        kind=_kind(data.get("kind")),
        interfaces=_interfaces(data.get("interfaces")),
        options=_options(data.get("options_schema", {})),
        process_exclusive=_strings(data.get("process_exclusive", []), "process_exclusive"),
        requires=_strings(data.get("requires", []), "requires"),
        priority=_expect(data.get("priority", 0), int, "priority"),
    )


def _read(package: str) -> str:
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    for folder in spec.submodule_search_locations or ():
        path = Path(folder) / MANIFEST_FILE
        if path.is_file():
            return path.read_text(encoding="utf-8")
        get_data = getattr(spec.loader, "get_data", None)
        if get_data is not None:
            try:  # a package inside a zip file
                return str(get_data(str(path)), encoding="utf-8")
            except OSError:
                continue
    raise ValueError(f"package {package!r} has no {MANIFEST_FILE}")


def _version(data: Mapping[str, Any]) -> Version:
    text = _expect(data.get("manifest"), str, "manifest")
    try:
        version = Version.parse(text)
    except ValueError as error:
        raise ValueError(f"{MANIFEST_FILE}: manifest: {error}") from None
    if version.major != INTERFACES["manifest"].major:
        raise UnknownManifestVersion(version)
    return version


def _kind(value: Any) -> Kind:
    try:
        return Kind(value)
    except ValueError:
        allowed = ", ".join(kind.value for kind in Kind)
        raise ValueError(f"{MANIFEST_FILE}: kind is {value!r}, not one of {allowed}") from None


def _interfaces(value: Any) -> dict[str, VersionRange]:
    ranges = {}
    for name, text in _expect(value, dict, "interfaces").items():
        try:
            ranges[name] = VersionRange.parse(_expect(text, str, f"interfaces.{name}"))
        except ValueError as error:
            raise ValueError(f"{MANIFEST_FILE}: interfaces.{name}: {error}") from None
    return ranges


def _options(schema: Any) -> dict[str, OptionSpec]:
    properties = _expect(
        _expect(schema, dict, "options_schema").get("properties", {}), dict, "options_schema.properties"
    )
    options = {}
    for name, raw in properties.items():
        where = f"options_schema.properties.{name}"
        facts = _expect(raw, dict, where)
        kind = facts.get("type")
        if kind not in OPTION_TYPES:
            raise ValueError(f"{MANIFEST_FILE}: {where}.type is {kind!r}, not one of {', '.join(OPTION_TYPES)}")
        options[name] = OptionSpec(
            name=name,
            type=kind,
            description=_expect(facts.get("description", ""), str, f"{where}.description"),
            default=facts.get("default"),
            enum=tuple(_expect(facts.get("enum", []), list, f"{where}.enum")),
            minimum=facts.get("minimum"),
            maximum=facts.get("maximum"),
        )
    return options


def _strings(value: Any, where: str) -> tuple[str, ...]:
    return tuple(_expect(item, str, where) for item in _expect(value, list, where))


def _expect(value: Any, kind: type, where: str) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{MANIFEST_FILE}: {where} must be {kind.__name__}, not {value!r:.60}")
    return value
