"""Ceilings of this machine by the library's own loops: reads from memory, float32 and int8 products. Takes 0.3 s."""

from __future__ import annotations

import time
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from hardpoint_cpu.native.abi import Code, RowsOf, address, pack_op
from hardpoint_cpu.native.stage import Stage
from hardpoint_platforms.ceilings import Ceilings

#: More than the last cache of most processors; four of them together are less than the largest have.
_BYTES = 256 << 20
#: Short rounds and many of them, so that some are not disturbed by what else runs on the machine. All bytes are read
#: before the first are read again.
_ROUNDS = 48
#: Seconds of one round of products.
_ROUND = 0.002


Bytes = npt.NDArray[np.uint8]


class _Kind(IntEnum):
    """What native/src/kernels/ceiling.cpp does."""

    FILL = 0
    READ = 1
    FLOAT = 2
    INTEGER = 3


def measure_ceilings(stage: Stage, exact: bool, memory: int = _BYTES) -> Ceilings | None:
    """The best of a few rounds each; None where the library has no kernel for it.

    exact: int8 products are left out, as no kernel of the device makes any. memory: bytes that are read, a
    multiple of 16.
    """
    if not stage.library.has(Code.CEILING):
        return None
    buffer = np.empty(memory, np.uint8)
    _rate(stage, _Kind.FILL, buffer, 1)
    parts = np.split(buffer, 16)
    reads = max(_rate(stage, _Kind.READ, parts[place % len(parts)], 1) for place in range(_ROUNDS))
    rates = {"float32": _products(stage, _Kind.FLOAT, buffer)}
    if not exact:
        rates["int8"] = _products(stage, _Kind.INTEGER, buffer)
    return Ceilings(reads, rates)


def _products(stage: Stage, kind: _Kind, buffer: Bytes) -> float:
    """Multiply-adds per second; passes are doubled until a round takes about `_ROUND`."""
    passes, taken = 64, 0.0
    while taken < _ROUND / 2:
        passes *= 2
        taken = min(_seconds(stage, kind, buffer, passes)[0] for _ in range(3))
    return max(_rate(stage, kind, buffer, passes) for _ in range(_ROUNDS))


def _rate(stage: Stage, kind: _Kind, buffer: Bytes, passes: int) -> float:
    """What all threads did per second."""
    seconds, done = _seconds(stage, kind, buffer, passes)
    return done / seconds


def _seconds(stage: Stage, kind: _Kind, buffer: Bytes, passes: int) -> tuple[float, float]:
    """Seconds, and what all threads did: bytes or multiply-adds."""
    done = np.zeros(stage.pool.threads, np.float64)
    sums = np.zeros(stage.pool.threads, np.float32)
    pointers = (address(buffer), address(done), address(sums))
    op = pack_op(Code.CEILING, RowsOf.FIXED, 1, pointers, (kind, buffer.size, passes))
    started = time.perf_counter()
    stage.run(op, 1, 0)
    return time.perf_counter() - started, float(done.sum())
