"""From rows of the sequence table to the `SamplingInputs` of one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from hardpoint.worker.sequence_table import SequenceTable
from hardpoint_platforms.batch import LogitBias, Penalties, SamplingInputs
from hardpoint_platforms.device import Device
from hardpoint_platforms.program import BIAS_ENTRIES, TOP_LOGPROBS, SamplingShape

Int64s = npt.NDArray[np.int64]
#: Bad words, and tokens before their last one, that are compared at once where shapes are fixed.
_WORDS_AT_ONCE, _PREFIX_AT_ONCE = 32, 8


@dataclass(frozen=True)
class _Word:
    """A bad word of one draw: which draw, its row, the place of its token, and the word's tokens."""

    index: int
    row: int
    position: int
    tokens: tuple[int, ...]


class SamplingBatchBuilder:
    """Builds sampling inputs. While the same rows decode step after step, only positions and history are made anew."""

    def __init__(self, device: Device, table: SequenceTable) -> None:
        self._device = device
        self._table = table
        self._history = device.routine(_history)
        self._matches = device.routine(_matches)
        self._banned = device.routine(_banned)
        self._every = self._put(np.ones(_WORDS_AT_ONCE, np.bool_))
        self._key: tuple[int, bytes] | None = None
        self._flags: tuple[bool, bool, bool, int | None] = (True, False, False, None)
        self._refresh(np.zeros(0, np.int64))

    def shape(self, rows: npt.NDArray[np.int32]) -> SamplingShape:
        """The lowest shape that serves the draws of these rows."""
        table = self._table
        special = [held for held in (table.bias, table.min_tokens, table.bad_words, table.allowed) if held]
        if (
            table.has_penalties[rows].any()
            or (table.logprobs[rows] >= 0).any()
            or any(row in held for held in special for row in rows.tolist())
        ):
            return SamplingShape.FULL
        return SamplingShape.DRAW if table.temperature[rows].any() else SamplingShape.GREEDY

    def build(
        self, rows: Int64s, positions: Int64s, placed: torch.Tensor, shape: SamplingShape = SamplingShape.ANY
    ) -> SamplingInputs:
        """Inputs of `shape`, which serves these rows.

        rows, positions: int64 [R], the row of each draw and the place in its sequence that the drawn token takes.
        placed: the positions on the device.
        """
        table = self._table
        key = (table.version, rows.tobytes())
        if key != self._key:
            self._refresh(rows)
            self._key = key
        greedy, filters, penalties, num_logprobs = self._flags
        full = shape is SamplingShape.FULL
        constrained = bool(table.bias or table.min_tokens or table.bad_words) or full
        if shape in (SamplingShape.GREEDY, SamplingShape.DRAW):
            # What rows of padding, or rows that draw nothing yet, would want is left out.
            drawing = shape is SamplingShape.DRAW
            return SamplingInputs(*self._static, placed, all_greedy=not drawing, filters=drawing)
        size = len(rows) * BIAS_ENTRIES if full else None
        return SamplingInputs(
            *self._static,
            placed,
            penalties=self._penalties(rows, positions, whole=full) if penalties or full else None,
            bias=self._bias(rows, positions, size) if constrained else None,
            allowed=self._allowed(rows, always=full) if table.allowed or full else None,
            num_logprobs=TOP_LOGPROBS if full else num_logprobs,
            all_greedy=greedy and not full,
            filters=filters or full,
        )

    def _refresh(self, rows: Int64s) -> None:
        table = self._table
        fields = (table.temperature, table.top_k, table.top_p, table.min_p, table.seeds)
        temperature, top_k, top_p, min_p, seeds = self._device.upload([torch.from_numpy(v[rows]) for v in fields])
        self._static = (temperature, top_k, top_p, min_p, seeds)
        most = int(table.logprobs[rows].max(initial=-1))
        self._flags = (
            not table.temperature[rows].any(),
            bool(table.has_filters[rows].any()),
            bool(table.has_penalties[rows].any()),
            None if most < 0 else most,
        )

    def _penalties(self, rows: Int64s, positions: Int64s, whole: bool) -> Penalties:
        """History as long as the longest row needs, or `whole`: as long as any row may come to need."""
        table = self._table
        lengths = np.where(table.has_penalties[rows], positions, 0)
        longest = table.max_len if whole else int(lengths.max(initial=1))
        fields = (table.prompt_lengths, table.presence, table.frequency, table.repetition)
        there, used, *values = self._device.upload(
            [torch.from_numpy(v) for v in (rows, lengths, *(f[rows] for f in fields))]
        )
        return Penalties(self._history(table.tokens, there, used, longest, table.vocab_size), *values)

    def _bias(self, rows: Int64s, positions: Int64s, size: int | None) -> LogitBias | None:
        """Bias entries of the batch: logit_bias, the ends that min_tokens forbids, and bad words.

        size: entries to pad to, those added change nothing; None for as many as there are.
        """
        entries = list(self._entries(rows, positions))
        words = self._words(rows, positions)
        count = sum(len(ids) for _, ids, _ in entries) + len(words)
        if not count and size is None:
            return None
        place, token = np.zeros(size or count, np.int64), np.zeros(size or count, np.int64)
        value = np.zeros(size or count, np.float32)
        start = 0
        for index, ids, amounts in entries:
            here = slice(start, start + len(ids))
            place[here], token[here], value[here] = index, ids, amounts
            start += len(ids)
        for at, word in enumerate(words, start):
            place[at], token[at] = word.index, word.tokens[-1]
        there = LogitBias(*self._device.upload([torch.from_numpy(v) for v in (place, token, value)]))
        if not words and not self._table.static:
            return there
        return replace(there, values=self._ban(there.values, words, start))

    def _entries(self, rows: Int64s, positions: Int64s) -> Iterator[tuple[int, Int64s, npt.NDArray[np.float32]]]:
        """(draw, tokens, amounts) of what the host alone decides."""
        table = self._table
        for index, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            if row in table.bias:
                yield index, *table.bias[row]
            if row in table.min_tokens:
                least, ends = table.min_tokens[row]
                if position - int(table.prompt_lengths[row]) < least:
                    yield index, ends, np.full(len(ends), -np.inf, np.float32)

    def _words(self, rows: Int64s, positions: Int64s) -> list[_Word]:
        """Bad words that the output is long enough to end with."""
        table = self._table
        return [
            _Word(index, row, position, word)
            for index, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True))
            for word in table.bad_words.get(row, ())
            if len(word) - 1 <= position - int(table.prompt_lengths[row])
        ]

    def _ban(self, values: torch.Tensor, words: Sequence[_Word], first: int) -> torch.Tensor:
        """`values` with the last token of each bad word banned where the sequence ends with the tokens before it.

        first: place of the first word among the values. The comparison runs on the device, since the host may not know
        the newest token yet; where shapes are fixed some words and some tokens of each at a time, and at least once.
        """
        static, width = self._table.static, max((len(word.tokens) for word in words), default=1) - 1
        many, wide = (_WORDS_AT_ONCE, _PREFIX_AT_ONCE) if static else (len(words), max(width, 1))
        for start in range(0, max(len(words), 1), many):
            some = words[start : start + many]
            match = self._every if static else self._put(np.ones(many, np.bool_))
            for column in range(0, max(width, 1), wide):
                match = self._matches(self._table.tokens, match, *self._columns(some, many, column, wide))
            places = np.zeros(many, np.int64)
            places[: len(some)] = np.arange(first + start, first + start + len(some))
            values = self._banned(values, self._put(places), match)
        return values

    def _columns(self, words: Sequence[_Word], many: int, column: int, wide: int) -> tuple[torch.Tensor, ...]:
        """Rows [many], places and wanted tokens [many, wide] of part of the words' prefixes. Padding never matches."""
        prefix, where = np.full((many, wide), -1, np.int64), np.zeros((many, wide), np.int64)
        prefix[len(words) :] = self._table.vocab_size
        rows = np.zeros(many, np.int64)
        for i, word in enumerate(words):
            before = len(word.tokens) - 1
            part = word.tokens[:-1][column : column + wide]
            rows[i], prefix[i, : len(part)] = word.row, part
            where[i, : len(part)] = np.arange(
                word.position - before + column, word.position - before + column + len(part)
            )
        return self._device.upload([torch.from_numpy(v) for v in (rows, where, prefix)])

    def _allowed(self, rows: Int64s, always: bool) -> torch.Tensor | None:
        allowed = self._table.allowed
        if not always and not any(row in allowed for row in rows.tolist()):
            return None
        free = np.full(-(-self._table.vocab_size // 32), -1, np.int32)
        return self._put(np.stack([allowed.get(row, free) for row in rows.tolist()]))

    def _put(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        return self._device.to_device(torch.from_numpy(values))


def _history(
    tokens: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, longest: int, unused: int
) -> torch.Tensor:
    """int64 [R, longest]: the first `lengths` tokens of each row, then `unused`."""
    history = tokens[rows][:, :longest].long()
    behind = torch.arange(longest, device=history.device) >= lengths[:, None]
    return history.masked_fill(behind, unused)


def _matches(
    tokens: torch.Tensor, so_far: torch.Tensor, rows: torch.Tensor, where: torch.Tensor, wanted: torch.Tensor
) -> torch.Tensor:
    """bool [K]: `so_far` and whether each row has the wanted tokens [K, W] where it says; below 0 any token will do."""
    seen = tokens[rows[:, None], where].long()
    return so_far & ((seen == wanted) | (wanted < 0)).all(-1)


def _banned(values: torch.Tensor, places: torch.Tensor, match: torch.Tensor) -> torch.Tensor:
    """`values` [N] with minus infinity added at those places [K] that match."""
    ban = torch.where(match, -torch.inf, 0.0).to(values.dtype)
    return values.index_put((places,), ban, accumulate=True)


def no_draws(device: Device) -> SamplingInputs:
    """Inputs for no draw at all."""
    floats, ints = (device.to_device(torch.zeros(0, dtype=dtype)) for dtype in (torch.float32, torch.int64))
    return SamplingInputs(floats, ints, floats, floats, ints, ints, all_greedy=True, filters=False)
