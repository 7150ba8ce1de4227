"""Activations, plain and gated, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint_torch_gpu.kernels.ahead import after_others, ahead

#: Kinds by number, as kernels take them.
KINDS = {
    name: tl.constexpr(number)
    for number, name in enumerate(
        ("silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2", "sigmoid", "tanh", "softplus")
    )
}
#: Columns of a program and its warps, for fewer rows than `_MANY` and for others: of seven the fastest on an H200.
_MANY, _FEW_ROWS, _MANY_ROWS = 64, (1024, 4), (2048, 8)


@triton.jit
def _tanh(x):
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def activated(x, KIND: tl.constexpr):
    if KIND == 0:
        return x / (1.0 + tl.exp(-x))
    elif KIND == 1:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == 2:
        return 0.5 * x * (1.0 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif KIND == 3:
        return x / (1.0 + tl.exp(-1.702 * x))
    elif KIND == 4:
        return tl.maximum(x, 0.0)
    elif KIND == 5:
        return tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    elif KIND == 6:
        return 1.0 / (1.0 + tl.exp(-x))
    elif KIND == 7:
        return _tanh(x)
    else:
        return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _activate(
    x_ptr, out_ptr, inner, limit, offset,
    GATED: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    after_others(AHEAD)
    if GATED:
        start = x_ptr + row * 2 * inner
        gate = tl.load(start + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(start + inner + column, mask=inside, other=0.0).to(tl.float32)
        if LIMIT:
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit)
        y = activated(gate, KIND) * (up + offset)
    else:
        y = activated(tl.load(x_ptr + row * inner + column, mask=inside, other=0.0).to(tl.float32), KIND)
    tl.store(out_ptr + row * inner + column, y.to(out_ptr.dtype.element_ty), mask=inside)


def activate(x: torch.Tensor, kind: str, gated: bool, limit: float | None = None, offset: float = 0.0) -> torch.Tensor:
    """x [..., F], or [..., 2F] with the gate in the first half, -> [..., F]."""
    x = x.contiguous()
    inner = x.shape[-1] // 2 if gated else x.shape[-1]
    out = torch.empty((*x.shape[:-1], inner), dtype=x.dtype, device=x.device)
    if out.numel():
        rows = out.numel() // inner
        block, warps = _FEW_ROWS if rows < _MANY else _MANY_ROWS
        block = min(triton.next_power_of_2(inner), block)
        _activate[(rows, triton.cdiv(inner, block))](
            x, out, inner, 0.0 if limit is None else limit, offset,
            GATED=gated, KIND=KINDS[kind].value, LIMIT=limit is not None, BLOCK=block, num_warps=warps, **ahead(x),
        )  # fmt: skip
    return out
