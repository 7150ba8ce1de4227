"""Products of 8-bit numbers by AITER, where x has many rows; few are Triton's, which shares a weight's columns out.

AITER takes weights as checkpoints have them ([N, K], no reordering), x rounded by us, float32 scales, and writes 16-bit
sums: with a scale per row of both ("gemm_a8w8_CK", floats and integers), or per 128 columns of x and per 128 by 128
block of the weight ("gemm_a8w8_blockscale", floats). On gfx942 the floats are e4m3fnuz, as `fnuz.py` makes them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping

import torch
from hardpoint_torch_gpu.eight_bits import PARTS, refusal, unpacked
from hardpoint_torch_gpu.kernels.activate_round import activate_round
from hardpoint_torch_gpu.kernels.eight_bit_gemm import EightBitWeight
from hardpoint_torch_gpu.kernels.round_input import Rounded
from hardpoint_torch_gpu.rounded_input import TakesRounded

from hardpoint_platforms.ops.contract import OpInstance, Packed, Weight
from hardpoint_platforms.ops.provider import Support
from hardpoint_platforms.quant import Packing, QuantScheme
from hardpoint_platforms.versioning import Version
from hardpoint_rocm.aiter_library import BLOCKS, ROWS, Aiter

#: Rows of x from which AITER is asked, as for the other vendor's library in `eight_bits.py`; nobody measured it.
LEAST_ROWS = 129
_BLOCK = 128
#: What its products ask of both sizes of a weight.
_UNITS = {ROWS: 16, BLOCKS: _BLOCK}


class _AiterProducts(TakesRounded):
    """Another provider of products of 8-bit numbers; those of many rows are AITER's.

    Packed are the other's tensors, then per weight its scales as AITER reads them: float32 [N, 1], or [N/128, K/128].
    """

    version = Version(1, 0)
    #: Names of the weights.
    weights: tuple[str, ...]

    def __init__(self, inner: TakesRounded, library: Aiter) -> None:
        """inner: packs what `eight_bits.unpacked` reads, in the kind of floats that the chip multiplies."""
        self._inner, self._library = inner, library
        self.name = f"aiter + {inner.name}"

    def supports(self, instance: OpInstance) -> Support:
        if why := self.against(instance):
            return Support(False, why)
        ours = self._inner.supports(instance).reason
        return Support(True, f"{ours}; {LEAST_ROWS} rows and more by AITER's {self._function(instance)}")

    def against(self, instance: OpInstance) -> str:
        if why := self._inner.against(instance):
            return why
        return next(filter(None, (self._refusal(instance, name) for name in self.weights)), "")

    def _function(self, instance: OpInstance) -> str:
        return " and ".join(dict.fromkeys(_kind(instance, name) for name in self.weights))

    def _refusal(self, instance: OpInstance, name: str) -> str:
        spec = instance.weights[name]
        if spec.scheme is None or spec.scheme.rounding is None:
            return f"{name} is no product of 8-bit numbers"
        if against := refusal(instance, True, name):
            return f"{name}: {against}"
        if instance.dtype not in (torch.bfloat16, torch.float16):
            return f"{instance.dtype} sums, AITER writes 16-bit ones"
        if len(instance.weights) > len(self.weights):
            return "a bias, which AITER's products of floats do not add"
        kind = _kind(instance, name)
        if not kind:
            return f"{name}: AITER has one scale per row, or one per 128 by 128 block of 8-bit floats"
        if any(size % _UNITS[kind] for size in spec.shape):
            return f"{name} is {' by '.join(map(str, spec.shape))}, AITER's {kind} takes multiples of {_UNITS[kind]}"
        return self._library.functions[kind].against

    def pack(self, instance: OpInstance, weights: Mapping[str, Weight]) -> Packed:
        packed = self._inner.pack(instance, weights)
        scales = (packed[place * PARTS + 1] for place in range(len(self.weights)))
        return (*packed, *(each.t().contiguous() for each in scales))

    def packed_bytes(self, packed: Packed) -> Mapping[Hashable, int]:
        extra = len(self.weights)
        return {**self._inner.packed_bytes(packed[:-extra]), **super().packed_bytes(packed[-extra:])}

    def of_rounded(self, instance: OpInstance) -> Callable[[Rounded, Packed], torch.Tensor]:
        few, extra = self._inner.of_rounded(instance), len(self.weights)

        def kernel(x: Rounded, w: Packed) -> torch.Tensor:
            if len(x.codes) < LEAST_ROWS:
                return few(x, w[:-extra])
            return self.many(instance, x, w[:-extra], w[-extra:])

        return kernel

    @abstractmethod
    def many(self, instance: OpInstance, x: Rounded, held: Packed, scales: Packed) -> torch.Tensor:
        """The op for x [M, K] with many rows: [M, N]."""

    def product(self, x: Rounded, weight: EightBitWeight, scales: torch.Tensor) -> torch.Tensor:
        """x [M, K], weight [N, K] -> [M, N] of the dtype that x was."""
        x = weight.alike(x)
        name = ROWS if weight.whole else BLOCKS
        return self._library.functions[name].call(
            XQ=x.codes, WQ=weight.values, x_scale=x.scales.t().contiguous(), w_scale=scales, dtype=x.dtype
        )


class AiterLinear(_AiterProducts):
    """Linear layers."""

    op = "linear"
    weights = ("weight",)

    def many(self, instance: OpInstance, x: Rounded, held: Packed, scales: Packed) -> torch.Tensor:
        return self.product(x, unpacked(instance, held), scales[0])


class AiterGatedMlp(_AiterProducts):
    """The gated MLP; between its products the activation rounds what it makes."""

    op = "gated_mlp"
    weights = ("gate_up", "down")

    def many(self, instance: OpInstance, x: Rounded, held: Packed, scales: Packed) -> torch.Tensor:
        gate_up = unpacked(instance, held, "gate_up")
        down = unpacked(instance, held[PARTS:], "down")
        kind, limit, offset = (instance.attrs[name] for name in ("kind", "limit", "up_offset"))
        both = self.product(x, gate_up, scales[0])
        inner = activate_round(both, kind, limit, offset, down.rounding)
        return self.product(inner, down, scales[1])


def _kind(instance: OpInstance, name: str) -> str:
    """Which of AITER's products a weight's scales ask for; "" for neither."""
    spec = instance.weights[name]
    scheme = spec.scheme
    assert scheme is not None
    assert scheme.rounding is not None
    whole = all(group in (0, spec.shape[-1]) for group in (scheme.group, scheme.rounding.group))
    if whole and scheme.group_rows == 1:
        return ROWS
    return BLOCKS if _blocks(scheme) else ""


def _blocks(scheme: QuantScheme) -> bool:
    assert scheme.rounding is not None
    sizes = {scheme.group, scheme.group_rows, scheme.rounding.group}
    return sizes == {_BLOCK} and scheme.packing is Packing.FLOAT8
