"""Weights in the library's own layouts, held by tensors, since that is what packed weights are.

An hp_weight lives behind a tensor of one int64, its address; it is freed with the last tensor on that memory:

    tensor [1] -> numpy array -> _Held -> hp_weight
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hardpoint_cpu.native.abi import DTYPES, Matrix
from hardpoint_cpu.native.library import NativeLibrary
from hardpoint_cpu.native.stage import Stage
from hardpoint_platforms.errors import UnsupportedOperation
from hardpoint_platforms.ops.contract import OpInstance, Packed, Weight
from hardpoint_platforms.ops.provider import Support
from hardpoint_platforms.quant import Codes, Packing, QuantScheme, QuantTensor

_PACKINGS = {Packing.INT8: 1, Packing.UINT4: 2}
#: Places in a codebook: as many as there are stored integers.
_CODES = 256
#: Narrow dtypes in which a float32 weight is tried; most checkpoints come in one of them.
_NARROW = (torch.bfloat16, torch.float16)


#: Activations that share a scale in the library's products of 8-bit integers.
_BLOCK = 16
#: Ops that must round their input where a scheme says so.
_ROUNDING = ("linear", "experts")


def products(instance: OpInstance, exact: bool) -> Support:
    """Whether products with these weights are the library's, and what it makes of quantized ones."""
    schemes = dict.fromkeys(spec.scheme for spec in instance.weights.values() if spec.scheme is not None)
    if not schemes:
        return Support(True, "float32 sums")
    told = []
    for scheme in sorted(schemes, key=lambda scheme: scheme.name):
        rounding = scheme.rounding if instance.op in _ROUNDING else None
        if rounding is not None and exact:
            return Support(False, f"{scheme.name} rounds its input, which numerics exact does not")
        if rounding is not None and (rounding.codes is not Codes.INT8 or 0 < rounding.group < _BLOCK):
            return Support(False, f"{scheme.name} rounds its input to {rounding.codes.value}, the library to int8")
        if exact or not is_laid_out(scheme):
            told.append(f"{scheme.name} dequantized at load to float32{' (numerics exact)' if exact else ''}")
        else:
            finer = " of 16, which loses less than per token" if rounding is not None else ""
            told.append(f"{scheme.name} by activations rounded to int8 per block{finer}")
    return Support(True, "; ".join(dict.fromkeys(told)))


def is_laid_out(scheme: QuantScheme) -> bool:
    """Whether the library keeps a weight's codes; others become float32 at load."""
    return scheme.packing in _PACKINGS


class _Held:
    """Owner of hp_weights; numpy reads their addresses through it."""

    def __init__(self, library: NativeLibrary, handles: Sequence[int]) -> None:
        self._library = library
        self._handles = np.array(handles, np.int64)
        self.__array_interface__ = self._handles.__array_interface__

    def __del__(self) -> None:
        for handle in self._handles.tolist():
            self._library.c.hp_weight_free(handle)


def narrowed(weight: torch.Tensor) -> torch.Tensor:
    """A float32 weight as the 16-bit numbers that it came from, where that loses nothing; else itself.

    Half the bytes per product, and the same products.
    """
    if weight.dtype is not torch.float32:
        return weight
    probe = weight.flatten()[:4096]
    for dtype in _NARROW:
        if torch.equal(probe.to(dtype).float(), probe):
            narrow = weight.to(dtype)
            if torch.equal(narrow.float(), weight):
                return narrow
    return weight


def matrix_of(weight: Weight) -> tuple[Matrix, tuple[torch.Tensor, ...]]:
    """The hp_matrix of a weight [rows, columns], and the tensors that it points into.

    Raises UnsupportedOperation for parts of a dtype that the interface does not know.
    """
    matrix = Matrix(rows=weight.shape[0], columns=weight.shape[1])
    kept: list[torch.Tensor] = []

    def point(name: str, tensor: torch.Tensor | None) -> None:
        if tensor is None:
            return
        if tensor.dtype not in DTYPES:
            raise UnsupportedOperation(f"{name} of a weight are {tensor.dtype}")
        kept.append(tensor.contiguous())
        setattr(matrix, name, kept[-1].data_ptr())
        setattr(matrix, f"{name}_dtype", DTYPES[tensor.dtype])

    if not isinstance(weight, QuantTensor):
        point("values", weight)
        return matrix, tuple(kept)
    scheme = weight.scheme
    matrix.packing, matrix.group, matrix.super_group = _PACKINGS[scheme.packing], scheme.group, scheme.super_group
    for name in ("values", "scales", "offsets", "super_scales", "super_offsets"):
        point(name, getattr(weight, name))
    if weight.codebook is not None:
        kept.append(_codebook(weight.codebook, scheme.packing))
        matrix.codebook = kept[-1].data_ptr()
    return matrix, tuple(kept)


def _codebook(codebook: torch.Tensor, packing: Packing) -> torch.Tensor:
    """float32 [256], indexed by the stored integer; by it + 128 where that is signed."""
    full = torch.zeros(_CODES)
    size = codebook.numel()
    if packing is Packing.INT8:
        # Stored integers index the codebook as Python does: negative ones from its end.
        full[128 : 128 + min(size, 128)] = codebook[:128].float()
        full[128 - min(size, 128) : 128] = codebook[-128:].float()
    else:
        full[:size] = codebook.float()
    return full


def pack_weights(stage: Stage, weights: Sequence[Weight], exact: bool) -> torch.Tensor:
    """int64 [n]: addresses of the hp_weights of n matrices [rows, columns].

    Raises UnsupportedOperation where no kernel takes one of them.
    """
    made: list[int] = []
    try:
        made.extend(_new(stage, weight, exact) for weight in weights)
    except BaseException:
        _Held(stage.library, made)
        raise
    # The array takes the owner as its base, the tensor the array.
    return torch.from_numpy(np.asarray(_Held(stage.library, made)))


def _new(stage: Stage, weight: Weight, exact: bool) -> int:
    source = _source(weight)
    handle = _try(stage, source, exact)
    if not handle and isinstance(source, QuantTensor):
        handle = _try(stage, source.dequantize(torch.float32), exact)
    if not handle:
        kind = source.scheme.name if isinstance(source, QuantTensor) else str(source.dtype)
        raise UnsupportedOperation(f"no native layout for a weight {tuple(weight.shape)} of {kind}")
    return handle


def _source(weight: Weight) -> Weight:
    """What is given to the library."""
    if not isinstance(weight, QuantTensor):
        return narrowed(weight)
    return weight.with_row_scales() if is_laid_out(weight.scheme) else weight.dequantize(torch.float32)


def _try(stage: Stage, weight: Weight, exact: bool) -> int:
    matrix, kept = matrix_of(weight)
    handle: int | None = stage.library.c.hp_weight_new(stage.pool.handle, ctypes.addressof(matrix), int(exact))
    del kept  # read until here
    return handle or 0


def weight_bytes(stage: Stage, handles: torch.Tensor) -> Mapping[Hashable, int]:
    """Address -> bytes of each hp_weight."""
    return {handle: int(stage.library.c.hp_weight_bytes(handle)) for handle in handles.tolist()}


def pack_matrix(weight: Weight) -> Packed:
    """(hp_matrix as bytes, the tensors that it points into ...): a table that stays in its neutral form."""
    matrix, kept = matrix_of(_source(weight))
    return (torch.from_numpy(np.frombuffer(bytes(matrix), np.uint8).copy()), *kept)


def expert_slices(weight: Weight, interleaved: bool) -> list[Weight]:
    """Matrices of [experts, rows, columns]; interleaved gate and up rows are put one half after the other."""
    if not isinstance(weight, QuantTensor):
        return [_halves(part) if interleaved else part for part in weight]
    weight = weight.with_row_scales() if interleaved else weight
    names = ("values", "scales", "offsets", "super_scales", "super_offsets")
    slices: list[Weight] = []
    for expert in range(weight.shape[0]):
        parts = {name: getattr(weight, name) for name in names}
        cut: dict[str, Any] = {name: None if part is None else part[expert] for name, part in parts.items()}
        if interleaved:
            cut = {name: None if part is None else _halves(part) for name, part in cut.items()}
        slices.append(QuantTensor(weight.scheme, weight.shape[1:], codebook=weight.codebook, **cut))
    return slices


def _halves(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat((rows[0::2], rows[1::2]))
