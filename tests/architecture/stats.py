"""`make stats`: lines of code per part of each plugin and per level of the ladder, and the leaks of neutral code.

A file counts for the lowest level of what it defines: an op's provider for the level of that op, a Device for level 0,
a ProgramBuilder for level 3. What defines none of these is shared by the kernels of its folder.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from leaks import CHECKOUT, NEUTRAL, all_device_checks, all_vendor_words

from hardpoint_platforms.conformance.ladder import LEVELS, level_of

#: Base class of the SPI -> the level that asks for it.
BASES: Mapping[str, int] = {
    "Platform": 0,
    "Device": 0,
    "AttentionPlanner": 2,
    "StateCache": 2,
    "DenseStateCache": 2,
    "ProgramBuilder": 3,
    "Communicator": 4,
    "KVTransfer": 6,
}
SUFFIXES = (".py", ".cpp", ".cc", ".cu", ".c", ".h", ".hpp", ".inc")
SHARED = "shared by its kernels"


@dataclass(frozen=True)
class Source:
    """A source file of a plugin.

    Attributes:
        path: inside the plugin's folder; part: the folder of it.
        lines: all of them, comments and empty ones too.
        level: of the ladder; None for what is shared.
    """

    path: str
    part: str
    lines: int
    level: int | None


def plugins() -> list[Path]:
    """The folders of the plugins in this checkout."""
    return sorted(path.parent for path in (CHECKOUT / "plugins").glob("*/pyproject.toml"))


def sources(plugin: Path) -> Iterator[Source]:
    """The source files of one plugin, without what was built and without tests."""
    for path in sorted(plugin.rglob("*")):
        inside = path.relative_to(plugin)
        if path.suffix in SUFFIXES and path.is_file() and not {"build", "tests", "check"} & set(inside.parts):
            text = path.read_text(encoding="utf-8")
            level = level_of_source(text, len(inside.parts)) if path.suffix == ".py" else None
            yield Source(inside.as_posix(), inside.parent.as_posix(), len(text.splitlines()), level)


def level_of_source(text: str, depth: int) -> int | None:
    """The level that a Python file counts for; None where it is shared. `depth` 2 is the package's own folder."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            found += [BASES[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in BASES]
            found += [level_of(op) for op in _ops(node)]
    return min(found, default=0 if depth <= 2 else None)


def python_lines(folder: Path) -> int:
    """Lines of the Python files in a folder."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*.py"))


def table() -> list[str]:
    """What `make stats` prints."""
    lines = [f"{python_lines(CHECKOUT / folder):>7,}  {folder}" for folder in NEUTRAL]
    for plugin in plugins():
        found = list(sources(plugin))
        lines += [
            "",
            f"{sum(source.lines for source in found):>7,}  {plugin.relative_to(CHECKOUT)}, of which per folder",
        ]
        parts: dict[str, int] = defaultdict(int)
        for source in found:
            parts[source.part] += source.lines
        lines += [f"{count:>11,}  {part}" for part, count in parts.items()]
        python = [source for source in found if source.path.endswith(".py")]
        shared = sum(source.lines for source in python if source.level is None)
        lines += ["         of its Python, per level of `hardpoint conformance`", f"{shared:>11,}  {SHARED}"]
        total = 0
        for level in LEVELS:
            here = sum(source.lines for source in python if source.level == level.number)
            total += here
            lines.append(f"{here:>11,}  L{level.number} {level.title} (up to here {total + shared:,})")
    template = CHECKOUT / "core" / "hardpoint" / "cli" / "plugin_template"
    written = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in template.glob("*.py.template"))
    return [*lines, "", f"{written:>7,}  Python of a new plugin (`hardpoint plugin new`)", "", *leak_lines()]


def leak_lines() -> list[str]:
    """The two counts, and where they are not 0 the places."""
    words, checks = all_vendor_words(), all_device_checks()
    told = f"{len(words):>7,}  vendor words and {len(checks)} device checks in neutral code (0 allowed)"
    return [told, *(f"         {leak}" for leak in (*words, *checks))]


def _ops(node: ast.ClassDef) -> Iterator[str]:
    for line in node.body:
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str):
            for target in line.targets:
                if isinstance(target, ast.Name) and target.id == "op":
                    yield line.value.value


if __name__ == "__main__":
    print("\n".join(table()))
