"""Releases of another day: copies of the sources with other versions, built as wheels."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from fresh import CHECKOUT, build_wheel

from hardpoint.cli.plugin import package_of, write
from hardpoint_platforms.versioning import INTERFACES

#: What this release offers.
DEVICE = INTERFACES["device"]
TINY_MODELS = CHECKOUT / "tests" / "reference" / "cases"


def copied(folder: str, into: Path) -> Path:
    """A copy of one of our distributions' sources."""
    target = into / folder.replace("/", "-")
    ignored = shutil.ignore_patterns("build", "dist", "__pycache__", "*.egg-info")
    shutil.copytree(CHECKOUT / folder, target, ignore=ignored)
    return target


def edit(path: Path, *changes: tuple[str, str]) -> None:
    """Replace pieces of a file, each of which is there exactly once."""
    text = path.read_text(encoding="utf-8")
    for old, new in changes:
        assert text.count(old) == 1, f"{path}: {old!r} is there {text.count(old)} times"
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


def newer_spi_and_core(sources: Path, out: Path) -> None:
    """Release 0.9: platform 2.0, which still serves 1.x, `device` a minor later, and linear 1.1.

    Its new attribute is set by the core for every down projection.
    """
    spi, core = copied("platforms", sources), copied("core", sources)
    for folder in (spi, core):
        edit(folder / "pyproject.toml", ('\nversion = "0.1.0"\n', '\nversion = "0.9.0"\n'))
    package = spi / "hardpoint_platforms"
    edit(
        package / "versioning.py",
        ('"platform": Version(1, 0)', '"platform": Version(2, 0)'),
        (f'"device": Version(1, {DEVICE.minor})', f'"device": Version(1, {DEVICE.minor + 1})'),
    )
    edit(
        package / "ops" / "linear.py",
        ("version=Version(1, 0),", "version=Version(1, 1),"),
        (
            '"bias": Attribute(',
            '"streamed": Attribute("whether the weight is read but once per step", False, since=1),\n        '
            '"bias": Attribute(',
        ),
    )
    edit(
        core / "hardpoint" / "layers" / "linear.py",
        (
            '"bias": self.bias is not None}',
            '"bias": self.bias is not None, "streamed": self.path.endswith("down_proj")}',
        ),
    )
    build_wheel(spi, out)
    build_wheel(core, out)


def plugin(
    name: str,
    sources: Path,
    out: Path,
    version: str = "0.1.0",
    interfaces: Mapping[str, str] | None = None,
    manifest: str | None = None,
    importable: bool = True,
) -> None:
    """What `hardpoint plugin new NAME` writes today, with another version, other ranges, another manifest format.

    Not `importable`: whoever imports it gets a SystemExit.
    """
    folder = sources / name
    write(name, folder)
    package = folder / package_of(name)
    path = package / "hardpoint.json"
    facts = json.loads(path.read_text(encoding="utf-8"))
    facts["interfaces"] |= interfaces or {}
    facts["manifest"] = manifest or facts["manifest"]
    path.write_text(json.dumps(facts), encoding="utf-8")
    if not importable:
        (package / "__init__.py").write_text('raise SystemExit("imported")\n', encoding="utf-8")
    edit(folder / "pyproject.toml", ('version = "0.1.0"', f'version = "{version}"'))
    build_wheel(folder, out)


def tiny_llama(folder: Path) -> Path:
    """A model of two layers with random weights."""
    if str(TINY_MODELS) not in sys.path:
        sys.path.insert(0, str(TINY_MODELS))
    from tiny_models import llama_config, random_weights, save_llama

    config = llama_config()
    return save_llama(folder, config, random_weights(config))
