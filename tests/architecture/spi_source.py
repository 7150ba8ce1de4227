"""Reads a source file of the SPI and writes what it says in Markdown. Nothing is imported.

A class gives its docstring, a table of its fields (the docstring's `Attributes:` and comments at line ends), and its
methods; those of classes that plugins derive from are marked `required` or `default`.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[2] / "platforms" / "hardpoint_platforms"


class Module:
    """A parsed source file."""

    def __init__(self, name: str) -> None:
        self.name = name
        path = PACKAGE.joinpath(*name.split(".")).with_suffix(".py")
        self.lines = path.read_text(encoding="utf-8").splitlines()
        tree = ast.parse("\n".join(self.lines))
        self.doc = ast.get_docstring(tree) or ""
        self.classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        self.functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        self.values = {name: node for node in tree.body for name in _targets(node)}

    def comment_above(self, node: ast.stmt) -> str:
        """The `#:` lines right above a statement."""
        end = start = node.lineno - 1
        while start and self.lines[start - 1].startswith("#:"):
            start -= 1
        return " ".join(line.removeprefix("#:").strip() for line in self.lines[start:end])

    def comment_behind(self, node: ast.stmt) -> str:
        """The comment at the end of a statement's last line."""
        line = self.lines[(node.end_lineno or node.lineno) - 1][node.end_col_offset or 0 :]
        return line.partition("#")[2].strip()

    def section(self, name: str) -> str:
        """The part of a page that is about `name`: a class, a function or a value."""
        if name in self.classes:
            return _class(self, self.classes[name])
        place = f"`hardpoint_platforms.{self.name}`"
        if name in self.functions:
            node = self.functions[name]
            return f"## {name}\n\n{place}\n\n```python\n{_signature(node)}\n```\n\n{ast.get_docstring(node) or ''}"
        statement, text = self.values[name], ast.unparse(self.values[name])
        code = text if len(text) < 120 else text.partition(" = ")[0]
        return f"## {name}\n\n{place}\n\n```python\n{code}\n```\n\n{self.comment_above(statement)}"


def _class(module: Module, node: ast.ClassDef) -> str:
    bases = [ast.unparse(base) for base in node.bases]
    data = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
    written = "ABC" in bases or (module.name == "streams" and not bases)  # whose defaults are whole already
    kind = "frozen dataclass" if data else "plugins derive from it" if written else ", ".join(bases) or "class"
    doc, attributes = _split(ast.get_docstring(node) or "")
    parts = [f"## {node.name}", f"`hardpoint_platforms.{module.name}` · {kind}", doc, _fields(module, node, attributes)]
    methods = []
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and not item.name.startswith("_") and ast.get_docstring(item):
            methods.append(_method(item, written))
    return "\n\n".join(part for part in [*parts, *methods] if part)


def _method(node: ast.FunctionDef, marked: bool) -> str:
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    marks = [word for word in ("property", "classmethod") if word in decorators]
    if marked:
        marks.append("required" if "abstractmethod" in decorators else "default")
    head = f"### {node.name}" + (f" · {', '.join(marks)}" if marks else "")
    return f"{head}\n\n```python\n{_signature(node)}\n```\n\n{ast.get_docstring(node)}"


def _signature(node: ast.FunctionDef) -> str:
    """As it is called: without `self`; a property as `name: type`."""
    returns = ast.unparse(node.returns) if node.returns else ""
    if any(ast.unparse(decorator) == "property" for decorator in node.decorator_list):
        return f"{node.name}: {returns}"
    given = node.args
    values = [None] * (len(given.args) - len(given.defaults)) + list(given.defaults)
    arguments = [_argument(one, value) for one, value in zip(given.args, values, strict=True)]
    if given.kwarg:
        arguments.append("**" + _argument(given.kwarg, None))
    arguments = [argument for argument in arguments if argument not in ("self", "cls")]
    line = f"{node.name}({', '.join(arguments)})" + (f" -> {returns}" if returns else "")
    if len(line) <= 110:
        return line
    return "\n".join([f"{node.name}(", *(f"    {argument}," for argument in arguments), f") -> {returns}"])


def _argument(given: ast.arg, value: ast.expr | None) -> str:
    told = given.arg + (f": {ast.unparse(given.annotation)}" if given.annotation else "")
    return told if value is None else f"{told} = {ast.unparse(value)}"


def _fields(module: Module, node: ast.ClassDef, attributes: Mapping[str, str]) -> str:
    rows = []
    for item in node.body:
        for name in _targets(item):
            if name.startswith("_"):
                continue
            kind = ast.unparse(item.annotation) if isinstance(item, ast.AnnAssign) else ""
            value = getattr(item, "value", None)
            rows.append((name, kind, _default(value), attributes.get(name) or module.comment_behind(item)))
    if not rows:
        return ""
    head: tuple[str, ...] = ("field", "type", "default", "meaning")
    if not any(kind for _, kind, _, _ in rows):
        head, rows = ("value", "is", "meaning"), [(name, value, doc) for name, _, value, doc in rows]
    if not any(row[-1] for row in rows):
        return table(head[:-1], [row[:-1] for row in rows], prose=False)
    return table(head, rows)


def _default(value: ast.expr | None) -> str:
    if value is None:
        return ""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        factory = next((k for k in value.keywords if k.arg == "default_factory"), None)
        return f"{ast.unparse(factory.value)}()" if factory else ""
    return ast.unparse(value)


def table(head: tuple[str, ...], rows: Sequence[Sequence[Any]], code: bool = True, prose: bool = True) -> str:
    """A Markdown table. `code`: cells are code, but for those of the last column where it is `prose`."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [f"`{cell}`" if code and cell else str(cell) for cell in row]
        if prose:
            cells[-1] = str(row[-1])
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(lines)


def _split(doc: str) -> tuple[str, dict[str, str]]:
    """A docstring without its `Attributes:` section, and that section by name."""
    match = re.search(r"^(?:Class attributes|Attributes):\n((?:    .*\n?|\n)+)", doc, flags=re.MULTILINE)
    if match is None:
        return doc, {}
    found: dict[str, str] = {}
    section = re.sub(r"\n     +", " ", textwrap.dedent(match[1]).strip().replace("\n    ", "\n     "))
    for line in section.splitlines():
        # "a, b: text; c: text" holds two entries.
        for part in re.split(r"[;.] (?=[a-z_]+(?:, [a-z_]+)*: )", line):
            names, _, text = part.partition(": ")
            text = text if ". " in text else text.removesuffix(".")
            for name in names.split(", "):
                found[name] = f"{found[name]}; {text}" if name in found else text
    return (doc[: match.start()] + doc[match.end() :]).strip(), found


def _targets(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []
