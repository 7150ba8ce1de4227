"""Programs: buckets, one form of arguments each, nothing built once serving began; and whole steps on the device."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import strict_bench as bench
import torch

from hardpoint_platforms.batch import LogitBias
from hardpoint_platforms.capabilities import ExecutionMode
from hardpoint_platforms.conformance import programs
from hardpoint_platforms.conformance.stage import draws
from hardpoint_platforms.conformance.subject import of_platform
from hardpoint_platforms.program import TOP_LOGPROBS, Bucket, SamplingShape
from hardpoint_platforms.strict.errors import SignatureChanged, UnplannedProgram
from hardpoint_platforms.strict.platform import StrictPlatform

pytestmark = pytest.mark.reference


def test_it_declares_what_it_enforces() -> None:
    facts = bench.opened().capabilities()
    assert facts.mode is ExecutionMode.COMPILE
    assert facts.functional_state
    assert not facts.unified_memory
    assert not facts.limits.mixed
    assert facts.limits.max_prefill_requests == 1


@pytest.mark.parametrize(("tokens", "requests"), [(1, 1), (2, 16), (16, 1), (17, 3), (64, 8), (256, 64), (5000, 500)])
def test_the_largest_steps_that_the_limits_allow_fit(tokens: int, requests: int) -> None:
    builder, limits = bench.opened().programs(), bench.opened().capabilities().limits
    buckets = builder.buckets(tokens, requests)
    assert buckets == builder.buckets(tokens, requests)
    assert len(set(buckets)) == len(buckets)
    assert list(buckets) == sorted(buckets, key=lambda b: (b.tokens, b.requests, b.query, b.sampling))
    most, rows = min(tokens, limits.max_tokens), min(tokens, requests, limits.max_requests)
    assert max(b.tokens for b in buckets) == max(most, rows)
    for shape in (SamplingShape.GREEDY, SamplingShape.DRAW, SamplingShape.FULL):
        assert any(b.fits(most, 1, most, shape) for b in buckets)
        assert any(b.fits(rows, rows, 1, shape) for b in buckets)
        assert any(b.fits(1, 1, 1, shape) for b in buckets)


def test_another_shape_is_refused_by_name() -> None:
    device = bench.opened()
    program = bench.built(device, lambda x: x + 1)
    state = program.prepare(bench.step_inputs(torch.ones(2, 3)), bench.fresh_state(device), ())
    _, state = program.run(bench.step_inputs(torch.zeros(2, 3)), state, ())
    with pytest.raises(SignatureChanged, match=r"inputs\.plans\[0\] is float32 \[2, 4\], .* with float32 \[2, 3\]"):
        program.run(bench.step_inputs(torch.ones(2, 4)), state, ())
    with pytest.raises(SignatureChanged, match=r"inputs\.plans\[0\] is float64 \[2, 3\]"):
        program.run(bench.step_inputs(torch.ones(2, 3, dtype=torch.float64)), state, ())
    with pytest.raises(SignatureChanged, match=r"inputs\.plans\[1\] is 7, .* with absent"):
        program.run(bench.step_inputs(torch.ones(2, 3), 7), state, ())
    program.run(bench.step_inputs(torch.ones(2, 3)), state, ())  # a refused run took no state


def test_what_is_no_tensor_is_static() -> None:
    device = bench.opened()
    program = bench.built(device, lambda x, n: x + n)
    state = program.prepare(bench.step_inputs(torch.ones(2), 1), bench.fresh_state(device), ())
    with pytest.raises(SignatureChanged, match=r"inputs\.plans\[1\] is 2, the program of any tokens.* with 1"):
        program.run(bench.step_inputs(torch.ones(2), 2), state, ())


def test_weights_and_state_are_part_of_the_signature() -> None:
    device = bench.opened()
    program, inputs = bench.built(device, lambda x, w: x @ w[0]), bench.step_inputs(torch.ones(2))
    state = program.prepare(inputs, bench.fresh_state(device), ((torch.ones(2, 2),),))
    with pytest.raises(SignatureChanged, match=r"weights\[0\]\[0\] is float32 \[2, 3\]"):
        program.run(inputs, state, ((torch.ones(2, 3),),))
    from hardpoint_platforms.conformance.state import layout_of

    larger = device.state_cache().allocate(layout_of("keys and values", 8, torch.float32), 5)
    with pytest.raises(SignatureChanged, match=r"state\[0\]\[0\] is float32 \[5, 8, 2, 24\]"):
        program.run(inputs, larger, ((torch.ones(2, 2),),))


def test_a_program_is_prepared_once_and_before_it_runs() -> None:
    device = bench.opened()
    program, inputs, state = (
        bench.built(device, lambda x: x),
        bench.step_inputs(torch.ones(2)),
        bench.fresh_state(device),
    )
    with pytest.raises(UnplannedProgram, match="is run before it was prepared"):
        program.run(inputs, state, ())
    state = program.prepare(inputs, state, ())
    with pytest.raises(UnplannedProgram, match="was prepared already"):
        program.prepare(inputs, state, ())


def test_nothing_is_built_after_the_seal() -> None:
    device = bench.opened()
    builder = device.programs()
    program = builder.build(lambda inputs, state, weights: (None, state), bench.ANY)
    state = program.prepare(bench.step_inputs(torch.ones(2)), bench.fresh_state(device), ())
    builder.seal()
    program.run(bench.step_inputs(torch.ones(2)), state, ())
    with pytest.raises(UnplannedProgram, match="16 tokens, 1 requests, GREEDY is built after serving began"):
        builder.build(lambda inputs, state, weights: (None, state), Bucket(16, 1, 0, SamplingShape.GREEDY))
    device.programs().build(lambda inputs, state, weights: (None, state), bench.ANY)  # another model's builder


def _inputs_of(bucket: Bucket) -> Any:
    hidden = torch.arange(bucket.tokens) if bucket.sampling is SamplingShape.FULL else None
    made = bench.step_inputs(rows=bucket.requests)
    zeros = torch.zeros(bucket.tokens, dtype=torch.int64)
    sampling = draws(bucket.sampling, bucket.requests, 3)
    return dataclasses.replace(made, token_ids=zeros, positions=zeros.clone(), sampling=sampling, hidden_index=hidden)


@pytest.mark.parametrize("shape", [SamplingShape.GREEDY, SamplingShape.DRAW, SamplingShape.FULL])
def test_inputs_have_the_form_that_the_bucket_promises(shape: SamplingShape) -> None:
    bucket, device = Bucket(4, 4, 1, shape), bench.opened()
    right = _inputs_of(bucket)
    bench.built(device, lambda: None, bucket).prepare(right, bench.fresh_state(device), ())
    few = LogitBias(torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), torch.zeros(3))
    other = TOP_LOGPROBS + 1 if shape is SamplingShape.FULL else 5
    wrong = {
        "tokens of token_ids: 3": dataclasses.replace(right, token_ids=right.token_ids[:3]),
        "requests of logits_index: 2": dataclasses.replace(right, logits_index=right.logits_index[:2]),
        "sampling.all_greedy": _with_sampling(right, all_greedy=not right.sampling.all_greedy),
        "sampling.filters": _with_sampling(right, filters=not right.sampling.filters),
        f"sampling.num_logprobs: {other}": _with_sampling(right, num_logprobs=other),
        "entries of sampling.bias: 3": _with_sampling(right, bias=few),
        "tokens of hidden_index: 2": dataclasses.replace(right, hidden_index=torch.zeros(2, dtype=torch.int64)),
    }
    for told, inputs in wrong.items():
        with pytest.raises(SignatureChanged, match=told):
            bench.built(device, lambda: None, bucket).prepare(inputs, bench.fresh_state(device), ())


def _with_sampling(inputs: Any, **changes: Any) -> Any:
    return dataclasses.replace(inputs, sampling=dataclasses.replace(inputs.sampling, **changes))


def test_the_kit_makes_inputs_of_every_bucket() -> None:
    """The kit's own step over buckets of either kind and every sampling shape; the kit runs the rest of them."""
    subject = of_platform(StrictPlatform(), "strict", "hardpoint-platforms")
    subject.options = {"memory_mib": 64}
    made = {check.name: check for check in programs.checks(subject)}
    wanted = [f"4 tokens 4 requests of 1 {shape} replay equals eager" for shape in ("greedy", "draw", "full")]
    wanted += ["16 tokens 1 requests full replay equals eager", "16 tokens 1 requests draw seeds are live"]
    for name in wanted:
        made[name].body(subject, 11)
    assert not [name for name in made if "greedy seeds are live" in name]
    assert sum("replay equals eager" in name for name in made) == 15
