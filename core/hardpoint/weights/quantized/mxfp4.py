"""MXFP4 as gpt-oss keeps its experts (OCP Microscaling Formats 1.0): 4-bit floats, a power of two per 32 columns.

X_blocks  uint8 [..., rows, groups, 16]: two codes per byte, the even column in the low nibble
X_scales  uint8 [..., rows, groups]: 127 more than the exponent
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hardpoint.weights.quantized.method import Layout, Method, Stored
from hardpoint_platforms.ops.contract import Weight
from hardpoint_platforms.quant import Packing, QuantScheme, QuantTensor

_BYTES = (torch.uint8,)
_COLUMNS = 32
_SCHEME = QuantScheme("mxfp4", Packing.UINT4, 4, _COLUMNS, codebook=True)
#: What a code of 1 sign, 2 exponent and 1 mantissa bits is worth.
_CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class Mxfp4(Method):
    """`mxfp4`."""

    ends: Mapping[str, str] = {"_blocks": "values", "_scales": "scales"}

    def layout(self, stored: Stored) -> Layout:
        *lead, groups, half = stored.shape("values", _BYTES, (3, 4))
        if half * 2 != _COLUMNS:
            raise stored.wrong(f"the values have {half} bytes per block, must have {_COLUMNS // 2}")
        stored.expect("scales", _BYTES, (*lead, groups))
        return Layout((*lead, groups * _COLUMNS), _SCHEME)

    def read(self, stored: Stored, layout: Layout) -> Weight:
        scales = stored.load("scales").view(torch.float8_e8m0fnu).to(torch.bfloat16)
        codebook = torch.tensor(_CODES)
        return QuantTensor(_SCHEME, layout.shape, stored.load("values").flatten(-2), scales, codebook=codebook)
