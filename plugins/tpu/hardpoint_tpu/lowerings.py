"""ATen ops that torchax 0.0.13 has no lowering for, or none of all their arguments, as JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from hardpoint_tpu.sums import running_sum

#: Places per row that are looked for by comparing with every one; more are found by halving.
_FEW = 8


def add_lowerings(env: Any) -> None:
    """Give a torchax environment the ops of this file."""
    from torchax.ops.ops_registry import Operator

    for op, function in _JAX.items():
        env._ops[op] = Operator(op, function, True, True, False, False)
    for op, function in _TORCH.items():
        env._ops[op] = Operator(op, function, False, True, False, False)


def _searchsorted(
    ordered: Any,
    values: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    """Row by row, as torch has it; the rows of both are the same."""
    if sorter is not None:
        raise NotImplementedError("searchsorted with a sorter has no lowering")
    where = "right" if right or side == "right" else "left"

    def row(a: Any, v: Any) -> Any:
        return jnp.searchsorted(a, v, side=where, method="compare_all" if v.size <= _FEW else "scan")

    for _ in range(ordered.ndim - 1):
        row = jax.vmap(row)
    return row(ordered, values).astype(jnp.int32 if out_int32 else jnp.int64)


def _sort(x: Any, dim: int = -1, descending: bool = False, stable: bool = True) -> tuple[Any, Any]:
    """One sort for values and indices; equals keep their order."""
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    order = jnp.argsort(x, axis=dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, order, axis=dim), order.astype(jnp.int64)


def _sort_stable(x: Any, *, stable: bool = True, dim: int = -1, descending: bool = False) -> tuple[Any, Any]:
    return _sort(x, dim, descending)


def _topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Any, Any]:
    """Always sorted; of equals the lower index comes first."""
    if largest and dim in (-1, x.ndim - 1):
        values, order = jax.lax.top_k(x, k)
        return values, order.astype(jnp.int64)
    ordered, order = _sort(x, dim, descending=largest)
    return jax.lax.slice_in_dim(ordered, 0, k, axis=dim), jax.lax.slice_in_dim(order, 0, k, axis=dim)


def _cumsum(x: Any, dim: int, dtype: torch.dtype | None = None) -> Any:
    """As torch has it: bool counts in int64."""
    from torchax.ops.mappings import t2j_dtype

    x = x if dtype is None else x.astype(t2j_dtype(dtype))
    if x.ndim == 0:
        return x
    return jnp.moveaxis(running_sum(jnp.moveaxis(x, dim, -1)), -1, dim)


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """The weight as it lies: a transposed one would be copied in each step. float32 is multiplied as float32."""
    exact = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    out = jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), precision=exact)
    return out if bias is None else out + bias


def _unflatten(x: torch.Tensor, dim: int, sizes: Any) -> torch.Tensor:
    dim = dim % x.dim()
    return x.reshape((*x.shape[:dim], *sizes, *x.shape[dim + 1 :]))


_JAX = {
    torch.ops.aten.searchsorted.Tensor: _searchsorted,
    torch.searchsorted: _searchsorted,
    torch.ops.aten.sort: _sort,
    torch.nn.functional.linear: _linear,
    torch.ops.aten.linear: _linear,
    torch.ops.aten.linear.default: _linear,
    torch.ops.aten.cumsum: _cumsum,
    torch.ops.aten.cumsum.default: _cumsum,
    torch.ops.aten.topk: _topk,
    torch.ops.aten.topk.default: _topk,
    torch.ops.aten.sort.default: _sort,
    torch.ops.aten.sort.stable: _sort_stable,
}
_TORCH = {
    torch.Tensor.unflatten: _unflatten,
    torch.ops.aten.unflatten.int: _unflatten,
}
