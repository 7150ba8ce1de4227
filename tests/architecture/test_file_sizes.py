"""Files and functions stay small enough to read; names say what a file owns."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGES = ("core/hardpoint", "platforms/hardpoint_platforms", "plugins/cpu/hardpoint_cpu")

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_INIT_LINES = 120

#: Path -> why it may be longer.
LONG_FILES: dict[str, str] = {}
#: "path:function" -> why it may be longer.
LONG_FUNCTIONS: dict[str, str] = {}

#: A module is a noun that completes "this file owns ...".
FORBIDDEN_MODULES = {"utils", "util", "common", "helpers", "helper", "misc", "core", "stuff", "manager", "manager2"}


def sources(*folders: str) -> Iterator[Path]:
    """Every Python file of these folders of the checkout."""
    for folder in folders:
        for path in sorted((CHECKOUT / folder).rglob("*.py")):
            if "__pycache__" not in path.parts:
                yield path


def name(path: Path) -> str:
    """Relative to the checkout, for messages."""
    return path.relative_to(CHECKOUT).as_posix()


def functions(text: str) -> list[tuple[str, int]]:
    """(name, lines) of every function, decorators and docstring counted."""
    return [
        (node.name, (node.end_lineno or node.lineno) - node.lineno + 1)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_files_are_short() -> None:
    paths = [*sources(*PACKAGES), *sources("tests")]
    assert len(paths) > 50
    long = {name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    too_long = {
        path: lines
        for path, lines in long.items()
        if lines > (MAX_INIT_LINES if path.endswith("__init__.py") else MAX_FILE_LINES) and path not in LONG_FILES
    }
    assert not too_long, f"split by owner, or list with a reason in source_py: {too_long}"


def test_functions_are_short() -> None:
    too_long = [
        f"{name(path)}:{function} has {lines} lines"
        for path in sources(*PACKAGES)
        for function, lines in functions(path.read_text(encoding="utf-8"))
        if lines > MAX_FUNCTION_LINES and f"{name(path)}:{function}" not in LONG_FUNCTIONS
    ]
    assert not too_long, "\n".join(too_long)


def test_modules_are_nouns() -> None:
    bad = [name(path) for path in sources(*PACKAGES) if path.stem in FORBIDDEN_MODULES]
    assert not bad, f"name what the file owns: {bad}"


def test_exceptions_are_needed() -> None:
    for path in LONG_FILES:
        lines = len((CHECKOUT / path).read_text(encoding="utf-8").splitlines())
        assert lines > MAX_FILE_LINES, f"{path} is short now; take it off the list"
    for entry in LONG_FUNCTIONS:
        path, _, function = entry.rpartition(":")
        sizes = dict(functions((CHECKOUT / path).read_text(encoding="utf-8")))
        assert sizes[function] > MAX_FUNCTION_LINES, f"{entry} is short now; take it off the list"


def test_no_package_marker_under_tests() -> None:
    """Distributions that tests build (tests/vendor) have packages; tests have none."""
    vendor = CHECKOUT / "tests" / "vendor"
    assert not [path for path in (CHECKOUT / "tests").rglob("__init__.py") if vendor not in path.parents]


@pytest.mark.parametrize(("lines", "expected"), [(3, 3), (61, 61)])
def test_function_length_counts(lines: int, expected: int) -> None:
    text = "def f():\n" + "    x = 1\n" * (lines - 1)
    assert functions(text) == [("f", expected)]
