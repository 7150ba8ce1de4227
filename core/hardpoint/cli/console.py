"""What the terminal sees: messages on stderr, results on stdout, colours only where a person looks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from hardpoint import env

if TYPE_CHECKING:
    from rich.console import Console

    from hardpoint_platforms.errors import HardpointError

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


def coloured(stream: TextIO) -> bool:
    """Whether colours may go to this stream: a terminal, and NO_COLOR unset."""
    return stream.isatty() and not env.NO_COLOR.read()


def paint(text: str, style: str, stream: TextIO | None = None) -> str:
    """`text` in a style (bold, dim, red, green, yellow, cyan) if the stream (stdout) shows it."""
    if not coloured(sys.stdout if stream is None else stream):
        return text
    return f"\033[{_CODES[style]}m{text}\033[0m"


def note(text: str = "") -> None:
    """A line for people, on stderr: stdout belongs to results."""
    print(text, file=sys.stderr, flush=True)


def show_error(error: HardpointError) -> None:
    """One message and, on a line of its own, what to do."""
    note(f"{paint('error:', 'red', sys.stderr)} {error.message}")
    if error.hint:
        note(f"  {paint('->', 'cyan', sys.stderr)} {error.hint}")


def rich_console(stream: TextIO | None = None) -> Console:
    """A rich console on stdout (or `stream`), imported only by commands that draw. Lines wrap on a terminal only."""
    from rich.console import Console

    target = sys.stdout if stream is None else stream
    on_terminal = target.isatty()
    return Console(
        file=target,
        no_color=not coloured(target),
        highlight=False,
        width=None if on_terminal else 240,
        force_terminal=on_terminal,
    )


def show_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    styles: Sequence[str | None] = (),
    right: Sequence[int] = (),
) -> None:
    """A table on stdout.

    styles: per row, or none. right: columns of numbers.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index in right else "left", overflow="fold")
    for index, row in enumerate(rows):
        style = styles[index] if index < len(styles) else None
        table.add_row(*(Text(cell) for cell in row), style=style or "")
    rich_console().print(table)


class ProgressLine:
    """A start-up phase and the share done, on one line of the terminal that is drawn over. Silent elsewhere.

    The phases of a start go on in another process; its `Progress` messages are fed in here.
    """

    WIDTH = 24

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._shown = ""

    def update(self, phase: str, done: float) -> None:
        """Draw the phase with `done` from 0 to 1."""
        filled = round(self.WIDTH * min(max(done, 0.0), 1.0))
        line = f"  {phase:<34} [{'#' * filled}{'.' * (self.WIDTH - filled)}] {done:4.0%}"
        if line != self._shown and self._stream.isatty():
            self._stream.write(f"\r\033[2K{line}")
            self._stream.flush()
            self._shown = line

    def clear(self) -> None:
        """Leave an empty line behind."""
        if self._shown:
            self._stream.write("\r\033[2K")
            self._stream.flush()
            self._shown = ""
