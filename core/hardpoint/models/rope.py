"""Rotary embeddings from a config: both spellings, every scaling, the table of cos and sin, and the context they give.

Frequencies are fixed when the model is built. Scalings that depend on the length of a sequence (`dynamic`, `longrope`)
are fixed by the longest sequence the engine serves: one batch holds sequences of many lengths, and keys already in the
cache cannot be rotated again.

Sources: linear (kaiokendev), dynamic NTK (bloc97, emozilla), YaRN (arXiv 2309.00071), LongRoPE (arXiv 2402.13753),
Llama 3.1's frequency bands (Meta's release).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hardpoint.errors import ConfigError
from hardpoint.models.fields import Fields, positive_number
from hardpoint.models.spec import RopeSpec

LAYER_TYPES = ("full_attention", "sliding_attention")
_ALIASES = {"su": "longrope", "mrope": "default", "none": "default", "": "default"}
#: Scalings whose context is a factor times the length the model was trained on.
_STRETCHING = ("linear", "dynamic", "yarn")


@dataclass(frozen=True)
class RopeParameters:
    """One layer type's rope in one spelling.

    Attributes:
        kind: default, linear, dynamic, yarn, longrope, llama3 or proportional.
        key: the config's key, for messages.
        theta: base.
        partial: share of a head that is rotated.
        original: context that the frequencies were trained for.
        context: `max_position_embeddings`.
        values: the config's own dict.
    """

    kind: str
    key: str
    theta: float
    partial: float
    original: int
    original_given: bool
    context: int
    values: Mapping[str, Any]

    def number(self, name: str) -> float:
        """A number above zero that must be there."""
        return positive_number(self.values.get(name), f"{self.key}.{name}")

    def optional(self, name: str) -> float | None:
        """A number above zero, or None where it is missing, null or zero."""
        return self.number(name) if self.values.get(name) else None

    def factors(self, name: str, pairs: int) -> torch.Tensor:
        """fp32 [pairs], one factor per rotated pair."""
        value = self.values.get(name)
        if not isinstance(value, list | tuple) or len(value) != pairs:
            raise ConfigError(f"config.json: '{self.key}.{name}' must list {pairs} numbers, got {value!r}")
        numbers = [positive_number(item, f"{self.key}.{name}") for item in value]
        return torch.tensor(numbers, dtype=torch.float32)


def parameters(
    fields: Fields, layer_type: str = "full_attention", default_theta: float = 10000.0
) -> RopeParameters | None:
    """The rope of one layer type, from `rope_scaling` (older) or `rope_parameters` (newer). None: no rotation.

    `rope_scaling` goes first where both are there, so that an override in the older spelling works on a newer config.
    Raises ConfigError for an unknown type or a bad number, naming the key.
    """
    newer, older = fields.section("rope_parameters"), fields.section("rope_scaling")
    key, values = ("rope_scaling", older) if older else ("rope_parameters", newer)
    if any(name in values for name in LAYER_TYPES):
        values = values.get(layer_type, {})
        if values is None:
            return None
        key = f"{key}.{layer_type}"
    theta = values.get("rope_theta") or newer.get("rope_theta") or fields.raw("rope_theta") or default_theta
    partial = values.get("partial_rotary_factor") or fields.raw("partial_rotary_factor") or 1.0
    word = values.get("rope_type") or values.get("type") or "default"
    kind = _ALIASES.get(word, word)
    if kind not in _FREQUENCIES:
        name = "rope_type" if values.get("rope_type") else "type"
        raise ConfigError(
            f"config.json: '{key}.{name}' is {word!r}; known are {', '.join(sorted(_FREQUENCIES))}",
            hint="replace it with --override, or serve a model whose rope scaling is known",
        )
    context = fields.integer("max_position_embeddings")
    original = fields.raw("original_max_position_embeddings") or values.get("original_max_position_embeddings")
    return RopeParameters(
        kind=kind,
        key=key,
        theta=positive_number(theta, "rope_theta"),
        partial=positive_number(partial, "partial_rotary_factor"),
        original=int(positive_number(original or context, f"{key}.original_max_position_embeddings")),
        original_given=original is not None,
        context=context,
        values=values,
    )


def context_length(rope: RopeParameters | None, context: int) -> int:
    """The longest sequence the model is made for.

    A stretching scaling gives factor * original length; the original length is `max_position_embeddings` where the
    config names none. Elsewhere `max_position_embeddings` already is the answer.
    """
    if rope is None or rope.kind not in _STRETCHING:
        return context
    return int(rope.original * _factor(rope))


def rope_spec(rope: RopeParameters, head_dim: int, length: int, *, interleaved: bool = False) -> RopeSpec:
    """Frequencies for heads of `head_dim` and sequences of up to `length` tokens."""
    inv_freq, mscale = _FREQUENCIES[rope.kind](rope, head_dim, length)
    if not 0 < 2 * len(inv_freq) <= head_dim:
        raise ConfigError(
            f"config.json: heads of {head_dim} dims cannot be rotated by {len(inv_freq)} pairs "
            "('head_dim', 'partial_rotary_factor')"
        )
    return RopeSpec(tuple(inv_freq.tolist()), mscale, interleaved)


def rope_table(spec: RopeSpec, positions: int) -> torch.Tensor:
    """fp32 [positions, rotary_dim]: cos, then sin, of position * frequency, times mscale."""
    inv_freq = torch.tensor(spec.inv_freq, dtype=torch.float32)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * inv_freq
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * spec.mscale


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's correction of the attention temperature for a context stretched by `factor`."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _factor(rope: RopeParameters) -> float:
    """The scaling factor; where it is left out, the ratio of the two context lengths that the config names."""
    if rope.values.get("factor") is None and rope.kind == "yarn" and rope.original_given:
        return rope.context / rope.original
    return rope.number("factor")


def _plain(theta: float, dim: int) -> torch.Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))


def _dim(rope: RopeParameters, head_dim: int) -> int:
    return int(head_dim * rope.partial)


def _default(rope: RopeParameters, head_dim: int, length: int) -> tuple[torch.Tensor, float]:
    return _plain(rope.theta, _dim(rope, head_dim)), 1.0


def _linear(rope: RopeParameters, head_dim: int, length: int) -> tuple[torch.Tensor, float]:
    return _plain(rope.theta, _dim(rope, head_dim)) / _factor(rope), 1.0


def _dynamic(rope: RopeParameters, head_dim: int, length: int) -> tuple[torch.Tensor, float]:
    dim, factor = _dim(rope, head_dim), _factor(rope)
    stretch = factor * max(length, rope.context) / rope.context - (factor - 1)
    return _plain(rope.theta * stretch ** (dim / (dim - 2)), dim), 1.0


def _yarn(rope: RopeParameters, head_dim: int, length: int) -> tuple[torch.Tensor, float]:
    dim, factor = _dim(rope, head_dim), _factor(rope)
    mscale, all_dim = rope.optional("mscale"), rope.optional("mscale_all_dim")
    scale = rope.optional("attention_factor")
    if scale is None and mscale and all_dim:
        scale = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    elif scale is None:
        scale = yarn_mscale(factor)

    def dim_of(rotations: float) -> float:
        return dim * math.log(rope.original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.optional("beta_fast") or 32), dim_of(rope.optional("beta_slow") or 1)
    if rope.values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    frequencies = rope.theta ** (torch.arange(0, dim, 2).float() / dim)
    keep = 1 - ramp
    return 1.0 / (factor * frequencies) * (1 - keep) + 1.0 / frequencies * keep, scale


def _longrope(rope: RopeParameters, head_dim: int, length: int) -> tuple[torch.Tensor, float]:
    dim = _dim(rope, head_dim)
    # Both lists are checked, so that a bad one does not hide until --max-model-len is raised.
    short, long = rope.factors("short_factor", dim // 2), rope.factors("long_factor", dim // 2)
    factor = rope.optional("factor") or rope.context / rope.original
    scale = rope.optional("attention_factor")
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(rope.original)) if factor > 1 else 1.0
    stretch = long if length > rope.original else short
    return 1.0 / (stretch * rope.theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)), scale


def _llama3(rope: RopeParameters, head_dim: int, length: int) -> tuple[torch.Tensor, float]:
    inv_freq = _plain(rope.theta, _dim(rope, head_dim))
    factor, low, high = rope.number("factor"), rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise ConfigError(f"config.json: '{rope.key}.high_freq_factor' must be above low_freq_factor, got {high}")
    wavelength = 2 * math.pi / inv_freq
    slow = torch.where(wavelength > rope.original / low, inv_freq / factor, inv_freq)
    smooth = (rope.original / wavelength - low) / (high - low)
    between = (wavelength >= rope.original / high) & (wavelength <= rope.original / low)
    return torch.where(between, (1 - smooth) * slow / factor + smooth * slow, slow), 1.0


def _proportional(rope: RopeParameters, head_dim: int, length: int) -> tuple[torch.Tensor, float]:
    rotated = int(rope.partial * head_dim // 2)
    exponents = torch.arange(0, 2 * rotated, 2, dtype=torch.int64).float() / head_dim
    still = torch.zeros(head_dim // 2 - rotated)
    inv_freq = torch.cat((1.0 / (rope.theta**exponents), still))
    return inv_freq / (rope.optional("factor") or 1.0), 1.0


_FREQUENCIES: Mapping[str, Callable[[RopeParameters, int, int], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}
