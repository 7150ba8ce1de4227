"""Documentation that a reader can follow: links lead somewhere, and every command line is one that the parser takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from hardpoint.cli.main import COMMANDS, parse
from hardpoint.errors import ConfigError

CHECKOUT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "core/*.md", "platforms/*.md", "plugins/*/*.md")
    for page in CHECKOUT.glob(pattern)
)
IDS = [page.relative_to(CHECKOUT).as_posix() for page in PAGES]


def links(text: str) -> list[str]:
    """Relative targets of Markdown links, anchors cut off."""
    outside_code = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", outside_code)
    return [target.split("#")[0] for target in targets if not re.match(r"\w+:|#", target)]


def command_lines(text: str) -> Iterator[list[str]]:
    """Each `hardpoint ...` in fenced blocks and inline code, as words; comments and shell operators cut off."""
    blocks = re.findall(r"```(?:sh|bash|shell|console|text)?\n(.*?)```", text, flags=re.DOTALL)
    inline = re.findall(r"(?<!`)`((?:\$ )?hardpoint [^`\n]+)`(?!`)", text)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()] + inline
    for line in lines:
        for part in re.split(r"&&|\|\||[|;>]", re.sub(r"^\s*\$ ", "", line)):
            words = part.strip()
            if re.match(r"(?:\.venv/bin/)?hardpoint(?: |$)", words):
                yield shlex.split(words, comments=True)[1:]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_to_files(page: Path) -> None:
    broken = [target for target in links(page.read_text(encoding="utf-8")) if not (page.parent / target).exists()]
    assert not broken, f"{page.name}: {broken}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_command_lines_parse(page: Path) -> None:
    for words in command_lines(page.read_text(encoding="utf-8")):
        if not words or any(mark in " ".join(words) for mark in ("...", "…", "MODEL", "NAME")):
            continue
        if words[0].startswith("-"):
            assert words[0] in ("--help", "--version"), words
        elif "--help" in words:
            assert words[0] in COMMANDS, words
        else:
            try:
                parse(words)
            except ConfigError as error:
                named_alone = len(words) == 1 and "are required" in error.message
                if named_alone or (words[-1].startswith("--") and "expected one argument" in error.message):
                    continue  # the text speaks of the command or the option; it is no line to type
                pytest.fail(f"{page.name}: hardpoint {' '.join(words)}: {error}")


def test_the_readers_see_links_and_commands() -> None:
    text = "[a](b/c.md#d) [w](https://x.y) `hardpoint serve x`\n```sh\n$ hardpoint run m 'a b' | cat  # c\nmake\n```\n"
    assert links(text) == ["b/c.md"]
    assert sorted(command_lines(text)) == [["run", "m", "a b"], ["serve", "x"]]


def test_the_readme_shows_commands() -> None:
    words = list(command_lines((CHECKOUT / "README.md").read_text(encoding="utf-8")))
    assert any(line[:1] == ["serve"] for line in words)
