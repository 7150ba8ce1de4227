"""Groups of layers: how far each looks back, how many pages that costs, and the page table of each.

All groups draw pages of equal size from one pool. Column c of a table is the page of tokens
[c * page_tokens, (c + 1) * page_tokens). A full group keeps every column; a sliding group only those that a query can
still reach:

    window 5, page_tokens 4, next query at position 11

    position    0  1  2  3 | 4  5  6  7 | 8  9 10  11 | 12 ...
    column          0      |     1      |      2      |
    reached                          [7 . 8 . 9 .10 .11]
    page           0             p1           p2             column 0 slid out: its page is free, its entry is 0
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Windows = tuple[int | None, ...]

#: More columns than any sequence has; the answer where only sliding groups exist.
_UNBOUNDED = 1 << 27


def columns_of(tokens: int, page_tokens: int) -> int:
    """Columns that hold `tokens` tokens."""
    return -(-tokens // page_tokens)


def first_column(window: int | None, position: int, page_tokens: int) -> int:
    """The first column that a query at `position` still reads."""
    return 0 if window is None else max(0, position - window + 1) // page_tokens


def span_columns(window: int, chunk: int, page_tokens: int) -> int:
    """Most columns that `chunk` neighbouring queries touch: the window before the first of them, and themselves."""
    return columns_of(max(0, window + chunk - 2), page_tokens) + 1


def peak_pages(windows: Windows, page_tokens: int, tokens: int, chunk: int | None) -> int:
    """Pages that a sequence of `tokens` tokens holds at most when it is computed `chunk` at a time (None: at once)."""
    columns = columns_of(tokens, page_tokens)
    return sum(_group_columns(window, columns, chunk, page_tokens) for window in windows)


def capacity_tokens(windows: Windows, page_tokens: int, pages: int, chunk: int | None) -> int:
    """Longest sequence, in tokens, that `pages` pages can hold alone."""
    low, high = 0, _UNBOUNDED
    while low < high:
        middle = (low + high + 1) // 2
        if sum(_group_columns(window, middle, chunk, page_tokens) for window in windows) <= pages:
            low = middle
        else:
            high = middle - 1
    return 2**31 - 2 if low == _UNBOUNDED else low * page_tokens


def _group_columns(window: int | None, columns: int, chunk: int | None, page_tokens: int) -> int:
    if window is None or chunk is None:
        return columns
    return min(columns, span_columns(window, chunk, page_tokens))


class GroupTable:
    """The page table of one group: row r, column c -> page, 0 where none. Grows on demand.

    Attributes:
        window: tokens a query looks back, itself included; None for all.
        pages: int32 [rows, columns].
        starts: int32 [rows], first column still held.
    """

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.pages: Int32s = np.zeros((0, 0), np.int32)
        self.starts: Int32s = np.zeros(0, np.int32)

    def reserve(self, rows: int, columns: int) -> None:
        """Make room for that many rows and columns; grows by doubling."""
        have_rows, have_columns = self.pages.shape
        if rows <= have_rows and columns <= have_columns:
            return
        shape = (
            have_rows if rows <= have_rows else max(rows, 2 * have_rows),
            have_columns if columns <= have_columns else max(columns, 2 * have_columns),
        )
        pages = np.zeros(shape, np.int32)
        pages[:have_rows, :have_columns] = self.pages
        starts = np.zeros(shape[0], np.int32)
        starts[:have_rows] = self.starts
        self.pages, self.starts = pages, starts

    def put(self, row: int, column: int, pages: Sequence[int]) -> None:
        """Enter pages from `column` on."""
        self.pages[row, column : column + len(pages)] = pages

    def held(self, row: int, end: int) -> list[int]:
        """Pages of a row in the columns before `end` that are still held, in order."""
        held: list[int] = self.pages[row, self.starts[row] : end].tolist()
        return held

    def slide(self, row: int, column: int) -> list[int]:
        """Give up the columns before `column`; returns their pages, in order."""
        gone = self.held(row, column)
        self.pages[row, self.starts[row] : column] = 0
        self.starts[row] = column
        return gone

    def clear(self, row: int, end: int) -> list[int]:
        """Empty a row of `end` columns; returns the pages it held, in order."""
        gone = self.held(row, end)
        self.pages[row, :end] = 0
        self.starts[row] = 0
        return gone
