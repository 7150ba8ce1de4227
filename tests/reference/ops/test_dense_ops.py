"""Embedding, linear, norm, rope, activations, logits, LoRA and the MLP block against float64 computations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.samples import run
from hardpoint_platforms.quant import QuantTensor

pytestmark = pytest.mark.reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _wide(weight):
    """A weight as float64 (quantized ones element by element)."""
    if not isinstance(weight, QuantTensor):
        return weight.double()
    return _dequantize(weight)


def _dequantize(weight: QuantTensor) -> torch.Tensor:
    scheme = weight.scheme
    values = weight.values.numpy() if scheme.packing.name != "FLOAT8" else weight.values.float().numpy()
    out = np.zeros(weight.shape)
    for place in np.ndindex(*weight.shape):
        *lead, column = place
        row = values[tuple(lead)]
        if scheme.packing.name == "UINT4":
            code = int(row[column // 2]) >> 4 * (column % 2) & 15
        else:
            code = float(row[column])
        number = code if weight.codebook is None else float(weight.codebook[code])
        group = column // scheme.group
        block = (*lead[:-1], lead[-1] // scheme.group_rows)

        def level(fine, coarse, lead=block, group=group):
            value = float(fine[lead][group])
            return value * float(coarse[lead][group // scheme.super_group]) if coarse is not None else value

        out[place] = number * level(weight.scales, weight.super_scales)
        if weight.offsets is not None:
            out[place] += level(weight.offsets, weight.super_offsets)
    return torch.from_numpy(out)


def _nearest_float8(number: float) -> float:
    """The e4m3 number nearest to one of at most 448 in magnitude; of two, the one with the even last bit."""
    size = abs(number)
    step = 2.0 ** (max(math.frexp(size)[1] - 1, -6) - 3) if size else 1.0
    return math.copysign(step * round(size / step), number)  # Python's round is to even


def _rounded(x: torch.Tensor, rounding) -> torch.Tensor:
    """x [..., K] float64 as `Rounding` has it, number by number; scales and ratios in float32."""
    out = x.clone().reshape(-1, x.shape[-1])
    width, most = rounding.group or x.shape[-1], 127 if rounding.codes.value == "int8" else 448
    for row in out:
        for start in range(0, len(row), width):
            part = row[start : start + width].numpy()
            scale = np.float32(np.abs(part).max()) / np.float32(most)
            for place, number in enumerate(part):
                ratio = float(np.float32(number) / scale) if scale else 0.0
                code = round(ratio) if most == 127 else _nearest_float8(ratio)
                part[place] = code * float(scale)
    return out.reshape(x.shape)


def _erf(x):
    return torch.tensor([math.erf(v) for v in x.flatten().tolist()], dtype=torch.float64).reshape(x.shape)


ACTIVATIONS = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_quick": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "relu": lambda x: torch.where(x > 0, x, 0),
    "relu2": lambda x: torch.where(x > 0, x * x, 0),
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
    "tanh": torch.tanh,
    "softplus": lambda x: torch.log1p(torch.exp(x)),
}


def _gate(both, attrs):
    half = both.shape[-1] // 2
    gate, up = both[..., :half], both[..., half:]
    if attrs["limit"] is not None:
        gate, up = gate.clamp(max=attrs["limit"]), up.clamp(-attrs["limit"], attrs["limit"])
    return ACTIVATIONS[attrs["kind"]](gate) * (up + attrs["up_offset"])


def _norm(x, weights, attrs):
    if attrs["kind"] == "ln":
        x = x - x.mean(-1, keepdim=True)
    power = (x * x).sum(-1, keepdim=True)
    if attrs["kind"] != "l2":
        power = power / x.shape[-1]
    x = x / torch.sqrt(power + attrs["eps"])
    gain = weights.get("weight", torch.ones(()))
    x = x * (1 + gain if attrs["kind"] == "rms1p" else gain)
    return x + weights.get("bias", 0)


def _rope(arguments, weights, attrs):
    q, k, positions = arguments
    rotated, table = attrs["rotary_dim"], weights["table"]
    results = []
    for x in (q, k):
        out = x.clone()
        start = x.shape[-1] - rotated if attrs["tail"] else 0
        for token, position in enumerate(positions.long().tolist()):
            for pair in range(rotated // 2):
                a, b = (2 * pair, 2 * pair + 1) if attrs["interleaved"] else (pair, pair + rotated // 2)
                turn = torch.complex(table[position, pair], table[position, rotated // 2 + pair])
                z = torch.complex(x[token, :, start + a], x[token, :, start + b]) * turn
                out[token, :, start + a], out[token, :, start + b] = z.real, z.imag
        results.append(out)
    return tuple(results)


def _logits(arguments, weights, attrs):
    scores = (arguments[0] @ weights["weight"].T + weights.get("bias", 0)) * attrs["scale"]
    return scores if attrs["softcap"] is None else attrs["softcap"] * torch.tanh(scores / attrs["softcap"])


def _lora(arguments, weights, attrs):
    y, x, slots = arguments
    rows = [
        y[t] if s < 0 else y[t] + weights["b"][s] @ (weights["a"][s] @ x[t])
        for t, s in enumerate(slots.long().tolist())
    ]
    return torch.stack(rows)


def _mlp(arguments, weights, attrs):
    inner = _gate(arguments[0] @ weights["gate_up"].T + weights.get("gate_up_bias", 0), attrs)
    if attrs["rounding"] is not None:
        inner = _rounded(inner, attrs["rounding"])
    return inner @ weights["down"].T + weights.get("down_bias", 0)


def _behind_norm(product):
    def both(arguments, weights, attrs):
        total = arguments[0] + arguments[1]
        norm = {name: weights[f"norm_{name}"] for name in ("weight", "bias") if f"norm_{name}" in weights}
        normed = _norm(total, norm, {**attrs, "kind": attrs["norm_kind"]})
        if attrs["rounding"] is not None:
            normed = _rounded(normed, attrs["rounding"])
        return product((normed,), weights, attrs), total

    return both


def _linear(arguments, weights, attrs):
    return arguments[0] @ weights["weight"].T + weights.get("bias", 0)


ORACLES = {
    "embedding": lambda a, w, attrs: w["weight"][a[0].long()] * attrs["scale"],
    "linear": _linear,
    "norm": lambda a, w, attrs: _norm(a[0], w, attrs),
    "add_norm": lambda a, w, attrs: (_norm(a[0] + a[1], w, attrs), a[0] + a[1]),
    "rope": _rope,
    "activation": lambda a, w, attrs: ACTIVATIONS[attrs["kind"]](a[0]),
    "gated_activation": lambda a, w, attrs: _gate(a[0], attrs),
    "logits": _logits,
    "lora": _lora,
    "gated_mlp": _mlp,
    "norm_linear": _behind_norm(_linear),
    "norm_gated_mlp": _behind_norm(_mlp),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ORACLES)
def test_against_float64(name, dtype, providers, close):
    contract = CONTRACTS[name]
    for case in contract.samples(dtype):
        weights = {key: _wide(weight) for key, weight in case.weights.items()}
        arguments = tuple(x.double() for x in case.make())
        product = case.instance.weights.get("weight" if name in ("linear", "norm_linear") else "gate_up")
        scheme = product.scheme if product is not None else None
        rounding = scheme.rounding if scheme is not None else None
        if rounding is not None and not name.startswith("norm_"):
            arguments = (_rounded(arguments[0], rounding),)
        expected = ORACLES[name](arguments, weights, {**case.instance.attrs, "rounding": rounding})
        actual = run(providers[name], case)
        pairs = zip(actual, expected, strict=True) if isinstance(expected, tuple) else [(actual, expected)]
        for a, e in pairs:
            assert a.dtype == (torch.float32 if name == "logits" else dtype)
            close(a, e, contract.tolerance[dtype], case.instance.where)


def test_rope_turns_relative_positions(providers):
    """q(m).k(n) depends on m - n alone."""
    case = next(iter(CONTRACTS["rope"].samples(torch.float32)))
    provider = providers["rope"]
    packed = provider.pack(case.instance, case.weights)
    kernel = provider.build(case.instance)
    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)

    def score(m, n):
        return (kernel(q, k, torch.tensor([m]), packed)[0] * kernel(q, k, torch.tensor([n]), packed)[1]).sum()

    torch.testing.assert_close(score(7, 3), score(2004, 2000), atol=1e-3, rtol=1e-3)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3


def test_inputs_are_left_alone(providers):
    """The reference writes into nothing but paged state."""
    for name in ORACLES:
        for case in CONTRACTS[name].samples(torch.float32):
            provider = providers[name]
            arguments = case.make()
            packed = provider.pack(case.instance, case.weights)
            provider.build(case.instance)(*arguments, *([packed] if packed else []))
            assert all(torch.equal(a, b) for a, b in zip(arguments, case.make(), strict=True)), name
