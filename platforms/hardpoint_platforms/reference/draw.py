"""Random numbers as a function of (seed, position), and a draw from weights by inverting the distribution function.

No generator state: the same (seed, position) gives the same number alone or in any batch, on any device, in any order.
The integer mix is the finalizer of SplitMix64 (Steele, Lea, Flood 2014), in int64 arithmetic that wraps around.
"""

from __future__ import annotations

import torch

#: Streams of one (seed, position): the draw, and the acceptance of a draft token.
DRAW, ACCEPT = 0, 1

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: int64 >> keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: torch.Tensor) -> torch.Tensor:
    """int64 -> int64, a bijection that scatters neighbours."""
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def uniform(seeds: torch.Tensor, positions: torch.Tensor, stream: int = DRAW) -> torch.Tensor:
    """float64 in [0, 1), multiples of 2**-48, from int64 seeds and positions of one shape."""
    key = mix(seeds + _signed((stream + 1) * _STEP))
    bits = mix(key + (positions + 1) * _signed(_STEP))
    return _shift_right(bits, 16).to(torch.float64) * 2.0**-48


def pick(weights: torch.Tensor, u: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    """Index drawn from each row of weights, float64 [R, V], not normalized, by u in [0, 1), float64 [R].

    A row without weight, or with one that is not finite, gives `otherwise`, int64 [R].
    """
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1]
    # right=True skips indices without weight: their cumulative weight equals the one before
    index = torch.searchsorted(cumulative, (u * total)[:, None], right=True)[:, 0]
    sound = (total > 0) & torch.isfinite(total)
    return torch.where(sound, index.clamp(max=weights.shape[1] - 1), otherwise)
