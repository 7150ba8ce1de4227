"""Start a device plugin of your own: `new NAME` writes a whole distribution that installs and serves at once.

It has a manifest, a platform, a device, one example kernel, tests, a CI file and a README; the host stands in for the
chip, and every op without a kernel runs on its reference.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from string import Template

from hardpoint.cli import console
from hardpoint.config.arguments import Parser
from hardpoint.errors import ConfigError

#: Template -> the file it becomes. `$package` in a path is the import package.
FILES: Mapping[str, str] = {
    "pyproject.toml.template": "pyproject.toml",
    "README.md.template": "README.md",
    "gitignore.template": ".gitignore",
    "ci.yml.template": ".github/workflows/ci.yml",
    "manifest.json.template": "$package/hardpoint.json",
    "init.py.template": "$package/__init__.py",
    "platform.py.template": "$package/platform.py",
    "device.py.template": "$package/device.py",
    "linear.py.template": "$package/linear.py",
    "test_plugin.py.template": "tests/test_$package.py",
}
#: A word of --device.
RESERVED = frozenset({"auto"})
LONGEST_NAME = 40
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `hardpoint plugin`."""
    actions = parser.add_subparsers(dest="action", metavar="new", parser_class=Parser, required=True)
    new = actions.add_parser("new", help="write a new plugin", description="Write the distribution of a new plugin.")
    new.add_argument("name", metavar="NAME", help="what people will write after --device: a-z, 0-9, single hyphens")
    new.add_argument(
        "--into", type=Path, metavar="FOLDER", help="folder to create and write to (default: ./NAME-hardpoint)"
    )


def execute(args: argparse.Namespace) -> int:
    """Check the name, write the files, say what comes next."""
    check_name(args.name)
    folder = Path(f"{args.name}-hardpoint") if args.into is None else args.into
    for path in write(args.name, folder):
        print(f"wrote {folder / path}")
    print()
    print(console.paint("Next", "bold"))
    for command in next_commands(args.name, folder):
        print(f"  {command}")
    return 0


def check_name(name: str) -> None:
    """Raise ConfigError where `name` cannot name a platform, or where an installed one or a package has it already."""
    if len(name) > LONGEST_NAME or not _NAME.fullmatch(name):
        better = re.sub(r"[^a-z0-9]+", "-", name.lower()).lstrip("0123456789-")[:LONGEST_NAME].rstrip("-")
        raise ConfigError(
            f"{name!r} cannot name a plugin: it takes a-z, 0-9 and single hyphens, begins with a letter and has at "
            f"most {LONGEST_NAME} characters",
            hint=f"for example `hardpoint plugin new {'acme' if not better or better in RESERVED else better}`",
        )
    if name in RESERVED:
        raise ConfigError(
            f"--device {name} has a meaning of its own; no plugin can have that name", hint="take another"
        )
    from hardpoint_platforms.discovery import discover

    entry = discover().entries.get(name)
    if entry is not None:
        raise ConfigError(
            f"the platform {name!r} is installed already, by {entry.distribution} {entry.version}",
            hint="take another name; `hardpoint doctor` lists those that are taken",
        )
    package = package_of(name)
    if importlib.util.find_spec(package) is not None:
        raise ConfigError(f"a package {package!r} can be imported here already", hint="take another name")


def package_of(name: str) -> str:
    """The import package of the plugin: "acme-npu" -> "acme_npu_hardpoint"."""
    return name.replace("-", "_") + "_hardpoint"


def write(name: str, folder: Path) -> list[str]:
    """Write the distribution into `folder`, which must not exist, whole or not at all.

    Returns the paths inside of it. Raises ConfigError where the folder exists or cannot be made.
    """
    if folder.exists() or folder.is_symlink():
        raise ConfigError(f"{folder} exists already; nothing was written", hint="name a new folder with --into FOLDER")
    written = render(name)
    parent = folder.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=parent))
        try:
            for path, text in written.items():
                target = draft / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text, encoding="utf-8")
            draft.chmod(0o755)  # mkdtemp makes it private
            draft.rename(folder.absolute())
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot write {folder}: {error.strerror or error}", hint="name another place with --into FOLDER"
        ) from error
    return list(written)


def render(name: str) -> dict[str, str]:
    """Path -> text of every file of the plugin `name`."""
    values = _values(name)
    source = files("hardpoint.cli") / "plugin_template"
    return {
        Template(path).substitute(values): Template((source / template).read_text(encoding="utf-8")).substitute(values)
        for template, path in FILES.items()
    }


def next_commands(name: str, folder: Path) -> tuple[str, str, str]:
    """What to type next, in the folder where `hardpoint plugin new` was typed."""
    place = str(folder) if folder.is_absolute() else f"./{folder}"
    return (
        f"pip install {shlex.quote(place)}",
        "hardpoint doctor",
        f"hardpoint pull smollm2 && hardpoint serve smollm2 --device {name}",
    )


def _values(name: str) -> dict[str, str]:
    """What the placeholders stand for. The new plugin speaks the interfaces of the SPI that is installed."""
    import importlib_metadata
    from packaging.version import Version

    from hardpoint_platforms.versioning import INTERFACES

    spi = Version(importlib_metadata.version("hardpoint-platforms"))
    words = [word.capitalize() for word in name.split("-")]
    return {
        "name": name,
        "distribution": f"{name}-hardpoint",
        "package": package_of(name),
        "prefix": "".join(words),
        "title": " ".join(words),
        "spi": f"{spi.major}.{spi.minor}",
        "next_spi": str(spi.major + 1),
        **{f"{interface}_version": str(version) for interface, version in INTERFACES.items()},
    }
