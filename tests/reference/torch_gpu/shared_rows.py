"""Batches whose decoding rows share pages, as `PagedRows` makes those whose rows do not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hardpoint_platforms.batch import AttentionBatch


@dataclass(frozen=True)
class SharedRows:
    """Decoding rows in groups, one group's among the others', then prompts with nothing cached, then padding.

    Attributes:
        groups: of each (pages that it shares, tokens of each member behind these).
        prompts: new tokens of each.
        extra: requests and tokens of padding; width: pages of the tables, more than are needed.
    """

    groups: tuple[tuple[int, tuple[int, ...]], ...]
    prompts: tuple[int, ...] = ()
    page_tokens: int = 4
    extra: int = 0
    width: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch, padding included."""
        return sum(len(own) for _, own in self.groups) + sum(self.prompts) + self.extra

    @property
    def num_pages(self) -> int:
        """Pages that the pool needs, page 0 included."""
        own = [n for _, owns in self.groups for n in owns] + [*self.prompts]
        return 1 + sum(pages for pages, _ in self.groups) + sum(-(-n // self.page_tokens) for n in own)

    def batch(self, seed: int = 7) -> AttentionBatch:
        """The batch, its pages in random order."""
        random = np.random.default_rng(seed)
        free = list(1 + random.permutation(self.num_pages - 1))
        rows: list[tuple[list[int], int, int]] = []
        for pages, owns in self.groups:
            common = [free.pop() for _ in range(pages)]
            rows += [(common, pages * self.page_tokens + own, 1) for own in owns]
        rows = [rows[place] for place in random.permutation(len(rows))] + [([], n, n) for n in self.prompts]
        lengths = [length for _, length, _ in rows] + [0] * self.extra
        width = max([self.width, 1, *(-(-length // self.page_tokens) for length in lengths)])
        table, slots = np.zeros((len(lengths), width), np.int32), list[int]()
        for row, (common, length, new) in enumerate(rows):
            held = -(-length // self.page_tokens)
            table[row, :held] = [*common, *(free.pop() for _ in range(held - len(common)))]
            at = np.arange(length - new, length)
            slots += list(table[row, at // self.page_tokens] * self.page_tokens + at % self.page_tokens)
        slots += [place % self.page_tokens for place in range(self.extra)]
        return AttentionBatch(
            query_start=np.cumsum([0, *(new for _, _, new in rows), *[0] * self.extra]).astype(np.int32),
            sequence_lengths=np.array(lengths, np.int32),
            page_tables=(table,),
            slot_mapping=(np.array(slots, np.int32),),
            page_tokens=self.page_tokens,
            num_requests=len(rows),
            num_tokens=self.num_tokens - self.extra,
        )
