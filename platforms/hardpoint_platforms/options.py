"""Checking a platform's options against its manifest, before any of its code sees them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from hardpoint_platforms.errors import PlatformError
from hardpoint_platforms.manifest import Manifest, OptionSpec

_BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def validate_options(manifest: Manifest, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with defaults filled in. Text, as a command line gives it, is read as the option's type.

    Raises PlatformError that names the option, what was given and what is allowed.
    """
    known = manifest.options
    for name in options:
        if name not in known:
            raise _unknown(manifest, name)
    checked = {name: spec.default for name, spec in known.items() if spec.default is not None}
    for name, value in options.items():
        if value is not None:
            checked[name] = _check(manifest.name, known[name], value)
    return checked


def _check(platform: str, spec: OptionSpec, value: Any) -> Any:
    read = _read(spec.type, value)
    if read is None:
        raise _wrong(platform, spec, f"{value!r} is not of type {spec.type}")
    if spec.enum and read not in spec.enum:
        raise _wrong(platform, spec, f"{read!r} is not one of {', '.join(map(str, spec.enum))}")
    if spec.minimum is not None and not read >= spec.minimum:
        raise _wrong(platform, spec, f"{read} is below {spec.minimum:g}")
    if spec.maximum is not None and not read <= spec.maximum:
        raise _wrong(platform, spec, f"{read} is above {spec.maximum:g}")
    return read


def _read(kind: str, value: Any) -> Any:
    """The value as `kind`, None if it is none."""
    if kind == "string":
        return value if isinstance(value, str) else None
    if kind == "boolean":
        return value if isinstance(value, bool) else _BOOLEANS.get(str(value).lower())
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value) if kind == "number" else int(value) if isinstance(value, str) else value
    except ValueError:
        return None
    if kind == "integer" and not isinstance(number, int):
        return int(number) if number.is_integer() else None
    return number


def _unknown(manifest: Manifest, name: str) -> PlatformError:
    near = difflib.get_close_matches(name, manifest.options, n=1)
    known = "; ".join(spec.describe() for spec in manifest.options.values()) or "it takes none"
    return PlatformError(
        f"platform {manifest.name!r} has no option {name!r}",
        hint=(f"did you mean {near[0]!r}? " if near else "") + f"options: {known}",
    )


def _wrong(platform: str, spec: OptionSpec, what: str) -> PlatformError:
    return PlatformError(f"option {spec.name!r} of platform {platform!r}: {what}", hint=spec.describe())
