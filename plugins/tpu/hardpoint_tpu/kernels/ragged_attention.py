"""Ragged paged attention that stores the new keys and values on its way: prompts, decodes and mixtures alike.

The host cuts each request's new tokens into blocks (see `hardpoint_tpu.plan`); the grid runs over the blocks, one after
another, in the order of the tokens. For its block a program

    1. reads the pages that the block sees, some at a time, the next ones while the present ones are worked on;
    2. puts the block's own new keys and values into those of the pages that they belong to, and writes these back;
    3. attends with an online softmax in float32, head by head.

A page is [page_tokens, heads * width]: a head is a slice of whole tiles. New rows find their place in a page through a
product with a 0/1 matrix, which is exact, since no row of it has more than one 1. A later block of the same request
reads what an earlier one wrote; a block writes whole rows of the output, and what it writes beyond its last token, the
blocks that come after it overwrite.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

#: Keys that are worked on at once, rounded up to whole pages.
KEYS_AT_ONCE = 128
#: Rows of a tile: slices of rows in memory begin at multiples of it.
TILE = 16
_LANES = 128
_LOW = -1e30


@dataclass(frozen=True)
class Shape:
    """What is static about a call.

    Attributes:
        heads, kv_heads: of queries, of keys; width, v_width: of a key, of a value; page_tokens: of a page.
        block: most new tokens of a program.
        scale, window, softcap: of the scores; alibi: whether slopes are given.
    """

    heads: int
    kv_heads: int
    width: int
    v_width: int
    page_tokens: int
    block: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    alibi: bool = False

    @property
    def shared(self) -> int:
        """Query heads per key head, padded to whole tiles."""
        return -(-(self.heads // self.kv_heads) // TILE) * TILE

    @property
    def pages(self) -> int:
        """Pages that are worked on at once."""
        return max(1, KEYS_AT_ONCE // self.page_tokens)

    @property
    def fresh(self) -> int:
        """New rows that a program reads: its block, from the tile's edge before it."""
        return -(-self.block // TILE) * TILE + TILE


def ragged_attention(
    q: Any,
    k: Any,
    v: Any,
    pools: tuple[Any, Any],
    plan: tuple[Any, Any],
    extra: tuple[Any, Any],
    shape: Shape,
    interpret: Any = False,
) -> tuple[Any, Any, Any]:
    """Attend and store.

    q: [T, heads, width]; k: [T, kv_heads, width]; v: [T, kv_heads, v_width].
    pools: keys [pages, page_tokens, kv_heads * width] and values; both are replaced.
    plan: work int32 [4, N]: request, first token in the batch, its position, number of tokens (0: nothing to do) of
        each block, in the order of the tokens; tables int32 [R, P].
    extra: float32 [heads] sinks (minus infinity: none), float32 [heads] slopes.
    Returns out [T, heads, v_width], keys, values. Rows of tokens in no block hold anything.
    """
    tokens, group = q.shape[0], shape.heads // shape.kv_heads
    keys, values = pools
    rows = tokens + shape.block
    queries = jnp.pad(
        q.reshape(tokens, shape.kv_heads, group, shape.width),
        ((0, shape.block), (0, 0), (0, shape.shared - group), (0, 0)),
    ).reshape(rows, shape.kv_heads * shape.shared, shape.width)
    behind = -tokens % TILE + shape.fresh
    new = [
        jnp.pad(x.reshape(tokens, -1).astype(pool.dtype), ((0, behind), (0, 0))) for x, pool in ((k, keys), (v, values))
    ]
    per_row = [_spread_over_rows(x, shape) for x in extra]
    out = jax.ShapeDtypeStruct((rows, shape.kv_heads * shape.shared, shape.v_width), q.dtype)
    memory = pl.BlockSpec(memory_space=pl.ANY)
    whole = [pl.BlockSpec(x.shape, lambda i, *_: (0, 0, 0)) for x in per_row]
    # within a kernel whole numbers have 32 bits, whatever they have around it
    with jax.enable_x64(False):
        done, keys, values = pl.pallas_call(
            functools.partial(_kernel, shape=shape),
            out_shape=(out, *(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in (keys, values))),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=(plan[0].shape[1],),
                in_specs=[memory, memory, memory, *whole, memory, memory],
                out_specs=(memory, memory, memory),
                scratch_shapes=_scratch(q.dtype, keys.dtype, shape),
            ),
            # numbered over all operands, the two scalar ones first
            input_output_aliases={7: 1, 8: 2},
            interpret=interpret,
            compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        )(*plan, queries, *new, *per_row, keys, values)
    heads = done[:tokens].reshape(tokens, shape.kv_heads, shape.shared, shape.v_width)[:, :, :group]
    return heads.reshape(tokens, shape.heads, shape.v_width), keys, values


def _spread_over_rows(values: Any, shape: Shape) -> Any:
    """float32 [heads] as [kv_heads, block * shared, lanes]: one row per token and head of a block."""
    group = shape.heads // shape.kv_heads
    padded = jnp.pad(values.reshape(shape.kv_heads, group), ((0, 0), (0, shape.shared - group)))
    rows = jnp.tile(padded, (1, shape.block))
    return jnp.broadcast_to(rows[..., None], (*rows.shape, _LANES)).astype(jnp.float32)


def _scratch(dtype: Any, kept: Any, shape: Shape) -> list[Any]:
    rows, sums = shape.block * shape.shared, shape.kv_heads
    page = (2, shape.pages, shape.page_tokens)
    return [
        pltpu.VMEM((shape.block, shape.kv_heads * shape.shared, shape.width), dtype),
        pltpu.VMEM((shape.block, shape.kv_heads * shape.shared, shape.v_width), dtype),
        pltpu.VMEM((shape.fresh, shape.kv_heads * shape.width), kept),
        pltpu.VMEM((shape.fresh, shape.kv_heads * shape.v_width), kept),
        pltpu.VMEM((*page, shape.kv_heads * shape.width), kept),
        pltpu.VMEM((*page, shape.kv_heads * shape.v_width), kept),
        pltpu.VMEM((sums, rows, _LANES), jnp.float32),  # largest score so far
        pltpu.VMEM((sums, rows, _LANES), jnp.float32),  # sum of weights
        pltpu.VMEM((sums, rows, shape.v_width), jnp.float32),  # weighted values
        pltpu.SemaphoreType.DMA((3,)),
        pltpu.SemaphoreType.DMA((2, 2)),
        pltpu.SemaphoreType.DMA((2,)),
    ]


def _kernel(
    work: Any,
    tables: Any,
    q: Any,
    new_k: Any,
    new_v: Any,
    sinks: Any,
    slopes: Any,
    in_k: Any,
    in_v: Any,
    out: Any,
    keys: Any,
    values: Any,
    q_here: Any,
    out_here: Any,
    k_new: Any,
    v_new: Any,
    k_here: Any,
    v_here: Any,
    top: Any,
    total: Any,
    mixed: Any,
    once: Any,
    reading: Any,
    writing: Any,
    *,
    shape: Shape,
) -> None:
    """One block. `in_k` and `in_v` are the same memory as `keys` and `values`."""
    del in_k, in_v
    index = pl.program_id(0)
    request, first, position, count = (work[i, index] for i in range(4))

    @pl.when(count > 0)
    def _block() -> None:
        edge = pl.multiple_of(first // TILE * TILE, TILE)
        copies = [
            pltpu.make_async_copy(q.at[pl.ds(first, shape.block)], q_here, once.at[0]),
            pltpu.make_async_copy(new_k.at[pl.ds(edge, shape.fresh)], k_new, once.at[1]),
            pltpu.make_async_copy(new_v.at[pl.ds(edge, shape.fresh)], v_new, once.at[2]),
        ]
        for copy in copies:
            copy.start()
        pages = _Pages(tables, request, (keys, values), (k_here, v_here), reading, writing, shape)
        end = position + count
        low = jnp.int32(0) if shape.window is None else jnp.maximum(position - shape.window + 1, 0)
        span = shape.pages * shape.page_tokens
        begin, stop = low // span, (end + span - 1) // span
        pages.start(begin, end)
        for copy in copies:
            copy.wait()
        for head in range(shape.kv_heads):
            top[head] = jnp.maximum(sinks[head], _LOW)
            total[head] = jnp.where(sinks[head] > _LOW, 1.0, 0.0)
            mixed[head] = jnp.zeros_like(mixed[head])

        def step(chunk: Any, _: Any) -> Any:
            slot = chunk % 2

            @pl.when(chunk + 1 < stop)
            def _next() -> None:
                pages.start(chunk + 1, end)

            pages.wait(chunk, end)

            @pl.when((chunk + 1) * span > position)
            def _store() -> None:
                _insert((k_here, v_here), (k_new, v_new), slot, chunk, (first - edge, position, count), shape)
                pages.write(chunk, position, end)

            for head in range(shape.kv_heads):
                _attend(head, slot, chunk, position, end, (q_here, k_here, v_here, slopes), (top, total, mixed), shape)
            return 0

        jax.lax.fori_loop(begin, stop, step, 0)
        for head in range(shape.kv_heads):
            done = mixed[head] / jnp.maximum(total[head][:, :1], 1e-30)
            here = slice(head * shape.shared, (head + 1) * shape.shared)
            out_here[:, here, :] = done.reshape(shape.block, shape.shared, shape.v_width).astype(out_here.dtype)
        copy = pltpu.make_async_copy(out_here, out.at[pl.ds(first, shape.block)], once.at[0])
        copy.start()
        copy.wait()


@dataclass(frozen=True)
class _Pages:
    """Moves pages of one request, a chunk of `shape.pages` at a time, into one of two places and back."""

    tables: Any
    request: Any
    pools: tuple[Any, Any]
    here: tuple[Any, Any]
    reading: Any
    writing: Any
    shape: Shape

    def start(self, chunk: Any, end: Any) -> None:
        """Begin to read a chunk."""
        self._read(chunk, end, lambda copy: copy.start())

    def wait(self, chunk: Any, end: Any) -> None:
        """Wait until it is there."""
        self._read(chunk, end, lambda copy: copy.wait())

    def write(self, chunk: Any, position: Any, end: Any) -> None:
        """Write back the pages of a chunk that hold positions from `position` on, and wait."""

        def page(number: Any, place: Any, slot: Any, first: Any) -> None:
            @pl.when(first + self.shape.page_tokens > position)
            def _held() -> None:
                for part in range(2):
                    source = self.here[part].at[slot, number]
                    copy = pltpu.make_async_copy(source, self.pools[part].at[place], self.writing.at[part])
                    copy.start()
                    copy.wait()

        self._each(chunk, end, page)

    def _read(self, chunk: Any, end: Any, do: Any) -> None:
        def page(number: Any, place: Any, slot: Any, first: Any) -> None:
            for part in range(2):
                target = self.here[part].at[slot, number]
                do(pltpu.make_async_copy(self.pools[part].at[place], target, self.reading.at[slot, part]))

        self._each(chunk, end, page)

    def _each(self, chunk: Any, end: Any, do: Any) -> None:
        """do(number in the chunk, page id, slot, first position) for each page of a chunk that begins before `end`."""
        slot = chunk % 2

        def page(number: Any, _: Any) -> Any:
            at = chunk * self.shape.pages + number

            @pl.when(at * self.shape.page_tokens < end)
            def _held() -> None:
                do(number, self.tables[self.request, at], slot, at * self.shape.page_tokens)

            return 0

        jax.lax.fori_loop(0, self.shape.pages, page, 0)


def _insert(here: Any, new: Any, slot: Any, chunk: Any, block: tuple[Any, Any, Any], shape: Shape) -> None:
    """Put the block's new rows into a chunk. block: place of its first row among the new ones, position, count."""
    offset, position, count = block
    span = shape.pages * shape.page_tokens
    at = chunk * span + jax.lax.broadcasted_iota(jnp.int32, (span, shape.fresh), 0)
    row = jax.lax.broadcasted_iota(jnp.int32, (span, shape.fresh), 1)
    mine = (at >= position) & (at < position + count) & (row == at - position + offset)
    at = chunk * span + jax.lax.broadcasted_iota(jnp.int32, (span, 1), 0)
    fresh = (at >= position) & (at < position + count)
    row = jax.lax.broadcasted_iota(jnp.int32, (shape.fresh, 1), 0)
    own = (row >= offset) & (row < offset + count)
    for kept, rows in zip(here, new, strict=True):
        # the neighbours' rows may hold NaN, and 0 * nan is nan
        given = jnp.where(own, rows[...], jnp.zeros_like(rows))
        chosen = jax.lax.dot(
            mine.astype(rows.dtype), given, preferred_element_type=jnp.float32, precision=_exact(rows.dtype)
        ).astype(rows.dtype)
        old = kept[slot].reshape(span, -1)
        kept[slot] = jnp.where(fresh, chosen, old).reshape(shape.pages, shape.page_tokens, -1)


def _attend(
    head: int,
    slot: Any,
    chunk: Any,
    position: Any,
    end: Any,
    given: tuple[Any, ...],
    sums: tuple[Any, ...],
    shape: Shape,
) -> None:
    """One head of a chunk, added to its sums."""
    q_here, k_here, v_here, slopes = given
    top, total, mixed = sums
    span, rows = shape.pages * shape.page_tokens, shape.block * shape.shared
    queries = q_here[:, head * shape.shared : (head + 1) * shape.shared, :].reshape(rows, shape.width)
    keys = k_here[slot, :, :, head * shape.width : (head + 1) * shape.width].reshape(span, shape.width)
    values = v_here[slot, :, :, head * shape.v_width : (head + 1) * shape.v_width].reshape(span, shape.v_width)
    scores = jax.lax.dot_general(
        queries,
        keys.astype(queries.dtype),
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
        precision=_exact(queries.dtype),
    ) * jnp.float32(shape.scale)
    if shape.softcap is not None:
        scores = jnp.float32(shape.softcap) * jnp.tanh(scores / jnp.float32(shape.softcap))
    at = chunk * span + jax.lax.broadcasted_iota(jnp.int32, (rows, span), 1)
    distance = position + jax.lax.broadcasted_iota(jnp.int32, (rows, span), 0) // shape.shared - at
    if shape.alibi:
        scores = scores - slopes[head][:, :1] * distance.astype(jnp.float32)
    seen = (distance >= 0) & (at < end)
    if shape.window is not None:
        seen = seen & (distance < shape.window)
    scores = jnp.where(seen, scores, jnp.float32(_LOW))
    before = top[head][:, :1]
    best = jnp.maximum(before, scores.max(1, keepdims=True))
    shrink = jnp.exp(before - best)
    weights = jnp.where(seen, jnp.exp(scores - best), 0.0)
    total[head] = jnp.broadcast_to(total[head][:, :1] * shrink + weights.sum(1, keepdims=True), (rows, _LANES))
    top[head] = jnp.broadcast_to(best, (rows, _LANES))
    # pages that were not read hold anything, and 0 * nan is nan
    inside = chunk * span + jax.lax.broadcasted_iota(jnp.int32, (span, 1), 0) < end
    low = 0 if shape.window is None else position - shape.window + 1
    inside = inside & (chunk * span + jax.lax.broadcasted_iota(jnp.int32, (span, 1), 0) >= low)
    values = jnp.where(inside, values.astype(jnp.float32), 0.0)
    mixed[head] = mixed[head] * shrink + jax.lax.dot(
        weights, values, preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST
    )


def _exact(dtype: Any) -> Any:
    """Products of float32 are computed in float32, not in bfloat16."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
