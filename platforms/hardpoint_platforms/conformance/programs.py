"""Group `programs`: a built program gives what the step gives, for every bucket, whatever the pages and the batch.

The step is a small decoder over the device's bound ops: embedding, norm, attention, a gated activation, logits, draw.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hardpoint_platforms.batch import AttentionBatch
from hardpoint_platforms.binding import BoundOp, OpTable
from hardpoint_platforms.conformance.checks import Check, Group, Measure, Refused, Wrong
from hardpoint_platforms.conformance.comparison import require_close, require_equal
from hardpoint_platforms.conformance.contracts import short
from hardpoint_platforms.conformance.execution import moved
from hardpoint_platforms.conformance.subject import Subject
from hardpoint_platforms.device import Device
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Packed, Weight
from hardpoint_platforms.ops.samples import SUMS, Source, specs
from hardpoint_platforms.ops.sampling import sampling_inputs
from hardpoint_platforms.ops.table import op_table
from hardpoint_platforms.program import Bucket, Program, StepInputs, StepOutputs
from hardpoint_platforms.state_cache import CacheGroup, CacheLayout, LayerCache, State

VOCAB, HIDDEN, HEADS, KV_HEADS, WIDTH, INNER = 61, 32, 4, 2, 8, 48
MAX_TOKENS, MAX_REQUESTS, PAGES = 64, 8, 80
#: (request, new tokens) per step: prefill, mixed, chunks, decode, one alone, all.
STEPS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((0, 5),),
    ((0, 1), (1, 7)),
    ((0, 1), (1, 1), (2, 19)),
    ((0, 1), (1, 1), (2, 1)),
    ((2, 1),),
    ((1, 1), (3, 17)),
    ((3, 1), (2, 1), (1, 1), (0, 1)),
)


def checks(subject: Subject) -> Iterator[Check]:
    """Level 3."""
    device = subject.device
    dtype = device.capabilities().compute_dtypes[0]
    buckets = device.programs().buckets(MAX_TOKENS, MAX_REQUESTS) or (Bucket(0, 0),)
    for bucket in buckets:
        size = "any size" if not bucket.tokens else f"{bucket.tokens} tokens {bucket.requests} requests"
        for name, body in (
            (f"{size} replay equals eager", _replay),
            (f"{size} page tables change between replays", _pages_change),
            (f"{size} seeds are live", _seeds),
        ):
            yield Check("programs", "program", name, 3, partial(body, bucket), dtype=short(dtype))
    yield Check("programs", "program", "results outlive the next step", 3, partial(_outlive, buckets[-1]))
    yield Check("programs", "program", "fingerprint and saving", 3, partial(_saved, buckets[0]))


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
        return StepOutputs(drawn, finite), state

    def _linear(self, columns: int, rows: int) -> tuple[BoundOp, int]:
        weight = self._source.matrix(rows, columns, self._dtype)
        return self._bind("linear", {"in_features": columns, "out_features": rows}, weight=weight)

    def _bind(self, op: str, attrs: dict[str, Any] | None = None, **weights: Weight) -> tuple[BoundOp, int]:
        where = f"step.{op}.{len(self._packed)}"
        instance = CONTRACTS[op].instance(where, self._dtype, specs(weights, self._dtype), **(attrs or {}))
        bound = self._table.bind(instance)
        if not weights:
            return bound, -1
        there = {name: moved(weight, self._device.to_device) for name, weight in weights.items()}
        self._packed.append(bound.provider.pack(instance, there))
        return bound, len(self._packed) - 1


@dataclass
class Stage:
    """A decoder with a state and requests that grow: makes the inputs of one step after another."""

    device: Device
    decoder: TinyDecoder
    state: State
    page_tokens: int
    seed: int

    def __post_init__(self) -> None:
        source = np.random.default_rng(self.seed)
        self._tokens = source.integers(0, VOCAB, (MAX_REQUESTS, 4096))
        self._free = [int(page) for page in 1 + source.permutation(PAGES - 1)]
        self._pages: dict[int, list[int]] = {}
        self._done = [0] * MAX_REQUESTS

    def inputs(self, step: Sequence[tuple[int, int]], bucket: Bucket, **sampling: Any) -> StepInputs:
        """The next step, padded to the bucket."""
        new = [count for _, count in step]
        total = sum(new)
        tokens, requests = (bucket.tokens or total), (bucket.requests or len(step))
        width = -(-4 * MAX_TOKENS // self.page_tokens) if bucket.tokens else 12
        table = np.zeros((requests, width), np.int32)
        ids, positions = np.zeros(tokens, np.int64), np.zeros(tokens, np.int64)
        slots = (np.arange(tokens) % self.page_tokens).astype(np.int32)
        starts = np.full(requests + 1, total, np.int32)
        starts[: len(new) + 1] = np.cumsum([0, *new])
        lengths = np.zeros(requests, np.int32)
        for row, (request, count) in enumerate(step):
            first = self._done[request]
            at, here = np.arange(first, first + count), slice(starts[row], starts[row + 1])
            held = self._pages.setdefault(request, [])
            while len(held) * self.page_tokens < first + count:
                held.append(self._free.pop())
            table[row, : len(held)] = held
            ids[here], positions[here] = self._tokens[request, at], at
            slots[here] = np.array(held)[at // self.page_tokens] * self.page_tokens + at % self.page_tokens
            lengths[row] = self._done[request] = first + count
        batch = AttentionBatch(starts, lengths, (table,), (slots,), self.page_tokens, len(step), total)
        index = np.zeros(requests, np.int64)
        index[: len(step)] = starts[1 : len(step) + 1] - 1
        put = self.device.to_device
        draws = sampling_inputs(requests, **({"temperature": 0.0, "num_logprobs": 5, "all_greedy": True} | sampling))
        return StepInputs(
            put(torch.from_numpy(ids)),
            put(torch.from_numpy(positions)),
            tuple(planner.plan(batch) for planner in self.decoder.planners),
            put(torch.from_numpy(index)),
            moved(draws, put),
        )


def stage(subject: Subject, seed: int) -> Stage:
    """A fresh decoder and state; two of one seed are alike."""
    device = subject.device
    facts = device.capabilities()
    decoder = TinyDecoder(device, op_table(device), facts.compute_dtypes[0], seed)
    pool = (LayerCache((("k", KV_HEADS, WIDTH), ("v", KV_HEADS, WIDTH))),)
    layout = CacheLayout((CacheGroup((0,)),), pool, facts.page_tokens[0], facts.kv_dtypes[0])
    return Stage(device, decoder, device.state_cache().allocate(layout, PAGES), layout.page_tokens, seed)


def _fits(bucket: Bucket, step: Sequence[tuple[int, int]]) -> bool:
    return not bucket.tokens or (sum(n for _, n in step) <= bucket.tokens and len(step) <= bucket.requests)


def build(one: Stage, bucket: Bucket) -> Program:
    """The program of the decoder's step. Raises Wrong where build() gives something else."""
    builder = one.device.programs()
    program = builder.build(one.decoder.step, bucket)
    if not isinstance(program, Program):
        raise Wrong(f"build() returns {type(program).__name__}, not a Program", subject_code=type(builder).build)
    return program


def run(program: Program, one: Stage, inputs: StepInputs) -> StepOutputs:
    """Run a step and keep the new state."""
    with torch.inference_mode():
        outputs, one.state = program.run(inputs, one.state, one.decoder.weights)
    if not isinstance(outputs, StepOutputs):
        raise Wrong(f"run() returns {type(outputs).__name__}, not StepOutputs", subject_code=type(program).run)
    return outputs


def eager(one: Stage, inputs: StepInputs) -> StepOutputs:
    """The step function itself."""
    with torch.inference_mode():
        outputs, one.state = one.decoder.step(inputs, one.state, one.decoder.weights)
    return outputs


def _same(one: Stage, ours: StepOutputs, theirs: StepOutputs, rows: int, what: str, code: object) -> None:
    """Real rows: tokens and finite alike, log-probabilities within the tolerance of sums."""
    host = one.device.to_host
    a, b = (moved((o.sample.token_ids, o.finite), lambda x: host(x)[:rows]) for o in (ours, theirs))
    tolerance = SUMS[one.device.capabilities().compute_dtypes[0]]
    if theirs.sample.logprobs is not None:
        if ours.sample.logprobs is None:
            raise Wrong(f"{what}: log-probabilities are missing", subject_code=code)
        top, wanted = host(ours.sample.logprobs.top)[:rows], host(theirs.sample.logprobs.top)[:rows]
        require_close(top, wanted, tolerance, code, f"{what}: top log-probabilities")
    require_equal(a[0], b[0], f"{what}: tokens", code)
    require_equal(a[1], b[1], f"{what}: finite", code)


def _compare(bucket: Bucket, subject: Subject, seed: int, steps: Sequence[Any], **sampling: Any) -> Measure:
    ours, theirs = stage(subject, seed), stage(subject, seed)
    program, ran = build(ours, bucket), 0
    for number, step in enumerate(steps):
        if not _fits(bucket, step):
            continue
        options = {name: value(number) if callable(value) else value for name, value in sampling.items()}
        found = run(program, ours, ours.inputs(step, bucket, **options))
        wanted = eager(theirs, theirs.inputs(step, bucket, **options))
        _same(ours, found, wanted, len(step), f"step {number} of {step}", type(program).run)
        ran += 1
    if not ran:
        raise Refused("no step of the test fits this bucket")
    return Measure(program.describe())


def _replay(bucket: Bucket, subject: Subject, seed: int) -> Measure:
    return _compare(bucket, subject, seed, STEPS)


def _pages_change(bucket: Bucket, subject: Subject, seed: int) -> Measure:
    """The same shapes again and again over other pages: each request alone, then again, in another order."""
    one_each = [((request, 1),) for request in (0, 1, 2, 3)]
    return _compare(bucket, subject, seed, [*one_each, *reversed(one_each), *one_each * 3])


def _seeds(bucket: Bucket, subject: Subject, seed: int) -> Measure:
    options = {"temperature": 1.2, "all_greedy": False, "seeds": lambda number: seed % 1000 + number // 3}
    return _compare(bucket, subject, seed, [((0, 1),)] * 8, **options)


def _outlive(bucket: Bucket, subject: Subject, seed: int) -> Measure:
    """The engine launches the next step before it reads the last one's results."""
    one = stage(subject, seed)
    program, host = build(one, bucket), one.device.to_host
    kept: list[tuple[StepOutputs, torch.Tensor]] = []
    for step in (((0, 5),), ((0, 1), (1, 4)), ((1, 1), (0, 1)), ((0, 1), (1, 1))):
        if not _fits(bucket, step):
            continue
        outputs = run(program, one, one.inputs(step, bucket))
        one.device.synchronize()
        kept.append((outputs, host(outputs.sample.token_ids).clone()))
    for number, (outputs, tokens) in enumerate(kept):
        code = type(program).run
        require_equal(host(outputs.sample.token_ids), tokens, f"tokens of step {number}, read later", code)
    return Measure()


def _saved(bucket: Bucket, subject: Subject, seed: int) -> Measure:
    one, builder = stage(subject, seed), subject.device.programs()
    print_one, print_two = builder.fingerprint(), subject.device.programs().fingerprint()
    if not isinstance(print_one, str) or print_one != print_two:
        raise Wrong("fingerprint() differs from call to call", subject_code=type(builder).fingerprint)
    program = build(one, bucket)
    step = next((step for step in STEPS if _fits(bucket, step)), ((0, 1),))
    run(program, one, one.inputs(step, bucket))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program"
        if not builder.save(program, path):
            return Measure("programs are not saved")
        loaded = builder.load(path, bucket)
    if loaded is None:
        raise Wrong("save() says True, load() gives None", subject_code=type(builder).load)
    ours, theirs = stage(subject, seed), stage(subject, seed)
    found = run(loaded, ours, ours.inputs(step, bucket))
    wanted = eager(theirs, theirs.inputs(step, bucket))
    _same(ours, found, wanted, len(step), "a program that was loaded", type(loaded).run)
    return Measure("programs are saved and loaded")


GROUP = Group("programs", "programs", checks)
