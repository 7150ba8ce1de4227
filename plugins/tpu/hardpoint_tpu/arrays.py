"""Host tensors as NumPy arrays that JAX takes, and back, bit by bit and for every dtype that both know."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

#: dtypes that NumPy itself does not have: the tensor's bits as integers, and what JAX calls them.
_FOREIGN: dict[torch.dtype, tuple[torch.dtype, Any]] = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
}
_BACK = {np.dtype(foreign): (dtype, bits) for dtype, (bits, foreign) in _FOREIGN.items()}


def to_numpy(tensor: torch.Tensor, copy: bool) -> npt.NDArray[Any]:
    """The tensor's numbers, in C order; without `copy` possibly the tensor's own memory."""
    tensor = tensor.detach()
    plain = tensor.clone(memory_format=torch.contiguous_format) if copy else tensor.contiguous()
    if plain.dtype not in _FOREIGN:
        return plain.numpy()
    bits, foreign = _FOREIGN[plain.dtype]
    return plain.view(bits).numpy().view(foreign)


def to_torch(array: Any) -> torch.Tensor:
    """A host tensor of its own memory with what a JAX array holds; waits for it."""
    host = np.array(array, order="C")  # a copy: JAX's own is read-only, and may be given to a later program
    if host.dtype not in _BACK:
        return torch.from_numpy(host)
    dtype, bits = _BACK[host.dtype]
    return torch.from_numpy(host.view(np.int16 if bits is torch.int16 else np.uint8)).view(dtype)
