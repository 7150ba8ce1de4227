"""Products of few rows: by a Triton kernel or by the vendor's library, as was measured for the shape of the weight.

Where nothing was measured, the kernels that start before the one ahead of them ends are taken (an H200's choice).
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from hardpoint_torch_gpu.kernels.ahead import ahead
from hardpoint_torch_gpu.kernels.gemv import gemv
from hardpoint_torch_gpu.kernels.skinny import MOST, skinny
from hardpoint_torch_gpu.measured import Measurements

#: Rows of w from which the vendor's library reads as fast.
_WIDE = 65536
#: Seconds that a kernel saves which starts while the one before it ends (docs/experiments.md).
_HEAD_START = 2.5e-6
#: Most rows of x of each kind of launch, and how many are measured for it.
_HEIGHTS = {1: 1, 16: 8, 32: 24, 64: 48}


class FewRows:
    """Chooses once per shape. Shared by the layers of a device."""

    def __init__(self, measurements: Measurements | None = None) -> None:
        self._measurements = measurements or Measurements()
        #: By (rows, columns, dtype) of the weight: the heights that the library takes.
        self._library: dict[tuple[int, int, torch.dtype], frozenset[int]] = {}

    def learn(self, w: torch.Tensor) -> None:
        """Choose for weights like w [N, K]."""
        key = (w.shape[0], w.shape[1], w.dtype)
        if key in self._library or not w.is_cuda or not _taken(w):
            return
        library = set()
        for height, rows in _HEIGHTS.items():
            question = f"linear {w.shape[0]}x{w.shape[1]} {str(w.dtype).removeprefix('torch.')}, {height} rows"
            if self._measurements.knows(question):
                x = torch.randn((rows, w.shape[1]), dtype=torch.float32, device=w.device).to(w.dtype)
                ways = {"triton": partial(_few, x, w, None), "library": partial(F.linear, x, w)}
                if self._measurements.fastest(question, ways, _HEAD_START if ahead(x)["AHEAD"] else 0.0) == "library":
                    library.add(height)
        self._library[key] = frozenset(library)

    def product(self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [..., K], w [N, K] -> [..., N]."""
        tokens = x.numel() // w.shape[1]
        if not 0 < tokens <= MOST or not _taken(w):
            return F.linear(x, w, bias)
        library = self._library.get((w.shape[0], w.shape[1], w.dtype), frozenset())
        if library and next(height for height in _HEIGHTS if tokens <= height) in library:
            return F.linear(x, w, bias)
        return _few(x.reshape(tokens, -1).contiguous(), w, bias).view(*x.shape[:-1], w.shape[0])


def _taken(w: torch.Tensor) -> bool:
    return w.dtype is not torch.float32 and w.shape[0] < _WIDE


def _few(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return gemv(x, w, bias, x.dtype) if len(x) == 1 else skinny(x, w, bias)
