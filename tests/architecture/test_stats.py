"""What `make stats` counts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from stats import CHECKOUT, level_of_source, plugins, sources, table


@pytest.mark.parametrize(
    ("text", "depth", "level"),
    [
        ("class A(Device):\n    pass", 2, 0),
        ("class A(ProgramBuilder):\n    pass", 3, 3),
        ("class A(OpProvider):\n    op = 'linear'", 3, 1),
        ("class A(OpProvider):\n    op = 'attention'\nclass B(OpProvider):\n    op = 'mla_attention'", 3, 2),
        ("class A(OpProvider):\n    op = 'experts'", 2, 5),
        ("def help_kernels(): ...", 3, None),
        ("def find_chips(): ...", 2, 0),
        ("op = 'linear'", 3, None),
    ],
)
def test_a_file_counts_for_its_lowest_level(text: str, depth: int, level: int | None) -> None:
    assert level_of_source(text, depth) == level


def test_every_line_of_a_plugin_is_in_one_part(tmp_path: Path) -> None:
    (tmp_path / "p" / "ops").mkdir(parents=True)
    (tmp_path / "build").mkdir()
    (tmp_path / "p" / "device.py").write_text("class A(Device):\n    pass\n")
    (tmp_path / "p" / "ops" / "k.cpp").write_text("int x;\n")
    (tmp_path / "build" / "made.py").write_text("x = 1\n" * 50)
    found = {source.path: (source.part, source.lines, source.level) for source in sources(tmp_path)}
    assert found == {"p/device.py": ("p", 2, 0), "p/ops/k.cpp": ("p/ops", 1, None)}


def test_the_table_has_every_plugin_and_adds_up() -> None:
    text = "\n".join(table())
    assert plugins()
    for plugin in plugins():
        name = plugin.relative_to(CHECKOUT).as_posix()
        python = sum(source.lines for source in sources(plugin) if source.path.endswith(".py"))
        part = text.split(f"  {name}, of which")[1]
        levels = re.findall(r"L(\d) .*\(up to here ([\d,]+)\)", part)[:7]
        assert [number for number, _ in levels] == list("0123456")
        assert int(levels[-1][1].replace(",", "")) == python
    assert re.search(r"0  vendor words and 0 device checks", text), text
