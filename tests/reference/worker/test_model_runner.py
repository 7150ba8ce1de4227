"""The runner with a model of one matrix: the next token depends on the current token alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hardpoint.models.base import CausalModel
from hardpoint.request.sampling import SamplingParams
from hardpoint.scheduler.plan import NewSequence, StepPlan
from hardpoint.worker.model_runner import ModelRunner, RunnerParts
from hardpoint.worker.stage import StageParts
from hardpoint.worker.step import make_step
from hardpoint_platforms.ops.table import op_table
from hardpoint_platforms.reference.platform import ReferenceDevice
from hardpoint_platforms.state_cache import CacheGroup, CacheLayout, LayerCache

pytestmark = pytest.mark.reference
VOCAB = 40


class ChainModel(CausalModel):
    """hidden = one-hot of the token; logits = 20 for token + 1, 10 for token + 2, a little noise elsewhere."""

    vocab_size, max_context, hidden_size = VOCAB, 64, VOCAB
    cache_groups = (CacheGroup((0,)),)
    pool = (LayerCache((("k", 1, 1), ("v", 1, 1))),)

    def __init__(self) -> None:
        noise = torch.rand(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
        for token in range(VOCAB):
            noise[token, (token + 1) % VOCAB] = 20.0
            noise[token, (token + 2) % VOCAB] = 10.0
        self.table = noise

    def advance(self, token_ids, positions, plans, state, weights, carried):
        return (torch.nn.functional.one_hot(token_ids, VOCAB).float(),), state

    def logits(self, hidden, weights):
        return self.table[hidden.argmax(-1)]


@pytest.fixture
def runner():
    device = ReferenceDevice()
    model = ChainModel()
    ops = op_table(device)
    sample = ops.bind(ops.contract("sample").instance("sampler", torch.float32))
    score = ops.bind(ops.contract("logprobs").instance("scores", torch.float32))
    layout = CacheLayout(model.cache_groups, model.pool, 4, torch.float32)
    return ModelRunner(
        RunnerParts(
            stages=(
                StageParts(
                    device=device,
                    planners=ops.planners,
                    model=model,
                    dtype=torch.float32,
                    weights=(),
                    layout=layout,
                    state=device.state_cache().allocate(layout, 8),
                    step=make_step(model, sample.kernel),
                ),
            ),
            score=score.kernel,
            max_num_seqs=4,
            max_model_len=64,
            max_batch_tokens=64,
        )
    )


def plan(step, rows, lengths, computed, samples, new=(), released=()):
    return StepPlan(
        step=step,
        released=tuple(released),
        new=tuple(new),
        rows=np.array(rows, np.int32),
        query_lengths=np.array(lengths, np.int32),
        computed=np.array(computed, np.int32),
        samples=np.array(samples, np.bool_),
        page_tables=(np.ones((len(rows), 16), np.int32),),
    )


def sequence(row, tokens, **params):
    return NewSequence(
        row, f"r{row}", np.array(tokens, np.int32), len(tokens), SamplingParams(**({"temperature": 0.0} | params))
    )


def test_prefill_then_decode_feeds_the_draw_back(runner):
    assert runner.execute(plan(0, [2], [3], [0], [True], [sequence(2, [5, 6, 7])])).tokens.tolist() == [8]
    assert runner.execute(plan(1, [2], [1], [3], [True])).tokens.tolist() == [9]
    assert runner.execute(plan(2, [2], [1], [4], [True])).tokens.tolist() == [10]


def test_launched_steps_do_not_wait_for_each_other(runner):
    first = runner.launch(plan(0, [0], [1], [0], [True], [sequence(0, [3])]))
    second = runner.launch(plan(1, [0], [1], [1], [True]))
    # the row changes hands before anything was collected
    third = runner.launch(plan(2, [0], [2], [0], [True], [sequence(0, [20, 21], logprobs=1)], released=[0]))
    assert [runner.collect(flight).tokens.tolist() for flight in (first, second, third)] == [[4], [5], [22]]


def test_a_chunk_that_does_not_end_its_prompt_draws_nothing(runner):
    new = [sequence(1, list(range(10))), sequence(0, [30])]
    result = runner.execute(plan(0, [0, 1], [1, 6], [0, 0], [True, False], new))
    assert result.tokens.tolist() == [31, -1]
    assert runner.execute(plan(1, [0, 1], [1, 4], [1, 6], [True, True])).tokens.tolist() == [32, 10]


def test_logprobs_come_for_rows_that_asked(runner):
    new = [sequence(0, [3], logprobs=2), sequence(1, [4])]
    result = runner.execute(plan(0, [0, 1], [1, 1], [0, 0], [True, True], new))
    assert set(result.logprobs) == {0}
    found = result.logprobs[0]
    expected = torch.log_softmax(ChainModel().table[3], -1)
    assert found.token_ids.tolist() == [[4, 4, 5]]
    np.testing.assert_allclose(found.logprobs[0], expected[[4, 4, 5]], atol=1e-5)
    assert found.ranks.tolist() == [1]


@pytest.mark.parametrize("cuts", [(6,), (1, 5), (2, 2, 2), (5, 1)])
def test_prompt_logprobs_are_the_same_in_any_chunks(runner, cuts):
    prompt = [3, 9, 10, 4, 5, 30]
    expected = torch.log_softmax(ChainModel().table[prompt[:-1]], -1)[range(5), prompt[1:]]
    done, scores = 0, []
    for step, cut in enumerate(cuts):
        new = [sequence(0, prompt, prompt_logprobs=1)] if step == 0 else []
        result = runner.execute(plan(step, [0], [cut], [done], [done + cut == 6], new))
        done += cut
        if 0 in result.prompt_logprobs:
            found = result.prompt_logprobs[0]
            assert found.token_ids.shape == found.logprobs.shape == (len(found.ranks), 2)
            scores.extend(zip(found.token_ids[:, 0].tolist(), found.logprobs[:, 0].tolist(), strict=True))
    assert [token for token, _ in scores] == prompt[1:]
    np.testing.assert_allclose([score for _, score in scores], expected, atol=1e-5)


def test_a_row_with_bad_logits_is_named_and_harms_nobody(runner):
    runner._last.model.table[7, 0] = float("nan")
    new = [sequence(0, [7]), sequence(1, [8])]
    result = runner.execute(plan(0, [0, 1], [1, 1], [0, 0], [True, True], new))
    assert result.bad_rows == (0,)
    assert result.tokens[1] == 9


def test_seeded_draws_do_not_depend_on_company(runner):
    def draw(rows, new):
        return runner.execute(plan(0, rows, [1] * len(rows), [0] * len(rows), [True] * len(rows), new)).tokens

    hot = {"temperature": 8.0}
    alone = [int(draw([0], [sequence(0, [3], seed=seed, **hot)])[0]) for seed in range(20)]
    crowd = []
    for seed in range(20):
        new = [sequence(0, [9], seed=99, **hot), sequence(1, [3], seed=seed, **hot), sequence(2, [3], seed=98, **hot)]
        crowd.append(int(draw([2, 0, 1], new)[2]))
    assert alone == crowd
    assert len(set(alone)) > 3
