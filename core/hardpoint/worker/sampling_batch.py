"""From rows of the sequence table to the `SamplingInputs` of one step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from hardpoint.worker.sequence_table import SequenceTable
from hardpoint_platforms.batch import LogitBias, Penalties, SamplingInputs
from hardpoint_platforms.device import Device
from hardpoint_platforms.program import BIAS_ENTRIES, TOP_LOGPROBS, SamplingShape

Int64s = npt.NDArray[np.int64]


class SamplingBatchBuilder:
    """Builds sampling inputs. While the same rows decode step after step, only positions and history are made anew."""

    def __init__(self, device: Device, table: SequenceTable) -> None:
        self._device = device
        self._table = table
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
        constrained = bool(table.bias or table.min_tokens or table.bad_words)
        full = shape is SamplingShape.FULL
        if shape in (SamplingShape.GREEDY, SamplingShape.DRAW):
            # What rows of padding, or rows that draw nothing yet, would want is left out.
            drawing = shape is SamplingShape.DRAW
            return SamplingInputs(*self._static, placed, all_greedy=not drawing, filters=drawing)
        bias = self._bias(rows, positions) if constrained else None
        return SamplingInputs(
            *self._static,
            placed,
            penalties=self._penalties(rows, positions, whole=full) if penalties or full else None,
            bias=self._padded_bias(bias, len(rows) * BIAS_ENTRIES) if full else bias,
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
        history = table.tokens[self._put(rows)][:, :longest].long()
        unused = torch.arange(longest, device=history.device) >= self._put(lengths)[:, None]
        return Penalties(
            history=history.masked_fill(unused, table.vocab_size),
            prompt_lengths=self._put(table.prompt_lengths[rows]),
            presence=self._put(table.presence[rows]),
            frequency=self._put(table.frequency[rows]),
            repetition=self._put(table.repetition[rows]),
        )

    def _bias(self, rows: Int64s, positions: Int64s) -> LogitBias | None:
        """Bias entries of the batch: logit_bias, the ends that min_tokens forbids, and bad words."""
        table = self._table
        places: list[Int64s] = []
        tokens: list[Int64s] = []
        values: list[npt.NDArray[np.float32]] = []
        for index, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            entries = []
            if row in table.bias:
                entries.append(table.bias[row])
            if row in table.min_tokens:
                least, ends = table.min_tokens[row]
                if position - int(table.prompt_lengths[row]) < least:
                    entries.append((ends, np.full(len(ends), -np.inf, np.float32)))
            for ids, amounts in entries:
                places.append(np.full(len(ids), index, np.int64))
                tokens.append(ids)
                values.append(amounts)
        banned = self._bad_words(rows, positions)
        if not places and banned is None:
            return None
        fixed = LogitBias(
            self._put(np.concatenate(places or [np.zeros(0, np.int64)])),
            self._put(np.concatenate(tokens or [np.zeros(0, np.int64)])),
            self._put(np.concatenate(values or [np.zeros(0, np.float32)])),
        )
        return fixed if banned is None else _joined(fixed, banned)

    def _padded_bias(self, bias: LogitBias | None, size: int) -> LogitBias:
        """As many entries as a static step has; those that are added change nothing."""
        count = 0 if bias is None else len(bias.rows)
        nothing = LogitBias(
            self._put(np.zeros(size - count, np.int64)),
            self._put(np.zeros(size - count, np.int64)),
            self._put(np.zeros(size - count, np.float32)),
        )
        return nothing if bias is None else _joined(bias, nothing)

    def _bad_words(self, rows: Int64s, positions: Int64s) -> LogitBias | None:
        """The last token of each bad word, banned where the sequence ends with the tokens before it.

        The comparison runs on the device, since the host may not know the newest token yet.
        """
        table = self._table
        words = [
            (index, row, position, word)
            for index, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True))
            for word in table.bad_words.get(row, ())
            if len(word) - 1 <= position - int(table.prompt_lengths[row])
        ]
        if not words:
            return None
        width = max(len(word) for *_, word in words) - 1
        prefix = np.full((len(words), width), -1, np.int64)
        where = np.zeros((len(words), width), np.int64)
        for i, (_, _, position, word) in enumerate(words):
            before = len(word) - 1
            prefix[i, :before] = word[:-1]
            where[i, :before] = np.arange(position - before, position)
        index_of, row_of = np.array([w[0] for w in words]), np.array([w[1] for w in words])
        wanted = self._put(prefix)
        seen = table.tokens[self._put(row_of)[:, None], self._put(where)].long()
        match = ((seen == wanted) | (wanted < 0)).all(-1)
        ban = torch.where(match, -torch.inf, 0.0).float()
        last = np.array([w[3][-1] for w in words])
        return LogitBias(self._put(index_of), self._put(last), ban)

    def _allowed(self, rows: Int64s, always: bool) -> torch.Tensor | None:
        allowed = self._table.allowed
        if not always and not any(row in allowed for row in rows.tolist()):
            return None
        free = np.full(-(-self._table.vocab_size // 32), -1, np.int32)
        return self._put(np.stack([allowed.get(row, free) for row in rows.tolist()]))

    def _put(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        return self._device.to_device(torch.from_numpy(values))


def _joined(one: LogitBias, other: LogitBias) -> LogitBias:
    return LogitBias(
        torch.cat((one.rows, other.rows)),
        torch.cat((one.tokens, other.tokens)),
        torch.cat((one.values, other.values)),
    )


def no_draws(device: Device) -> SamplingInputs:
    """Inputs for no draw at all."""
    floats, ints = (device.to_device(torch.zeros(0, dtype=dtype)) for dtype in (torch.float32, torch.int64))
    return SamplingInputs(floats, ints, floats, floats, ints, ints, all_greedy=True, filters=False)
