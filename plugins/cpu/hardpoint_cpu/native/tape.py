"""The tape: a step as a list of native calls on fixed memory, played by one call of the library.

    record   at the first step: the step function runs twice without computing (recording.py, sizes.py)
    place    intermediates share one block, sized for the largest step (arena.py); pointers are written once
    play     inputs are copied in, hp_run plays the calls, the draw reads the logits; no Python between native ops

Torch ops that are not native split the tape: they run between two calls of hp_run, on views of the block. A draw that
only takes the largest logit is the last call of the tape. Between two steps all of Python finds the caches full of
weights, and each line takes several times what it does elsewhere; so what a size decides is kept for the next step.
"""

from __future__ import annotations

import ctypes
import struct
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from hardpoint_cpu.native.abi import OP, POINTER_OFFSET, ROWS_OFFSET, Code, RowsOf, pack_op
from hardpoint_cpu.native.arena import ALIGNMENT, Life, place
from hardpoint_cpu.native.recording import Place
from hardpoint_cpu.native.sampling import takes_largest
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
_POINTERS = struct.Struct("=QQ")


@dataclass(frozen=True)
class _NativeRun:
    """Ops [first, first + count) of the tape."""

    first: int
    count: int


@dataclass(frozen=True, eq=False)
class _Frame:
    """What the size of a step decides: the inputs' places, and the logits where there is a draw."""

    size: StepSize
    inputs: tuple[torch.Tensor, ...]
    spans: tuple[tuple[int, int], ...]
    logits: torch.Tensor | None


class Tape:
    """A recorded step with its memory. `alive`: what its pointers lead to, and must not be freed before it."""

    def __init__(self, stage: Stage, step: SizedStep, alive: tuple[object, ...], largest: StepSize) -> None:
        self._stage = stage
        self._step = step
        self._alive = alive
        self._runs = _cut(step.entries)
        calls = [entry for entry in step.entries if isinstance(entry, SizedCall)]
        #: The draw, where it may be one more native call behind the last run.
        self._largest_of = _largest_of(step.entries)
        self._ops = bytearray(b"".join([*map(_encode, calls), *_largest_op(self._largest_of)]))
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
        self._frame: _Frame | None = None
        self._patch()

    def play(
        self, size: StepSize, inputs: tuple[torch.Tensor, ...], batch: int, sampling: SamplingInputs
    ) -> SampleResult | None:
        """Run the step with the hp_batch at this address.

        inputs: int64 token ids [T], positions [T], logits index [S]; `size`, which was reserved, is theirs. Returns
        what was drawn.
        """
        frame = self._frame
        if frame is None or frame.size != size:
            frame = self._frame = self._framed(size)
            for number, rows in self._counted:
                struct.pack_into("=q", self._ops, number * OP.size + ROWS_OFFSET, rows.at(size))
        for given, place_of, (start, length) in zip(inputs, frame.inputs, frame.spans, strict=True):
            if given.dtype is torch.int64 and given.is_contiguous():
                ctypes.memmove(start, given.data_ptr(), length)
            else:
                place_of.copy_(given)
        if self._largest_of is not None and takes_largest(sampling):
            return self._play_largest(size, batch)
        drawn: SampleResult | None = None
        for run in self._runs:
            if isinstance(run, _NativeRun):
                self._stage.run(self._address + run.first * OP.size, run.count, batch)
            elif isinstance(run, SizedSample):
                drawn = run.call.kernel(frame.logits, sampling)
            else:
                self._call(run, size)
        return drawn

    def _play_largest(self, size: StepSize, batch: int) -> SampleResult:
        """The step with its draw as the last native call, into memory that later steps leave alone."""
        ids, finite = torch.empty(size.draws, dtype=torch.int64), torch.empty(size.draws, dtype=torch.bool)
        where = self.native_calls * OP.size + POINTER_OFFSET + 8
        _POINTERS.pack_into(self._ops, where, ids.data_ptr(), finite.data_ptr())
        *before, last, _ = self._runs
        for run in before:
            if isinstance(run, _NativeRun):
                self._stage.run(self._address + run.first * OP.size, run.count, batch)
            elif isinstance(run, SizedTorchCall):
                self._call(run, size)
        assert isinstance(last, _NativeRun)
        self._stage.run(self._address + last.first * OP.size, last.count + 1, batch)
        return SampleResult(ids, finite=finite)

    def _framed(self, size: StepSize) -> _Frame:
        whole = self._as(torch.int64)
        inputs, spans = [], []
        for number, count in enumerate((size.tokens, size.tokens, size.draws)):
            start = (self._start + self._offsets[number]) // 8
            inputs.append(whole[start : start + count])
            spans.append((inputs[-1].data_ptr(), 8 * count))
        draws = [entry for entry in self._step.entries if isinstance(entry, SizedSample)]
        logits = self._tensor(draws[0].logits, size) if draws else None
        return _Frame(size, tuple(inputs), tuple(spans), logits)

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
        if self._largest_of is not None:
            logits = self._largest_of.logits
            start = base + self._offsets[logits.storage] + logits.offset.unit
            struct.pack_into("=Q", self._ops, self.native_calls * OP.size + POINTER_OFFSET, start)
        self._records = torch.frombuffer(self._ops, dtype=torch.uint8) if self._ops else torch.empty(0)
        self._address = self._records.data_ptr()


def _encode(entry: SizedCall) -> bytes:
    call = entry.call
    pointers = [0 if isinstance(pointer, Place) else pointer for pointer in call.pointers]
    of = entry.rows.of if _countable(entry.rows) else RowsOf.FIXED
    return pack_op(call.code, of, entry.rows.unit, pointers, call.integers, call.floats)


def _largest_of(entries: tuple[SizedEntry, ...]) -> SizedSample | None:
    """The draw, if it comes last, right behind a native call, from dense rows that do not move with the step's size."""
    if len(entries) < 2 or not isinstance(entries[-1], SizedSample) or not isinstance(entries[-2], SizedCall):
        return None
    logits = entries[-1].logits
    if logits.dtype is not torch.float32 or len(logits.size) != 2:
        return None
    rows, vocab = logits.size
    dense = vocab.of is RowsOf.FIXED and logits.stride == (vocab, Dim(1)) and logits.offset.of is RowsOf.FIXED
    return entries[-1] if dense and rows == Dim(1, RowsOf.DRAWS) else None


def _largest_op(draw: SizedSample | None) -> list[bytes]:
    """The hp_op that takes the largest logits; its pointers are written later."""
    if draw is None:
        return []
    vocab = draw.logits.size[1].unit
    return [pack_op(Code.ARGMAX, RowsOf.DRAWS, 1, (), (vocab, vocab))]


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
