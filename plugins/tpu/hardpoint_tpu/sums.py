"""Running sums as products with a triangle of ones.

XLA spreads a running sum over the processor into a tree of slices and sums that takes longer to compile than a whole
layer, and a TPU has a unit for products.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

_BLOCK = 128


def running_sum(x: Any) -> Any:
    """Sums of x [..., n] up to and with each place of the last dimension, in x's dtype; bool counts in int64."""
    if x.dtype == jnp.bool_:
        return running_sum(x.astype(jnp.float32)).astype(jnp.int64)  # whole up to 2**24, more than a vocabulary has
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.cumsum(x, axis=-1)
    n = x.shape[-1]
    blocks = -(-n // _BLOCK)
    size = _BLOCK if blocks > 1 else n
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, blocks * size - n)]).reshape(*x.shape[:-1], blocks, size)
    places = jnp.arange(size)
    triangle = (places[:, None] <= places[None, :]).astype(x.dtype)
    inner = jnp.matmul(padded, triangle, precision=jax.lax.Precision.HIGHEST)
    if blocks > 1:
        whole = inner[..., -1]
        inner = inner + (running_sum(whole) - whole)[..., None]
    return inner.reshape(*x.shape[:-1], blocks * size)[..., :n]
