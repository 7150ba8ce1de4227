"""The tape against the step function that it was recorded from: the same bits, whatever the batch."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint_cpu.native.arena import ALIGNMENT, Life, place
from hardpoint_cpu.native.program import TapeBuilder, TapeProgram
from hardpoint_cpu.native.stage import Stage
from hardpoint_platforms.program import Bucket, StepOutputs

pytestmark = pytest.mark.reference

#: (sequence, new tokens) per step: prefill, mixtures, chunks, decode, and a step that is larger than reserved.
STEPS = (
    ((0, 5),),
    ((0, 1), (1, 7)),
    ((2, 3), (0, 1), (1, 1)),
    ((1, 1), (2, 4), (0, 1)),
    ((0, 1), (1, 1), (2, 1)),
    ((3, 40), (0, 1)),
    ((3, 1), (2, 1), (1, 1), (0, 1)),
)


def tape_of(stage: Stage, model: Any, tokens: int = 16, draws: int = 2) -> TapeProgram:
    builder = TapeBuilder(stage)
    assert builder.buckets(tokens, draws) == ()
    program = builder.build(model.step, Bucket(0, 0))
    assert isinstance(program, TapeProgram)
    return program


def play(program: TapeProgram, model: Any, inputs: Any) -> StepOutputs:
    with torch.inference_mode():
        outputs, model.state = program.run(inputs, model.state, model.weights)
    return outputs


def same(a: StepOutputs, b: StepOutputs) -> None:
    assert torch.equal(a.sample.token_ids, b.sample.token_ids)
    assert torch.equal(a.finite, b.finite)
    assert a.finite.all()
    ours, theirs = a.sample.logprobs, b.sample.logprobs
    assert (ours is None) == (theirs is None)
    if ours is not None and theirs is not None:
        assert torch.equal(ours.top, theirs.top)
        assert torch.equal(ours.top_ids, theirs.top_ids)


def compare(stage: Stage, recorded: Any, called: Any) -> TapeProgram:
    """Run STEPS through a tape and through the step function of an equal model."""
    program = tape_of(stage, recorded)
    ours, theirs = ([model.sequence(seed, 90) for seed in range(4)] for model in (recorded, called))
    for number, step in enumerate(STEPS):
        options: dict[str, Any] = {"padding": number % 3, "draws": number != 1}
        inputs = [
            model.inputs([(sequences[i], n) for i, n in step], **options)
            for model, sequences in ((recorded, ours), (called, theirs))
        ]
        same(play(program, recorded, inputs[0]), called.run(inputs[1]))
    for layer, other in zip(recorded.state, called.state, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(layer, other, strict=True))
    return program


@pytest.mark.parametrize("config", ["llama", "qwen3", "gemma3_text", "qwen3_moe"])
@pytest.mark.parametrize("packed", [True, False], ids=["q4_1", "plain"])
def test_a_tape_gives_the_bits_of_the_step(stage: Stage, tiny: Callable[..., Any], config: str, packed: bool) -> None:
    program = compare(stage, tiny(config, packed=packed), tiny(config, packed=packed))
    assert program.describe().endswith("played by one call")


@pytest.mark.parametrize(
    ("without", "ops"),
    [
        (("gated_activation",), ("silu", "mul")),
        (("norm", "add_norm"), ("rms_norm", "add")),
        (("linear",), ("linear", "mm")),
        (("embedding", "logits"), ()),
        (("rope",), ("index_select", "addcmul")),
    ],
)
def test_other_ops_split_the_tape(
    stage: Stage, tiny: Callable[..., Any], without: tuple[str, ...], ops: tuple[str, ...]
) -> None:
    program = compare(stage, tiny(without=without), tiny(without=without))
    said = program.describe()
    assert "split by" in said
    assert not ops or any(op in said for op in ops), said


@pytest.mark.parametrize(
    ("config", "without", "why"),
    [("llama", ("attention",), "plans"), ("llama", ("sample",), "sampling"), ("qwen3_moe", ("experts",), "")],
)
def test_what_reads_data_runs_op_by_op(
    stage: Stage, tiny: Callable[..., Any], caplog: Any, config: str, without: tuple[str, ...], why: str
) -> None:
    program = compare(stage, tiny(config, without=without), tiny(config, without=without))
    assert program.describe().startswith("called op by op: ")
    assert why in program.describe()
    assert len([record for record in caplog.records if "op by op" in record.message]) == 1


def test_drawn_rows_follow_the_live_parameters(stage: Stage, tiny: Callable[..., Any]) -> None:
    recorded, called = tiny(), tiny()
    program = tape_of(stage, recorded)
    drawn = set()
    for seed in range(6):
        options: dict[str, Any] = {
            "temperature": 1.5, "all_greedy": False, "top_k": 40, "top_p": 0.95, "seeds": [seed], "num_logprobs": None,
        }  # fmt: skip
        results = []
        for model in (recorded, called):
            results.append(model.inputs([(model.sequence(0, 9), 9)], **options))
        ours, theirs = play(program, recorded, results[0]), called.run(results[1])
        same(ours, theirs)
        drawn.add(int(ours.sample.token_ids[0]))
    assert len(drawn) > 1


def test_a_request_has_the_same_bits_alone_in_a_crowd_and_in_chunks(stage: Stage, tiny: Callable[..., Any]) -> None:
    def scores(cuts: tuple[int, ...], crowd: int) -> list[torch.Tensor]:
        model = tiny("qwen3")
        program = tape_of(stage, model)
        sequence = model.sequence(0, 60)
        others = [model.sequence(9 + i, 120) for i in range(crowd)]
        found = []
        for n in cuts:
            plan = [(other, 1 + (i + n) % 4) for i, other in enumerate(others)]
            plan.insert(crowd // 2, (sequence, n))
            outputs = play(program, model, model.inputs(plan))
            assert outputs.sample.logprobs is not None
            found.append(outputs.sample.logprobs.top[crowd // 2])
        return found

    alone = scores((23, 1, 1), 0)
    for cuts, crowd in (((23, 1, 1), 5), ((7, 16, 1, 1), 0), ((1,) * 25, 2)):
        assert all(torch.equal(a, b) for a, b in zip(alone, scores(cuts, crowd)[-3:], strict=True))


@pytest.mark.parametrize("without", [(), ("linear",), ("logits",)], ids=["whole", "split", "draw apart"])
def test_the_largest_logit_is_taken_by_the_tape_itself(
    stage: Stage, tiny: Callable[..., Any], monkeypatch: Any, without: tuple[str, ...]
) -> None:
    recorded, called = tiny(without=without), tiny(without=without)
    program = tape_of(stage, recorded)
    ours, theirs = ([model.sequence(seed, 90) for seed in range(4)] for model in (recorded, called))
    runs: list[int] = []
    run = stage.run
    held: list[tuple[StepOutputs, torch.Tensor]] = []
    for number, step in enumerate(STEPS):
        options: dict[str, Any] = {"padding": number % 3, "draws": number != 1, "num_logprobs": None}
        given = recorded.inputs([(ours[i], n) for i, n in step], **options)
        expected = called.run(called.inputs([(theirs[i], n) for i, n in step], **options))
        program._tape_for(given, recorded.state, recorded.weights)
        with monkeypatch.context() as patch:
            patch.setattr(stage, "run", lambda ops, count, batch: (runs.append(count), run(ops, count, batch))[1])
            outputs = play(program, recorded, given)
        same(outputs, expected)
        held.append((outputs, expected.sample.token_ids.clone()))
    assert all(torch.equal(outputs.sample.token_ids, ids) for outputs, ids in held), "a later step wrote over results"
    if not without:
        assert len(runs) == len(STEPS)
        assert program._tape is not None
        assert set(runs) == {program._tape.native_calls + 1}


def test_inputs_of_any_kind_of_memory_are_taken(stage: Stage, tiny: Callable[..., Any]) -> None:
    recorded, called = tiny(), tiny()
    program = tape_of(stage, recorded)
    ours, theirs = recorded.sequence(0, 9), called.sequence(0, 9)
    for n in (5, 1, 1):
        expected = called.run(called.inputs([(theirs, n)]))
        given = recorded.inputs([(ours, n)])
        spread = torch.stack((given.token_ids, given.token_ids), dim=1)[:, 0]
        given = dataclasses.replace(given, token_ids=spread, positions=given.positions.to(torch.int32))
        same(play(program, recorded, given), expected)


def test_other_weights_are_recorded_anew(stage: Stage, tiny: Callable[..., Any]) -> None:
    first, second = tiny(), tiny(exact=True)
    program = tape_of(stage, first)
    sequence = first.sequence(0, 20)
    play(program, first, first.inputs([(sequence, 5)]))
    first.weights = tuple(first.weights)  # equal, the same object: the tape stays
    tape = program._tape
    play(program, first, first.inputs([(sequence, 1)]))
    assert program._tape is tape
    first.weights = (*second.weights,)
    play(program, first, first.inputs([(sequence, 1)]))
    assert program._tape is not tape


def test_nothing_keeps_the_weights_after_the_program(stage: Stage, tiny: Callable[..., Any]) -> None:
    model = tiny()
    program = tape_of(stage, model)
    play(program, model, model.inputs([(model.sequence(0, 9), 9)]))
    watched = [weakref.ref(tensor) for slot in model.weights for tensor in slot]
    gc.collect()
    gc.disable()  # reference counts alone must do
    try:
        del program, model
        assert all(watch() is None for watch in watched)
    finally:
        gc.enable()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 900), st.integers(0, 12), st.integers(0, 12)), max_size=24))
def test_what_is_needed_at_once_does_not_overlap(spans: list[tuple[int, int, int]]) -> None:
    lives = [Life(size, min(a, b), max(a, b)) for size, a, b in spans]
    offsets, total = place(lives)
    for i, (life, offset) in enumerate(zip(lives, offsets, strict=True)):
        assert offset % ALIGNMENT == 0
        assert offset + life.size <= total
        for other, start in zip(lives[:i], offsets[:i], strict=True):
            if life.first <= other.last and other.first <= life.last:
                assert offset + life.size <= start or start + other.size <= offset
    assert total <= sum(max(ALIGNMENT, -(-life.size // ALIGNMENT) * ALIGNMENT) for life in lives)
