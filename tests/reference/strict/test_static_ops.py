"""The device's ops against the contracts' references: over every sample, traced and watched, and random batches."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import strict_bench as bench
import torch

from hardpoint_platforms.batch import AttentionBatch, SamplingInputs
from hardpoint_platforms.conformance.attention import build_batch
from hardpoint_platforms.conformance.execution import execute, layout_of, put_state, tree_pages
from hardpoint_platforms.conformance.subject import oracle
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Altitude, Sample
from hardpoint_platforms.ops.samples import PagedRows, Source
from hardpoint_platforms.ops.sampling import sampling_inputs
from hardpoint_platforms.reference.attention import build_attention as reference_attention
from hardpoint_platforms.reference.plan import ReferencePlanner
from hardpoint_platforms.reference.platform import ReferenceDevice
from hardpoint_platforms.reference.sampling import draw_tokens as reference_draw
from hardpoint_platforms.strict.providers import STATE_AT, STATIC
from hardpoint_platforms.strict.static.attention import build_attention
from hardpoint_platforms.strict.static.plan import StaticPlanner
from hardpoint_platforms.strict.static.sampling import draw_tokens

pytestmark = pytest.mark.reference

OPS = [name for name, contract in CONTRACTS.items() if contract.altitude is not Altitude.BLOCK]
CPU = torch.device("cpu")


def _close(found: Any, wanted: Any, case: Sample) -> None:
    tolerance = CONTRACTS[case.instance.op].tolerance[case.instance.dtype]
    if dataclasses.is_dataclass(wanted):
        for f in dataclasses.fields(wanted):
            _close(getattr(found, f.name), getattr(wanted, f.name), case)
    elif isinstance(wanted, tuple):
        for a, b in zip(found, wanted, strict=True):
            _close(a, b, case)
    elif isinstance(wanted, torch.Tensor):
        exact = not wanted.dtype.is_floating_point
        torch.testing.assert_close(
            found, wanted, atol=0 if exact else tolerance.atol, rtol=0 if exact else tolerance.rtol
        )
    else:
        assert found == wanted


def _in_a_program(case: Sample) -> tuple[Any, Any]:
    """Result and pages of a sample whose kernel is the whole step: prepared, that is traced, and run under watch."""
    device = bench.opened()
    provider = next(p for p in device.providers() if p.op == case.instance.op)
    packed, kernel = provider.pack(case.instance, case.weights), provider.build(case.instance)
    at, given = STATE_AT.get(case.instance.op), list(case.make())
    layout = pages = None
    state = bench.fresh_state(device)
    if at is not None:
        tree, batch = given[at], given[at + 1]
        layout, pages = layout_of(tree, batch), tree_pages(tree)
        state = put_state(device, layout, tree)
        given[at : at + 2] = [provider.planner().plan(batch)]

    def step(inputs: Any, state: Any, weights: Any) -> Any:
        arguments = [*inputs.plans, weights] if weights else [*inputs.plans]
        if at is None:
            return kernel(*arguments), state
        arguments.insert(at, state)
        return kernel(*arguments)

    program, inputs = device.programs().build(step, bench.ANY), bench.step_inputs(*given)
    if layout is None:
        return program.run(inputs, program.prepare(inputs, state, packed), packed)[0], ()
    # preparing stores the sample's tokens; a recurrent state would count them twice
    program.prepare(inputs, state, packed)
    out, state = program.run(inputs, put_state(device, layout, tree), packed)
    return out[: batch.num_tokens], device.state_cache().export_pages(state, layout, range(1, pages)).data


@pytest.mark.parametrize("op", OPS)
def test_every_sample_is_traced_and_equals_the_reference(op: str) -> None:
    for dtype in (torch.float32, torch.bfloat16) if op in STATIC else (torch.float32,):
        for case in CONTRACTS[op].samples(dtype):
            wanted = execute(ReferenceDevice(), oracle(op), case)
            found, pages = _in_a_program(case)
            _close(found, wanted.result, case)
            _close(pages, wanted.pages, case)


def test_what_is_not_static_in_the_reference_has_a_static_form() -> None:
    assert set(STATE_AT) < set(STATIC)
    providers = {p.op: p for p in bench.opened().providers()}
    assert set(providers) == set(OPS)
    planners = {id(providers[op].planner()) for op in STATE_AT}
    assert len(planners) == 1


@pytest.mark.parametrize("seed", range(12))
def test_attention_over_random_page_tables(seed: int) -> None:
    rng = random.Random(seed)
    page_tokens = rng.choice((4, 8, 16))
    count = rng.randint(1, 5)
    kind = rng.choice(("decode", "one", "several"))
    rows = tuple((rng.randint(0, 40), 1 if kind == "decode" else rng.randint(1, 20)) for _ in range(count))
    rows = rows[:1] if kind == "one" else rows
    window = rng.choice((None, 7))
    batch, pages, written = build_batch(rows, page_tokens, window, seed, padded=rng.random() < 0.5)
    source, tokens = Source(seed), len(batch.slot_mapping[0])
    q, k, v = (source.normal(tokens, heads, 8) for heads in (4, 2, 2))
    cache = tuple(source.normal(pages, page_tokens, 2, 8) for _ in range(2))
    for part in cache:
        part[~torch.from_numpy(written)] = 60.0  # nobody wrote there
    attrs = {"heads": 4, "kv_heads": 2, "head_dim": 8, "v_head_dim": 8, "scale": 0.4, "window": window}
    instance = CONTRACTS["attention"].instance("here", torch.float32, **attrs)
    ours = (tuple(part.clone() for part in cache),)
    kept = tuple(part.clone() for part in cache)
    found, after = build_attention(instance)(q, k, v, ours, StaticPlanner(CPU).plan(batch))
    theirs = (cache,)
    wanted, _ = reference_attention(instance)(q, k, v, theirs, ReferencePlanner(CPU).plan(batch))
    real = batch.num_tokens
    torch.testing.assert_close(found[:real], wanted[:real], atol=2e-6, rtol=1e-5)
    assert torch.isfinite(found).all()
    for old, was, new, reference in zip(ours[0], kept, after[0], cache, strict=True):
        assert torch.equal(old, was), "the old tree was written"
        assert torch.equal(new[1:], reference[1:])


def test_plans_of_a_bucket_have_one_shape() -> None:
    """Prefill buckets of one request, decode buckets of one token each: whatever is real in them."""

    def shapes(batch: AttentionBatch) -> list[tuple[int, ...]]:
        plan = StaticPlanner(CPU).plan(batch)
        return [tuple(t.shape) for t in (*plan.tables, plan.rows, plan.valid, plan.positions, plan.places, plan.fresh)]

    def padded(rows: tuple[tuple[int, int], ...], tokens: int, requests: int) -> AttentionBatch:
        new = sum(count for _, count in rows)
        made = PagedRows(rows, extra_tokens=tokens - new, extra_requests=requests - len(rows)).batch()
        tables = tuple(np.pad(t, ((0, 0), (0, 16 - t.shape[1]))) for t in made.page_tables)
        return dataclasses.replace(made, page_tables=tables)

    assert shapes(padded(((3, 1),), 16, 1)) == shapes(padded(((0, 16),), 16, 1)) == shapes(padded(((9, 5),), 16, 1))
    assert shapes(padded(((3, 1),), 4, 4)) == shapes(padded(((0, 1), (7, 1), (2, 1), (30, 1)), 4, 4))
    assert shapes(padded(((3, 1),), 1, 1)) == shapes(padded(((0, 1),), 1, 1))


def _draw_inputs(seed: int, rows: int, vocab: int) -> SamplingInputs:
    rng = random.Random(seed)
    return sampling_inputs(
        rows,
        temperature=[rng.choice((0.0, 0.3, 1.0, 1.7)) for _ in range(rows)],
        top_k=[rng.choice((0, 1, 7, 300, vocab + 5)) for _ in range(rows)],
        top_p=[rng.choice((1.0, 0.95, 0.4, 1e-6)) for _ in range(rows)],
        min_p=[rng.choice((0.0, 0.05, 0.5)) for _ in range(rows)],
        seeds=[rng.getrandbits(60) for _ in range(rows)],
        positions=[rng.randrange(1 << 20) for _ in range(rows)],
        filters=seed % 3 > 0,
    )


@pytest.mark.parametrize(("vocab", "scale"), [(61, 3.0), (1000, 2.0), (6000, 0.5)])
def test_draws_equal_the_references(vocab: int, scale: float) -> None:
    for seed in range(20):
        logits = Source(seed).normal(7, vocab, scale=scale)
        logits[0, 1::2] = logits[0, 0]  # many of equal weight
        inputs = _draw_inputs(seed, 7, vocab)
        assert torch.equal(draw_tokens(logits, inputs), reference_draw(logits, inputs))
