"""Tensor types of GGUF files: their numbers, block sizes and what we can do with each.

Numbers and sizes are those of ggml (`enum ggml_type` and the block structures in ggml-common.h).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GgmlType:
    """One tensor type.

    Attributes:
        number: as stored in the file.
        name: ggml's name in capitals ("Q4_K").
        block: elements per block; a row is a whole number of blocks.
        bytes: bytes per block.
        usable: whether it can hold a model's weights. Types for activations and integers cannot.
    """

    number: int
    name: str
    block: int
    bytes: int
    usable: bool = True


_TYPES = (
    GgmlType(0, "F32", 1, 4),
    GgmlType(1, "F16", 1, 2),
    GgmlType(2, "Q4_0", 32, 18),
    GgmlType(3, "Q4_1", 32, 20),
    GgmlType(6, "Q5_0", 32, 22),
    GgmlType(7, "Q5_1", 32, 24),
    GgmlType(8, "Q8_0", 32, 34),
    GgmlType(9, "Q8_1", 32, 40, usable=False),
    GgmlType(10, "Q2_K", 256, 84),
    GgmlType(11, "Q3_K", 256, 110),
    GgmlType(12, "Q4_K", 256, 144),
    GgmlType(13, "Q5_K", 256, 176),
    GgmlType(14, "Q6_K", 256, 210),
    GgmlType(15, "Q8_K", 256, 292, usable=False),
    GgmlType(16, "IQ2_XXS", 256, 66),
    GgmlType(17, "IQ2_XS", 256, 74),
    GgmlType(18, "IQ3_XXS", 256, 98),
    GgmlType(19, "IQ1_S", 256, 50),
    GgmlType(20, "IQ4_NL", 32, 18),
    GgmlType(21, "IQ3_S", 256, 110),
    GgmlType(22, "IQ2_S", 256, 82),
    GgmlType(23, "IQ4_XS", 256, 136),
    GgmlType(24, "I8", 1, 1, usable=False),
    GgmlType(25, "I16", 1, 2, usable=False),
    GgmlType(26, "I32", 1, 4, usable=False),
    GgmlType(27, "I64", 1, 8, usable=False),
    GgmlType(28, "F64", 1, 8),
    GgmlType(29, "IQ1_M", 256, 56),
    GgmlType(30, "BF16", 1, 2),
    GgmlType(34, "TQ1_0", 256, 54),
    GgmlType(35, "TQ2_0", 256, 66),
    GgmlType(39, "MXFP4", 32, 17),
    GgmlType(40, "NVFP4", 64, 36),
    GgmlType(41, "Q1_0", 128, 18, usable=False),
)

#: By the number in the file. Numbers that are missing belong to types that ggml took back or that are newer.
GGML_TYPES = {kind.number: kind for kind in _TYPES}
