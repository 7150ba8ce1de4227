"""A small decoder, and requests that grow: the inputs of one step after another, padded to any bucket.

The step is embedding, norm, attention, a gated activation, logits and a draw over the device's bound ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from hardpoint_platforms.batch import AttentionBatch, LogitBias, Penalties, SamplingInputs
from hardpoint_platforms.binding import BoundOp, OpTable
from hardpoint_platforms.conformance.subject import Subject
from hardpoint_platforms.device import Device
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Packed, Weight
from hardpoint_platforms.ops.samples import Source, specs
from hardpoint_platforms.ops.sampling import sampling_inputs
from hardpoint_platforms.ops.table import op_table
from hardpoint_platforms.program import BIAS_ENTRIES, TOP_LOGPROBS, Bucket, SamplingShape, StepInputs, StepOutputs
from hardpoint_platforms.state_cache import CacheGroup, CacheLayout, LayerCache, State
from hardpoint_platforms.trees import mapped

VOCAB, HIDDEN, HEADS, KV_HEADS, WIDTH, INNER = 61, 32, 4, 2, 8, 48
MAX_TOKENS, MAX_REQUESTS, PAGES = 64, 8, 80
#: Tokens of the longest sequence.
LONGEST = 4 * MAX_TOKENS
#: (request, new tokens) of each request of a step.
Step = Sequence[tuple[int, int]]


class TinyDecoder:
    """One layer over the ops of a table. `weights` follow the order in which the ops were bound."""

    def __init__(self, device: Device, table: OpTable, dtype: torch.dtype, seed: int) -> None:
        self._device, self._table, self._dtype, self._source = device, table, dtype, Source(seed)
        self._packed: list[Packed] = []
        matrix = partial(self._source.matrix, dtype=dtype)
        fused = (HEADS + 2 * KV_HEADS) * WIDTH
        self.embedding = self._bind("embedding", weight=self._source.normal(VOCAB, HIDDEN, dtype=dtype))
        self.norm = self._bind("norm", {"kind": "rms"}, weight=self._source.normal(HIDDEN) + 2.0)
        self.qkv = self._linear(HIDDEN, fused)
        sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": WIDTH, "v_head_dim": WIDTH, "scale": WIDTH**-0.5}
        self.attention = self._bind("attention", sizes)
        self.out = self._linear(HEADS * WIDTH, HIDDEN)
        self.up = self._linear(HIDDEN, 2 * INNER)
        self.gate = self._bind("gated_activation", {"kind": "silu"})
        self.down = self._linear(INNER, HIDDEN)
        self.head = self._bind("logits", weight=matrix(VOCAB, HIDDEN))
        self.sample = table.bind(CONTRACTS["sample"].instance("sampler", torch.float32))
        self.weights = tuple(self._packed)
        self.planners = table.planners

    def step(self, inputs: StepInputs, state: State, weights: tuple[Packed, ...]) -> tuple[StepOutputs, State]:
        """The step function: no shape depends on data, nothing is read back."""

        def call(bound: tuple[BoundOp, int], *arguments: Any) -> Any:
            return bound[0].kernel(*arguments, weights[bound[1]])

        x = call(self.embedding, inputs.token_ids)
        fused = call(self.qkv, call(self.norm, x))
        q, k, v = fused.split((HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH), dim=-1)
        plan = inputs.plans[self.attention[0].plan_index]
        mixed, state = self.attention[0].kernel(
            q.unflatten(-1, (HEADS, WIDTH)), k.unflatten(-1, (KV_HEADS, WIDTH)), v.unflatten(-1, (KV_HEADS, WIDTH)),
            state, plan,
        )  # fmt: skip
        x = x + call(self.out, mixed.flatten(-2))
        x = x + call(self.down, self.gate[0].kernel(call(self.up, x)))
        logits = call(self.head, x.index_select(0, inputs.logits_index))
        drawn = self.sample.kernel(logits, inputs.sampling)
        finite = torch.isfinite(logits.amax(-1)) if drawn.finite is None else drawn.finite
        wanted = inputs.hidden_index
        return StepOutputs(drawn, finite, None if wanted is None else x.index_select(0, wanted)), state

    def _linear(self, columns: int, rows: int) -> tuple[BoundOp, int]:
        weight = self._source.matrix(rows, columns, self._dtype)
        return self._bind("linear", {"in_features": columns, "out_features": rows}, weight=weight)

    def _bind(self, op: str, attrs: dict[str, Any] | None = None, **weights: Weight) -> tuple[BoundOp, int]:
        where = f"step.{op}.{len(self._packed)}"
        instance = CONTRACTS[op].instance(where, self._dtype, specs(weights, self._dtype), **(attrs or {}))
        bound = self._table.bind(instance)
        if not weights:
            return bound, -1
        there = {name: mapped(weight, self._device.to_device) for name, weight in weights.items()}
        self._packed.append(bound.provider.pack(instance, there))
        return bound, len(self._packed) - 1


@dataclass
class Stage:
    """A decoder with a state and requests that grow: makes the inputs of one step after another."""

    device: Device
    decoder: TinyDecoder
    state: State
    layout: CacheLayout
    seed: int

    def __post_init__(self) -> None:
        source = np.random.default_rng(self.seed)
        self._tokens = source.integers(0, VOCAB, (MAX_REQUESTS, 4096))
        self._free = [int(page) for page in 1 + source.permutation(PAGES - 1)]
        self._pages: dict[int, list[int]] = {}
        self._done = [0] * MAX_REQUESTS

    def inputs(self, step: Step, bucket: Bucket, **sampling: Any) -> StepInputs:
        """The next step, padded to the bucket."""
        page_tokens, rows = self.layout.page_tokens, []
        for request, count in step:
            first = self._done[request]
            held = self._pages.setdefault(request, [])
            while len(held) * page_tokens < first + count:
                held.append(self._free.pop())
            self._done[request] = first + count
            rows.append((first, self._tokens[request, first : first + count], held))
        return self._padded(rows, bucket, sampling)

    def idle(self, bucket: Bucket) -> StepInputs:
        """What a program is prepared with: one token that is stored in page 0."""
        return self._padded([(0, self._tokens[0, :1], [0])], bucket, {})

    def _padded(
        self, rows: list[tuple[int, np.ndarray[Any, Any], list[int]]], bucket: Bucket, sampling: dict[str, Any]
    ) -> StepInputs:
        """Rows of (tokens computed before, new tokens, pages)."""
        page_tokens, new = self.layout.page_tokens, [len(fresh) for _, fresh, _ in rows]
        total = sum(new)
        tokens, requests = (bucket.tokens or total), (bucket.requests or len(rows))
        table = np.zeros((requests, -(-LONGEST // page_tokens) if bucket.tokens else 12), np.int32)
        ids, positions = np.zeros(tokens, np.int64), np.zeros(tokens, np.int64)
        slots = (np.arange(tokens) % page_tokens).astype(np.int32)
        starts = np.full(requests + 1, total, np.int32)
        starts[: len(new) + 1] = np.cumsum([0, *new])
        lengths = np.zeros(requests, np.int32)
        for row, (first, fresh, held) in enumerate(rows):
            at, here = np.arange(first, first + len(fresh)), slice(starts[row], starts[row + 1])
            table[row, : len(held)] = held
            ids[here], positions[here] = fresh, at
            slots[here] = np.array(held)[at // page_tokens] * page_tokens + at % page_tokens
            lengths[row] = first + len(fresh)
        batch = AttentionBatch(starts, lengths, (table,), (slots,), page_tokens, len(rows), total)
        index = np.zeros(requests, np.int64)
        index[: len(rows)] = starts[1 : len(rows) + 1] - 1
        put = self.device.to_device
        hidden = torch.arange(tokens) if bucket.sampling is SamplingShape.FULL else None
        return StepInputs(
            put(torch.from_numpy(ids)),
            put(torch.from_numpy(positions)),
            tuple(planner.plan(batch) for planner in self.decoder.planners),
            put(torch.from_numpy(index)),
            mapped(draws(bucket.sampling, requests, self.seed + sum(self._done), **sampling), put),
            None if hidden is None else put(hidden),
        )


def draws(shape: SamplingShape, requests: int, seed: int, **changes: Any) -> SamplingInputs:
    """Inputs of a sampling shape, on the host; rows of FULL use every part."""
    if shape is SamplingShape.ANY:
        return sampling_inputs(requests, **({"temperature": 0.0, "num_logprobs": 5, "all_greedy": True} | changes))
    if shape is SamplingShape.GREEDY:
        return sampling_inputs(requests, **({"temperature": 0.0, "all_greedy": True, "filters": False} | changes))
    source = Source(seed)
    parts: dict[str, Any] = {"temperature": 0.8, "top_k": 20, "top_p": 0.9}
    parts["seeds"] = source.integers(0, 1 << 40, requests).tolist()
    if shape is SamplingShape.FULL:
        history = torch.full((requests, LONGEST), VOCAB)
        history[:, :6] = source.integers(0, VOCAB, requests, 6)
        rows, tokens, values = (torch.zeros(requests * BIAS_ENTRIES, dtype=torch.int64) for _ in range(3))
        rows[:requests], tokens[:requests] = torch.arange(requests), source.integers(0, VOCAB, requests)
        values = values.to(torch.float32)
        values[:requests] = source.uniform(requests, low=-2.0, high=2.0)
        levels = (source.uniform(requests, low=low, high=low + 1.0) for low in (0.1, 0.1, 1.0))
        allowed = source.integers(-(1 << 31), 1 << 31, requests, -(-VOCAB // 32))
        parts["penalties"] = Penalties(history, torch.full((requests,), 3), *levels)
        parts["bias"] = LogitBias(rows, tokens, values)
        parts |= {"allowed": allowed.to(torch.int32), "num_logprobs": TOP_LOGPROBS}
    return sampling_inputs(requests, **(parts | changes))


def stage(subject: Subject, seed: int) -> Stage:
    """A fresh decoder and state; two of one seed are alike."""
    device = subject.device
    facts = device.capabilities()
    decoder = TinyDecoder(device, op_table(device), facts.compute_dtypes[0], seed)
    pool = (LayerCache((("k", KV_HEADS, WIDTH), ("v", KV_HEADS, WIDTH))),)
    layout = CacheLayout((CacheGroup((0,)),), pool, facts.page_tokens[0], facts.kv_dtypes[0])
    return Stage(device, decoder, device.state_cache().allocate(layout, PAGES), layout, seed)
