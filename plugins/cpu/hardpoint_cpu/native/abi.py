"""The C interface of the kernel library (native/include/hp.h), mirrored: codes, records, structures."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch

#: HP_ABI: the interface that these mirrors describe.
ABI = 1


class Code(IntEnum):
    """enum hp_code."""

    EMBED = 1
    GATHER = 2
    NORM = 3
    ADD_NORM = 4
    ROPE = 5
    ACTIVATE = 6
    GATED = 7
    SCALE_CAP = 8
    ADD = 9
    COPY = 10
    LINEAR = 20
    EXPERTS = 21
    ATTENTION = 30
    MLA = 31
    ARGMAX = 40
    SAMPLE = 41
    LOGPROBS = 42
    ROUTE = 43
    PENALTIES = 44
    BIAS = 45
    LORA = 50
    CONV_STATE = 51
    SSM_SCAN = 52
    GATED_DELTA = 53
    CEILING = 60


#: HP_CODES: places in the profile.
CODES = 64


class RowsOf(IntEnum):
    """enum hp_rows."""

    FIXED = 0
    TOKENS = 1
    DRAWS = 2


#: enum hp_dtype.
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3, torch.uint8: 4}

POINTERS, INTEGERS, FLOATS = 12, 20, 4
#: struct hp_op: code, rows_of, rows, p, i, f.
OP = struct.Struct(f"=iiq{POINTERS}Q{INTEGERS}q{FLOATS}f")
#: Where rows and p start in an hp_op.
ROWS_OFFSET, POINTER_OFFSET = 8, 16


class Group(ctypes.Structure):
    """struct hp_group."""

    _fields_ = (("page_table", ctypes.c_void_p), ("table_stride", ctypes.c_int64), ("slots", ctypes.c_void_p))


class Batch(ctypes.Structure):
    """struct hp_batch."""

    _fields_ = (
        ("tokens", ctypes.c_int64),
        ("draws", ctypes.c_int64),
        ("num_requests", ctypes.c_int64),
        ("page_tokens", ctypes.c_int64),
        ("query_start", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("groups", ctypes.c_void_p),
        ("num_groups", ctypes.c_int64),
    )


class Matrix(ctypes.Structure):
    """struct hp_matrix."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("packing", ctypes.c_int32),
        ("values_dtype", ctypes.c_int32),
        ("group", ctypes.c_int64),
        ("super_group", ctypes.c_int64),
        ("values", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("super_scales", ctypes.c_void_p),
        ("super_offsets", ctypes.c_void_p),
        ("scales_dtype", ctypes.c_int32),
        ("offsets_dtype", ctypes.c_int32),
        ("super_scales_dtype", ctypes.c_int32),
        ("super_offsets_dtype", ctypes.c_int32),
        ("codebook", ctypes.c_void_p),
    )


def pack_op(
    code: int,
    rows_of: int,
    rows: int,
    pointers: Sequence[int],
    integers: Sequence[int] = (),
    floats: Sequence[float] = (),
) -> bytes:
    """An hp_op; what is not given is zero."""
    return OP.pack(
        code,
        rows_of,
        rows,
        *pointers,
        *(0,) * (POINTERS - len(pointers)),
        *integers,
        *(0,) * (INTEGERS - len(integers)),
        *floats,
        *(0.0,) * (FLOATS - len(floats)),
    )


def address(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> int:
    """Where an array's first element lies."""
    start: int = array.__array_interface__["data"][0]
    return start
