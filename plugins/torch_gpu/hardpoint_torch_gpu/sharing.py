"""Decoding rows whose first pages are the same: who they are, and how the keys of these pages are cut for the GPU.

Requests with one system prompt share its pages. Their queries become tiles that read such keys once, and each row joins
what its tile found with what it finds among its other keys (Juravsky et al. 2024, arXiv:2402.05099; Ye et al. 2024,
arXiv:2402.15220).

    row  its pages        in the order of their pages, pages that neighbours have in common: 3 3 1
    0    7 8 9 4
    1    7 8 9 5          groups: rows 0, 1, 3 with three pages spare six reads, all four with one page three:
    2    7 2              the former, and row 2 stays alone
    3    7 8 9 6 1
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

#: Rows of a tile's left operand, members times query heads per head of keys: what tensor cores take at once.
TILE_ROWS = 64
#: Keys of a unit at least: below, its partial results outweigh its keys. Units end at multiples of `STEP` keys.
LEAST_KEYS, STEP = 256, 64
#: Units beyond one per tile: with 8 heads of keys they keep a large GPU busy (of 16 to 128 the fastest on an H200).
MORE_UNITS = 32
#: Numbers of a unit: members (0: none), place of the first in `members`, first key, key after the last, first slot.
UNIT_FIELDS = 5
#: Numbers of a row: keys it shares, slot of its first partial result, from there to its next one, how many it has.
OWN_FIELDS = 4


@dataclass(frozen=True, eq=False)
class Sharing:
    """Of one cache group in one step. Device tensors, int32.

    Attributes:
        own: [R, OWN_FIELDS]; zeros for a row that shares nothing.
        parts: [parts, PART_FIELDS], as in `GpuPlan`, of the keys behind those that a row shares.
        units: [units, UNIT_FIELDS], a tile with some of its keys; a partial result per member is left in slots.
        members: rows of the tiles, one tile's after another's; no longer than R.
        tile: members of a tile at most.
        saved: cached tokens that a layer need not read.
    """

    own: torch.Tensor
    parts: torch.Tensor
    units: torch.Tensor
    members: torch.Tensor
    tile: int
    saved: int

    @property
    def slots(self) -> int:
        """Partial results that there may be: units of a tile beyond its first are `MORE_UNITS` at most."""
        return len(self.members) + MORE_UNITS * self.tile


@dataclass(frozen=True, eq=False)
class Groups:
    """Rows that share pages: `rows` one group's after another's, `sizes` of the groups, `pages` that each shares."""

    rows: np.ndarray
    sizes: np.ndarray
    pages: np.ndarray


@dataclass(frozen=True, eq=False)
class HostSharing:
    """`own`, `units`, `members` and `saved` of a `Sharing`, int32 on the host."""

    own: np.ndarray
    units: np.ndarray
    members: np.ndarray
    saved: int


def tile_for(heads: int) -> int:
    """Most members of a tile where `heads` query heads share a head of keys; 2 or more."""
    return max(2, TILE_ROWS >> (heads - 1).bit_length())


def most_units(rows: int) -> int:
    """Units that so many rows can have: of three rows in a group with tiles of two there are two tiles."""
    return rows * 2 // 3 + MORE_UNITS


def find(table: np.ndarray, rows: np.ndarray, whole: np.ndarray, tile: int, least: int) -> Groups | None:
    """Groups of `rows` of a page table [R, P] that save most reads of pages; None where that is less than `least`.

    whole: [rows], leading pages that this step does not write. Every row is in one group at most.
    """
    first = np.where(whole > 0, table[rows, 0], 0)
    ordered = np.sort(first)
    if not ((ordered[1:] == ordered[:-1]) & (ordered[1:] > 0)).any():
        return None
    _, inverse, counts = np.unique(first, return_inverse=True, return_counts=True)
    several = np.flatnonzero((counts[inverse] > 1) & (first > 0))
    rows, whole = rows[several], whole[several]
    width = int(whole.max())
    if (len(rows) - 1) * width < least:
        return None
    pages = table[rows, :width]
    # What a row writes is nobody else's, and so is what lies behind.
    nobody = -1 - np.arange(len(rows), dtype=pages.dtype)
    pages = np.ascontiguousarray(np.where(np.arange(width) < whole[:, None], pages, nobody[:, None]))
    # Any order will do in which rows with equal first pages are neighbours: here that of their bytes.
    order = np.argsort(pages.view(np.dtype((np.void, pages.itemsize * width))).ravel(), kind="stable")
    pages = pages[order]
    same = (pages[1:] == pages[:-1]) & (pages[1:] > 0)
    lead = np.where(same.all(1), width, same.argmin(1))
    found = best_groups(lead, tile)
    firsts, sizes, depths = np.array(found, np.int64).reshape(-1, 3).T
    if _saved(sizes, depths, tile) < max(least, 1):
        return None
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return Groups(rows[order[np.repeat(firsts, sizes) + within]], sizes, depths)


def best_groups(lead: np.ndarray, tile: int) -> list[tuple[int, int, int]]:
    """(first row, rows, pages) of groups of neighbours that save most. lead: pages that row i and row i + 1 share.

    Neighbours that share `n` pages or more make a tree of intervals, of which each is a group or left to its parts:
    found in one pass with a stack (the intervals of Abouelhoda et al. 2004 over common prefixes).
    """
    stack: list[tuple[int, int, int, list[tuple[int, int, int]]]] = [(0, 0, 0, [])]
    # Where a number repeats the one before, nothing happens.
    turns = np.flatnonzero(np.diff(lead, prepend=-1)).tolist()
    for last, pages in zip((*turns, len(lead)), (*lead[turns].tolist(), 0), strict=True):
        left, saved, groups = last, 0, list[tuple[int, int, int]]()
        while stack[-1][0] > pages:
            depth, left, inner, parts = stack.pop()
            parts, inner, size = parts + groups, inner + saved, last - left + 1
            alone = depth * (size - -(-size // tile))
            saved, groups = (alone, [(left, size, depth)]) if alone >= inner else (inner, parts)
        if stack[-1][0] == pages:
            pages, left, inner, parts = stack.pop()
            saved, groups = inner + saved, parts + groups
        stack.append((pages, left, saved, groups))
    return stack[0][3]


def cut_tiles(groups: Groups, requests: int, page_tokens: int, tile: int, *, fixed: bool) -> HostSharing:
    """Tiles of the groups' rows, like in size within a group, and units of like numbers of keys.

    requests: R; fixed: as many units and members as that many rows can ever have.
    """
    tiles = -(-groups.sizes // tile)
    group, at = _spread(tiles)
    counts = groups.sizes[group] // tiles[group] + (at < groups.sizes[group] % tiles[group])
    keys = groups.pages[group] * page_tokens
    share = max(LEAST_KEYS, -(-int(keys.sum()) // MORE_UNITS))
    pieces = -(-keys // share)
    shares = -(-keys // (pieces * STEP)) * STEP
    pieces = -(-keys // shares)  # rounding a share up may leave its tile fewer of them
    places, slots = (np.cumsum(each) - each for each in (counts, counts * pieces))

    of, at = _spread(pieces)
    ends = np.minimum((at + 1) * shares[of], keys[of])
    units = np.zeros((most_units(requests) if fixed else len(of), UNIT_FIELDS), np.int32)
    units[: len(of)] = np.stack((counts[of], places[of], at * shares[of], ends, slots[of] + at * counts[of]), 1)

    of, at = _spread(counts)
    members = np.zeros(requests if fixed else len(of), np.int32)
    members[: len(of)] = groups.rows
    own = np.zeros((requests, OWN_FIELDS), np.int32)
    own[groups.rows] = np.stack((keys[of], slots[of] + at, counts[of], pieces[of]), 1)
    return HostSharing(own, units, members, _saved(groups.sizes, groups.pages, tile) * page_tokens)


def no_tiles(requests: int) -> HostSharing:
    """Of rows that share nothing, in the sizes of `fixed`."""
    units = np.zeros((most_units(requests), UNIT_FIELDS), np.int32)
    return HostSharing(np.zeros((requests, OWN_FIELDS), np.int32), units, np.zeros(requests, np.int32), 0)


def _saved(sizes: np.ndarray, pages: np.ndarray, tile: int) -> int:
    """Reads of pages: a tile reads them once, its members would each."""
    return int(((sizes - -(-sizes // tile)) * pages).sum())


def _spread(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each of counts[0] + counts[1] + ... things: which count it belongs to, and its number there."""
    of = np.repeat(np.arange(len(counts)), counts)
    return of, np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
