"""From per-row parameters to the sampling inputs of a step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hardpoint.request.sampling import SamplingParams
from hardpoint.scheduler.plan import NewSequence
from hardpoint.worker.sampling_batch import SamplingBatchBuilder
from hardpoint.worker.sequence_table import SequenceTable, bitmask
from hardpoint_platforms.ops.sampling import SAMPLE
from hardpoint_platforms.program import BIAS_ENTRIES, TOP_LOGPROBS, SamplingShape
from hardpoint_platforms.reference.platform import ReferenceDevice

pytestmark = pytest.mark.reference
VOCAB = 70


@pytest.fixture
def table():
    return SequenceTable(ReferenceDevice(), rows=4, max_len=32, vocab_size=VOCAB)


def enter(table, row, tokens, prompt_length=None, **params):
    tokens = np.array(tokens, np.int32)
    prompt_length = len(tokens) if prompt_length is None else prompt_length
    table.enter(NewSequence(row, f"r{row}", tokens, prompt_length, SamplingParams(**params)))


def build(table, rows, positions, shape=SamplingShape.ANY):
    builder = SamplingBatchBuilder(ReferenceDevice(), table)
    at = np.array(positions, np.int64)
    return builder.build(np.array(rows, np.int64), at, torch.from_numpy(at), shape)


def test_greedy_rows_carry_no_extras(table):
    enter(table, 0, [1, 2], temperature=0.0, top_k=5)
    inputs = build(table, [0], [2])
    assert inputs.all_greedy
    assert not inputs.filters
    assert inputs.penalties is inputs.bias is inputs.allowed is inputs.num_logprobs is None


def test_tiny_temperature_is_greedy(table):
    enter(table, 0, [1], temperature=1e-9)
    assert build(table, [0], [1]).temperature.tolist() == [0.0]


def test_parameters_follow_the_rows_order(table):
    enter(table, 1, [1], temperature=0.5, top_p=0.9, seed=7)
    enter(table, 3, [1], temperature=1.5, top_k=-1, min_p=0.1, seed=9)
    inputs = build(table, [3, 1], [4, 5])
    assert inputs.temperature.tolist() == [1.5, 0.5]
    assert inputs.seeds.tolist() == [9, 7]
    assert inputs.top_k.tolist() == [0, 0]
    assert inputs.positions.tolist() == [4, 5]


def test_rows_are_not_mixed_up_after_a_row_changes_hands(table):
    enter(table, 0, [1], temperature=0.5, seed=1)
    builder = SamplingBatchBuilder(ReferenceDevice(), table)
    rows, positions = np.array([0], np.int64), np.array([1], np.int64)
    assert builder.build(rows, positions, torch.from_numpy(positions)).seeds.tolist() == [1]
    table.release(0)
    enter(table, 0, [1], temperature=0.5, seed=2)
    assert builder.build(rows, positions, torch.from_numpy(positions)).seeds.tolist() == [2]


def test_min_tokens_forbids_ends_until_reached(table):
    enter(table, 0, [1, 2, 3], min_tokens=2, eos_token_ids=(5,), stop_token_ids=(6,))
    bias = build(table, [0], [4]).bias
    assert sorted(bias.tokens.tolist()) == [5, 6]
    assert torch.isinf(bias.values).all()
    assert build(table, [0], [5]).bias is None


def test_ignore_eos_leaves_eos_alone(table):
    enter(table, 0, [1], min_tokens=2, eos_token_ids=(5,), stop_token_ids=(6,), ignore_eos=True)
    assert build(table, [0], [1]).bias.tokens.tolist() == [6]


def test_min_tokens_without_an_end_to_forbid_changes_nothing(table):
    enter(table, 0, [1], min_tokens=2, eos_token_ids=(5, VOCAB + 1), ignore_eos=True)
    enter(table, 1, [1], min_tokens=2, eos_token_ids=(VOCAB + 1,))
    assert build(table, [0, 1], [1, 1]).bias is None
    assert SamplingBatchBuilder(ReferenceDevice(), table).shape(np.array([0, 1])) is SamplingShape.DRAW


def test_bad_words_ban_the_last_token_only_after_the_others(table):
    enter(table, 0, [1, 40, 41], prompt_length=1, bad_words_ids=((40, 41, 42), (50,), (41, 40, 43)))
    bias = build(table, [0], [3]).bias
    banned = dict(zip(bias.tokens.tolist(), bias.values.tolist(), strict=True))
    assert banned == {42: -np.inf, 50: -np.inf, 43: 0.0}


def test_bad_words_do_not_match_into_the_prompt(table):
    enter(table, 0, [40, 41], prompt_length=2, bad_words_ids=((40, 41, 42),))
    assert build(table, [0], [2]).bias is None


def test_logit_bias_names_the_batch_row(table):
    enter(table, 0, [1])
    enter(table, 2, [1], logit_bias={9: 100.0, 3: -5.0})
    bias = build(table, [0, 2], [1, 1]).bias
    assert bias.rows.tolist() == [1, 1]
    assert bias.tokens.tolist() == [9, 3]
    assert bias.values.tolist() == [100.0, -5.0]


def test_allowed_leaves_other_rows_free(table):
    enter(table, 0, [1], allowed_token_ids=(0, 33, 69))
    enter(table, 1, [1])
    allowed = build(table, [1, 0], [1, 1]).allowed
    bits = [[bool(int(word) >> bit & 1) for word in row for bit in range(32)] for row in allowed]
    assert all(bits[0][:VOCAB])
    assert [i for i, bit in enumerate(bits[1]) if bit] == [0, 33, 69]


def test_penalties_see_prompt_and_output_but_no_neighbour(table):
    enter(table, 0, [4, 5, 6], prompt_length=2, repetition_penalty=1.5)
    enter(table, 1, [7, 8])
    penalties = build(table, [0, 1], [3, 2]).penalties
    assert penalties.history.tolist() == [[4, 5, 6], [VOCAB] * 3]
    assert penalties.prompt_lengths.tolist()[0] == 2


def test_logprobs_take_the_most_that_a_row_asks(table):
    enter(table, 0, [1], logprobs=0)
    enter(table, 1, [1])
    assert build(table, [0, 1], [1, 1]).num_logprobs == 0
    assert build(table, [1], [1]).num_logprobs is None


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100])
def test_bitmask_round_trip(vocab):
    chosen = tuple(range(0, vocab, 3))
    words = bitmask(chosen, vocab)
    assert words.dtype == np.int32
    assert tuple(t for t in range(vocab) if int(words[t // 32]) >> (t % 32) & 1) == chosen


FULL_KINDS = (
    {"repetition_penalty": 1.1},
    {"presence_penalty": -0.5},
    {"logprobs": 0},
    {"logit_bias": {3: 1.0}},
    {"min_tokens": 2, "max_tokens": 4, "stop_token_ids": (5,)},
    {"bad_words_ids": ((1, 2),)},
    {"allowed_token_ids": (1, 2)},
)


@pytest.mark.parametrize("kind", FULL_KINDS)
def test_what_needs_a_part_of_its_own_needs_the_full_shape(table, kind):
    enter(table, 0, [1, 2], temperature=0.0, **kind)
    enter(table, 1, [1, 2], temperature=0.0)
    enter(table, 2, [1, 2], temperature=0.7)
    shape = SamplingBatchBuilder(ReferenceDevice(), table).shape
    assert shape(np.array([0, 1])) is SamplingShape.FULL
    assert shape(np.array([1])) is SamplingShape.GREEDY
    assert shape(np.array([1, 2])) is SamplingShape.DRAW


def test_the_full_shape_is_the_same_whatever_the_rows_ask(table):
    for row, kind in enumerate(({"temperature": 0.0}, {"temperature": 0.9, **FULL_KINDS[3], **FULL_KINDS[0]})):
        enter(table, row, [1, 2, 3], **kind)
    alone, both = (build(table, rows, [3, 3], SamplingShape.FULL) for rows in ([0, 0], [1, 0]))

    def sizes(inputs):
        parts = (inputs, inputs.penalties, inputs.bias)
        tensors = {n: t.shape for part in parts for n, t in vars(part).items() if isinstance(t, torch.Tensor)}
        return tensors, inputs.num_logprobs, inputs.all_greedy, inputs.filters

    assert sizes(alone) == sizes(both)
    assert both.penalties.history.shape == (2, 32)
    assert both.bias.rows.shape == (2 * BIAS_ENTRIES,)
    assert both.num_logprobs == TOP_LOGPROBS


@pytest.mark.parametrize("kind", [{"temperature": 0.0}, {"temperature": 1.1, "top_k": 7, "seed": 3}, *FULL_KINDS])
def test_a_larger_shape_draws_the_same(table, kind):
    enter(table, 0, [1, 2, 2], **({"temperature": 1.0, "seed": 9} | kind))
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    sample = SAMPLE.reference(SAMPLE.instance("sampler", torch.float32))
    drawn = {
        int(sample(logits.clone(), build(table, [0], [3], shape)).token_ids)
        for shape in (SamplingShape.ANY, SamplingShape.FULL)
    }
    assert len(drawn) == 1


def test_a_lower_shape_leaves_out_what_other_rows_want(table):
    enter(table, 0, [1, 2], temperature=0.0, logprobs=2, **FULL_KINDS[3])
    enter(table, 1, [1, 2], temperature=0.0)
    for shape in (SamplingShape.GREEDY, SamplingShape.DRAW):
        inputs = build(table, [1, 0], [2, 2], shape)
        assert inputs.penalties is inputs.bias is inputs.allowed is inputs.num_logprobs is None
        assert (inputs.all_greedy, inputs.filters) == (shape is SamplingShape.GREEDY, shape is SamplingShape.DRAW)
