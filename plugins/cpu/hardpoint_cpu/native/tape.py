"""The tape: a step as a list of native calls on fixed memory, played by one call of the library.

    record   at the first step: the step function runs twice without computing (recording.py, sizes.py)
    place    intermediates share one block, sized for the largest step (arena.py); pointers are written once
    play     inputs are copied in, hp_run plays the calls, the draw reads the logits; no Python between native ops

Torch ops that are not native split the tape: they run between two calls of hp_run, on views of the block.
"""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from hardpoint_cpu.native.abi import OP, POINTER_OFFSET, ROWS_OFFSET, RowsOf, pack_op
from hardpoint_cpu.native.arena import ALIGNMENT, Life, place
from hardpoint_cpu.native.recording import Place
from hardpoint_cpu.native.sizes import (
    Dim,
    SizedCall,
    SizedEntry,
    SizedSample,
    SizedStep,
    SizedTorchCall,
    SizedView,
    StepSize,
    places,
)
from hardpoint_cpu.native.stage import Stage
from hardpoint_platforms.batch import SampleResult, SamplingInputs

#: Storages 0, 1 and 2 of every recording: int64 token ids [T], positions [T], logits index [S].
INPUTS = 3


@dataclass(frozen=True)
class _NativeRun:
    """Ops [first, first + count) of the tape."""

    first: int
    count: int


class Tape:
    """A recorded step with its memory. `alive`: what its pointers lead to, and must not be freed before it."""

    def __init__(self, stage: Stage, step: SizedStep, alive: tuple[object, ...], largest: StepSize) -> None:
        self._stage = stage
        self._step = step
        self._alive = alive
        self._runs = _cut(step.entries)
        calls = [entry for entry in step.entries if isinstance(entry, SizedCall)]
        self._ops = bytearray(b"".join(_encode(entry) for entry in calls))
        self._calls = calls
        # Rows that are a multiple of the tokens (heads of tokens, say) are written before each play.
        self._counted = [(number, call.rows) for number, call in enumerate(calls) if not _countable(call.rows)]
        self.native_calls = len(calls)
        self.splits = Counter(str(e.call.function) for e in step.entries if isinstance(e, SizedTorchCall))
        #: Places of the plans that native ops read.
        self.plans = sorted({entry.call.plan for entry in calls if entry.call.plan >= 0})
        self.capacity = StepSize(0, 0)
        self.reserve(largest)

    def reserve(self, size: StepSize) -> None:
        """Make room for steps of this size."""
        last = len(self._step.entries)
        lives = [[last, -1] for _ in self._step.storages]
        for moment, entry in enumerate(self._step.entries):
            for number in places(entry):
                lives[number] = [min(lives[number][0], moment), moment]
        for number in range(INPUTS):
            lives[number] = [-1, last]
        spans = [Life(dim.at(size), *life) for dim, life in zip(self._step.storages, lives, strict=True)]
        self._offsets, total = place(spans)
        self._block = torch.empty(total + ALIGNMENT, dtype=torch.uint8)
        self._start = -self._block.data_ptr() % ALIGNMENT
        self._typed: dict[torch.dtype, torch.Tensor] = {}
        self.capacity = size
        self._patch()

    def inputs(self, size: StepSize) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where token ids, positions and logits index of a step are put."""
        whole = self._as(torch.int64)
        starts = [(self._start + self._offsets[number]) // 8 for number in range(INPUTS)]
        counts = (size.tokens, size.tokens, size.draws)
        ids, positions, index = (whole[start : start + n] for start, n in zip(starts, counts, strict=True))
        return ids, positions, index

    def play(self, size: StepSize, batch: int, sampling: SamplingInputs) -> SampleResult | None:
        """Run the step with the hp_batch at this address. Returns what was drawn."""
        drawn: SampleResult | None = None
        for number, rows in self._counted:
            struct.pack_into("=q", self._ops, number * OP.size + ROWS_OFFSET, rows.at(size))
        for run in self._runs:
            if isinstance(run, _NativeRun):
                self._stage.run(self._address + run.first * OP.size, run.count, batch)
            elif isinstance(run, SizedSample):
                drawn = run.call.kernel(self._tensor(run.logits, size), sampling)
            elif isinstance(run, SizedTorchCall):
                self._call(run, size)
        return drawn

    def _call(self, entry: SizedTorchCall, size: StepSize) -> None:
        result = entry.call.function(*self._live(entry.args, size), **self._live(entry.kwargs, size))
        made = result if isinstance(result, (list, tuple)) else (result,)
        for view, value in zip(entry.results, made, strict=False):
            self._tensor(view, size).copy_(value)

    def _live(self, value: Any, size: StepSize) -> Any:
        if isinstance(value, SizedView):
            return self._tensor(value, size)
        if isinstance(value, dict):
            return {key: self._live(part, size) for key, part in value.items()}
        if isinstance(value, list):
            return [self._live(part, size) for part in value]
        return value.at(size) if isinstance(value, Dim) else value

    def _tensor(self, view: SizedView, size: StepSize) -> torch.Tensor:
        start = self._start + self._offsets[view.storage] + view.offset.at(size)
        shape, strides = [dim.at(size) for dim in view.size], [dim.at(size) for dim in view.stride]
        return torch.as_strided(self._as(view.dtype), shape, strides, start // view.dtype.itemsize)

    def _as(self, dtype: torch.dtype) -> torch.Tensor:
        """The block as numbers of `dtype`."""
        if dtype not in self._typed:
            whole = self._block[: self._block.numel() // ALIGNMENT * ALIGNMENT]
            # An aligned start is a whole number of elements from the block's start, which torch aligns likewise.
            self._typed[dtype] = whole.view(dtype)
        return self._typed[dtype]

    def _patch(self) -> None:
        base = self._block.data_ptr() + self._start
        for number, entry in enumerate(self._calls):
            for index, pointer in enumerate(entry.call.pointers):
                if isinstance(pointer, Place):
                    where = number * OP.size + POINTER_OFFSET + 8 * index
                    struct.pack_into("=Q", self._ops, where, base + self._offsets[pointer.storage] + pointer.offset)
        self._records = torch.frombuffer(self._ops, dtype=torch.uint8) if self._ops else torch.empty(0)
        self._address = self._records.data_ptr()


def _encode(entry: SizedCall) -> bytes:
    call = entry.call
    pointers = [0 if isinstance(pointer, Place) else pointer for pointer in call.pointers]
    of = entry.rows.of if _countable(entry.rows) else RowsOf.FIXED
    return pack_op(call.code, of, entry.rows.unit, pointers, call.integers, call.floats)


def _countable(rows: Dim) -> bool:
    """Whether the library knows this many rows from the batch."""
    return rows.of is RowsOf.FIXED or rows.unit == 1


def _cut(entries: tuple[SizedEntry, ...]) -> list[_NativeRun | SizedTorchCall | SizedSample]:
    """Neighbouring native calls become one run."""
    runs: list[_NativeRun | SizedTorchCall | SizedSample] = []
    place_of = 0
    for entry in entries:
        if not isinstance(entry, SizedCall):
            runs.append(entry)
            continue
        if runs and isinstance(runs[-1], _NativeRun):
            runs[-1] = _NativeRun(runs[-1].first, runs[-1].count + 1)
        else:
            runs.append(_NativeRun(place_of, 1))
        place_of += 1
    return runs
