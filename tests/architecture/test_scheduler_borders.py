"""Scheduler, pager and requests are plain Python and numpy, by reading their imports: no torch, platform or server."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

CORE = Path(__file__).resolve().parents[2] / "core" / "hardpoint"
FORBIDDEN = ("torch", "transformers", "hardpoint_platforms", "hardpoint.server", "hardpoint.worker", "hardpoint.models")
#: The exception tree is torch-free and shared by everybody.
ALLOWED = ("hardpoint_platforms.errors",)


def imports(text: str) -> list[str]:
    """Every module that a source names in an import, at any depth."""
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
    return found


@pytest.mark.parametrize("folder", ["scheduler", "kv", "request", "protocol"])
def test_plain_python(folder: str) -> None:
    paths = sorted((CORE / folder).rglob("*.py"))
    assert paths
    bad = [
        f"{path.relative_to(CORE)} imports {module}"
        for path in paths
        for module in imports(path.read_text(encoding="utf-8"))
        if any(module == name or module.startswith(name + ".") for name in FORBIDDEN) and module not in ALLOWED
    ]
    assert not bad, "\n".join(bad)


def test_nothing_reads_a_global_platform() -> None:
    """No module keeps a current platform or device; it hangs off what is passed in."""
    bad = [
        f"{path.relative_to(CORE)}: {line.strip()}"
        for path in CORE.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("global ") or line.lstrip().startswith("global ") or "current_platform" in line
    ]
    assert not bad, "\n".join(bad)


def test_the_reader_sees_every_import() -> None:
    assert imports("import a.b\nfrom c import d\ndef f():\n    import e") == ["a.b", "c", "e"]
