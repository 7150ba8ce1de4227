"""The sampler: filters against a naive computation, draws against the distribution, rows that do not interact."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint_platforms.batch import LogitBias, Penalties
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.samples import run
from hardpoint_platforms.ops.sampling import SAMPLE, sampling_inputs
from hardpoint_platforms.reference import sampling as sampler
from hardpoint_platforms.reference.draw import uniform
from hardpoint_platforms.reference.logit_rules import adjust

pytestmark = pytest.mark.reference

_INSTANCE = SAMPLE.instance("sampler", torch.float32)


def draw(logits, inputs):
    return sampler.build_sample(_INSTANCE)(logits, inputs).token_ids


def naive_weights(logits, temperature, top_k, top_p, min_p):
    """Probabilities of one row after the filters, with Python floats and one explicit order."""
    peak = max(logits)
    weights = [math.exp((x - peak) / temperature) if x > -math.inf else 0.0 for x in logits]
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    order = [i for i in order if weights[i] >= min_p]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        total, running, kept = sum(weights[i] for i in order), 0.0, []
        for i in order:
            kept.append(i)
            running += weights[i]
            if running >= top_p * total:
                break
        order = kept
    total = sum(weights[i] for i in order)
    return [weights[i] / total if i in order else 0.0 for i in range(len(weights))]


def filtered(logits, inputs):
    weights = sampler._weights(adjust(logits, inputs), inputs, slice(None))
    return weights / weights.sum(-1, keepdim=True)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_filters_against_the_naive_computation(data):
    size = data.draw(st.integers(1, 12))
    value = st.sampled_from([-3.0, -1.0, 0.0, 0.5, 1.0, 2.0, 7.0, -math.inf])
    logits = data.draw(st.lists(value, min_size=size, max_size=size).filter(lambda x: max(x) > -math.inf))
    temperature = data.draw(st.sampled_from([1e-5, 0.25, 1.0, 3.0]))
    top_k = data.draw(st.integers(0, size + 3))
    top_p = data.draw(st.sampled_from([1.0, 0.999, 0.9, 0.625, 0.375, 0.125, 1e-6]))
    min_p = data.draw(st.sampled_from([0.0, 0.015625, 0.25, 1.0]))
    inputs = sampling_inputs(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    actual = filtered(torch.tensor([logits]), inputs)[0].tolist()
    exact = [float(np.float32(x)) for x in (temperature, top_p, min_p)]
    expected = naive_weights(logits, exact[0], top_k, exact[1], exact[2])
    assert actual == pytest.approx(expected, abs=1e-9)


def test_ties_go_to_the_lower_ids():
    logits = torch.zeros(1, 8)
    assert filtered(logits, sampling_inputs(1, top_k=3))[0].nonzero().flatten().tolist() == [0, 1, 2]
    assert filtered(logits, sampling_inputs(1, top_p=0.5))[0].nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert draw(logits, sampling_inputs(1, top_k=1)).tolist() == [0]
    assert draw(logits, sampling_inputs(1, temperature=0.0, all_greedy=True)).tolist() == [0]


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(40, 1.0), (400, 1.0), (0, 0.9), (3000, 0.999), (0, 0.99999), (1500, 1.0), (7, 0.5)]
)
def test_the_short_way_and_the_full_sort_agree(top_k, top_p, monkeypatch):
    torch.manual_seed(0)
    logits = torch.randn(6, 5000).mul(3).round(decimals=1)  # many ties
    inputs = sampling_inputs(6, top_k=top_k, top_p=top_p)
    short = filtered(logits, inputs)
    monkeypatch.setattr(sampler, "HEADS", ())
    assert torch.equal(short, filtered(logits, inputs))
    assert int((short > 0).sum(-1).max()) <= (top_k or 5000)


def inputs_of(inputs, rows):
    """The filters of some rows."""
    names = ("temperature", "top_k", "top_p", "min_p")
    return dataclasses.replace(inputs, **{name: getattr(inputs, name)[rows] for name in names})


def kept_by_definition(logits, inputs):
    """Filters of each row over its whole sorted order, with no look at a beginning of it."""
    weights = ((logits.double() - logits.double().amax(-1, keepdim=True)) / inputs.temperature.double()[:, None]).exp()
    weights = torch.where(weights >= inputs.min_p.double()[:, None], weights, 0.0)
    order = weights.sort(dim=-1, descending=True, stable=True)
    kept = torch.zeros_like(weights)
    for row, (k, p) in enumerate(zip(inputs.top_k.tolist(), inputs.top_p.double().tolist(), strict=True)):
        ranked = order.values[row, : k if k > 0 else None]
        if p < 1.0:
            running = ranked.cumsum(0)
            ranked = ranked[: int((running < p * running[-1]).sum()) + 1]
        kept[row, order.indices[row, : len(ranked)]] = ranked
    return kept


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_top_p_is_a_share_of_what_top_k_leaves(data):
    """With heads of 8 and 32 of 100 tokens: top-k below, at and above each of them, alone and with other rows."""
    rows, size = data.draw(st.integers(1, 4)), 100
    draws = {
        "temperature": [0.25, 1.0, 3.0, 1e4],
        "top_k": [0, 1, 7, 8, 9, 31, 32, 33, 70, 99, 100, 101],
        "top_p": [1.0, 0.999, 0.9, 0.7, 0.3, 0.01],
        "min_p": [0.0, 0.0, 0.002, 0.3],
    }
    inputs = sampling_inputs(
        rows, **{name: [data.draw(st.sampled_from(v)) for _ in range(rows)] for name, v in draws.items()}
    )
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn(rows, size) * data.draw(st.sampled_from([0.1, 2.0]))
    if data.draw(st.booleans()):
        logits = logits.round()  # ties
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "HEADS", (8, 32))
        kept = sampler._weights(logits, inputs, slice(None))
        for row in range(rows):
            one = slice(row, row + 1)
            assert torch.equal(sampler._weights(logits[one], inputs_of(inputs, one), slice(None)), kept[one])
    assert torch.equal(kept > 0, kept_by_definition(logits, inputs) > 0)


def test_top_p_of_top_k_above_the_heads():
    """4096 tokens hold half of the row's weight and more than half of what top-k leaves."""
    torch.manual_seed(0)
    logits = torch.randn(3, 20011)
    inputs = sampling_inputs(3, top_k=9000, top_p=0.5)
    assert torch.equal(filtered(logits, inputs) > 0, kept_by_definition(logits, inputs) > 0)


EXTREMES = {
    "top_k above the vocabulary": {"top_k": 10**9},
    "tiny temperature": {"temperature": 1e-9},
    "smallest temperature": {"temperature": 1e-38},
    "huge temperature": {"temperature": 1e6, "top_k": 1},
    "tiny top_p": {"top_p": 1e-12},
    "min_p of one": {"min_p": 1.0},
}


@pytest.mark.parametrize("name", EXTREMES)
def test_extremes(name):
    torch.manual_seed(1)
    logits = torch.randn(4, 300) * 5
    logits[1, :] = -math.inf
    logits[1, 123] = -1e30
    logits[2, 5:] = -math.inf
    inputs = sampling_inputs(4, **EXTREMES[name])
    tokens = draw(logits, inputs)
    assert tokens[1] == 123
    assert tokens[2] < 5
    if name != "top_k above the vocabulary":
        assert torch.equal(tokens, logits.argmax(-1))


def test_rows_that_make_no_sense_give_some_token_and_harm_nobody():
    torch.manual_seed(1)
    logits = torch.randn(6, 2000)
    inputs = sampling_inputs(6, top_p=0.9)
    sound = draw(logits, inputs)
    logits[0], logits[2], logits[4] = torch.nan, -math.inf, math.inf
    tokens = draw(logits, inputs)
    assert ((tokens >= 0) & (tokens < 2000)).all()
    assert torch.equal(tokens[[1, 3, 5]], sound[[1, 3, 5]])


def chi_square(counts, expected):
    """Statistic and degrees of freedom, rare outcomes pooled."""
    order = np.argsort(expected)
    pooled, pool_c, pool_e = [], 0.0, 0.0
    for i in order:
        pool_c, pool_e = pool_c + counts[i], pool_e + expected[i]
        if pool_e >= 8:
            pooled.append((pool_c, pool_e))
            pool_c = pool_e = 0.0
    statistic = sum((c - e) ** 2 / e for c, e in pooled)
    return statistic, len(pooled) - 1


def assert_distribution(tokens, probabilities):
    counts = np.bincount(np.asarray(tokens), minlength=len(probabilities))
    expected = np.asarray(probabilities) * counts.sum()
    assert counts[expected == 0].sum() == 0
    statistic, freedom = chi_square(counts, expected)
    # mean + 5 standard deviations; the draws are fixed, so this either holds or not
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("vary", ["seeds", "positions", "both"])
@pytest.mark.parametrize(
    "filters", [{}, {"temperature": 0.5}, {"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.7}]
)
def test_draws_follow_the_distribution(vary, filters):
    torch.manual_seed(2)
    row = torch.randn(30) * 2
    n = 20000
    numbers = torch.arange(n)
    seeds = {"seeds": numbers, "positions": torch.full((n,), 7), "both": numbers // 100}[vary]
    positions = {"seeds": torch.full((n,), 3), "positions": numbers, "both": numbers % 100}[vary]
    inputs = sampling_inputs(n, seeds=seeds.tolist(), positions=positions.tolist(), **filters)
    tokens = draw(row.expand(n, -1), inputs)
    given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **filters}
    assert_distribution(tokens, naive_weights(row.tolist(), **given))


def test_neighbouring_seeds_and_positions_are_independent():
    """Pairs of draws fill the square evenly."""
    n = 20000
    seeds, positions = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    first = uniform(seeds, positions)
    for second in (uniform(seeds + 1, positions), uniform(seeds, positions + 1), uniform(seeds, positions, 1)):
        cell = (first * 8).long() * 8 + (second * 8).long()
        assert_distribution(cell.tolist(), [1 / 64] * 64)


def test_uniform_is_fixed_and_takes_any_int64():
    """SplitMix64 of the state 0 begins with 0xE220A8397B1DCDAF; texts must not change from release to release."""
    from hardpoint_platforms.reference.draw import _STEP, _signed, mix

    first = int(mix(torch.tensor([_signed(_STEP)]))) & (2**64 - 1)
    assert first == 0xE220A8397B1DCDAF
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63)])
    u = uniform(seeds, torch.tensor([0, 0, 0, 2**40, 5]))
    assert ((u >= 0) & (u < 1)).all()
    assert len(set(u.tolist())) == 5


def _crowd():
    torch.manual_seed(3)
    rows, vocab = 12, 1500
    logits = torch.randn(rows, vocab) * 3
    history = torch.randint(0, vocab, (rows, 20))
    history[3:, 10:] = vocab
    penalties = Penalties(
        history,
        torch.arange(rows),
        torch.tensor([0.0, 1.0, 2.0] * 4),
        torch.tensor([0.5, 0.0, -1.0] * 4),
        torch.tensor([1.0, 1.3, 0.7] * 4),
    )
    bias = LogitBias(torch.tensor([1, 5]), torch.tensor([3, 9]), torch.tensor([20.0, -math.inf]))
    inputs = sampling_inputs(
        rows,
        temperature=[0.0, 1.0, 0.7] * 4,
        top_k=[0, 5, 0, 1200] * 3,
        top_p=[1.0, 1.0, 0.9, 0.5, 0.99, 1.0] * 2,
        min_p=[0.0, 0.0, 0.0, 0.1] * 3,
        penalties=penalties,
        bias=bias,
        num_logprobs=3,
    )
    return logits, inputs


def _pick_row(inputs, row):
    cut = {name: getattr(inputs, name)[row : row + 1] for name in ("temperature", "top_k", "top_p", "min_p")}
    cut |= {name: getattr(inputs, name)[row : row + 1] for name in ("seeds", "positions")}
    p = inputs.penalties
    # alone, the history carries more unused places, and neutral rules that other rows asked for are gone
    penalties = Penalties(
        torch.nn.functional.pad(p.history[row : row + 1], (0, 3), value=1500),
        *(x[row : row + 1] for x in (p.prompt_lengths, p.presence, p.frequency, p.repetition)),
    )
    mine = inputs.bias.rows == row
    bias = LogitBias(inputs.bias.rows[mine] * 0, inputs.bias.tokens[mine], inputs.bias.values[mine])
    filters = bool(cut["top_k"] > 0 or cut["top_p"] < 1 or cut["min_p"] > 0)
    return dataclasses.replace(
        inputs, **cut, penalties=penalties, bias=bias if bool(mine.any()) else None, filters=filters
    )


def test_a_row_alone_equals_the_row_in_a_crowd():
    logits, inputs = _crowd()
    sample = sampler.build_sample(_INSTANCE)
    together = sample(logits, inputs)
    for row in range(logits.shape[0]):
        alone = sample(logits[row : row + 1], _pick_row(inputs, row))
        assert alone.token_ids[0] == together.token_ids[row]
        assert torch.equal(alone.logprobs.top_ids[0], together.logprobs.top_ids[row])
        assert torch.equal(alone.logprobs.top[0], together.logprobs.top[row])


def test_small_parts_give_the_same(monkeypatch):
    logits, inputs = _crowd()
    sample = sampler.build_sample(_INSTANCE)
    usual = sample(logits, inputs)
    monkeypatch.setattr(sampler, "WIDE_ELEMENTS", 4000)
    parts = sample(logits, inputs)
    assert torch.equal(usual.token_ids, parts.token_ids)
    assert torch.equal(usual.logprobs.rank, parts.logprobs.rank)


def test_penalties_against_the_definition():
    torch.manual_seed(4)
    logits = torch.randn(3, 10) * 3
    logits[1, 4] = -math.inf
    history = [[1, 1, 2, 3, 3, 3], [4, 4, 9], [0, 5, 5, 7]]
    prompts = [2, 0, 4]
    presence, frequency, repetition = [0.5, -1.0, 2.0], [0.25, 1.5, 2.0], [1.5, 1.0, 0.5]
    padded = torch.tensor([row + [10] * (7 - len(row)) for row in history])
    made = Penalties(
        padded,
        torch.tensor(prompts),
        torch.tensor(presence),
        torch.tensor(frequency),
        torch.tensor(repetition),
    )
    actual = adjust(logits, sampling_inputs(3, penalties=made))
    for row, tokens in enumerate(history):
        for token in range(10):
            x = float(logits[row, token])
            if token in tokens:
                x = x / repetition[row] if x > 0 else x * repetition[row]
                count = tokens[prompts[row] :].count(token)
                x -= frequency[row] * count + presence[row] * (count > 0)
                assert float(actual[row, token]) == pytest.approx(x, abs=1e-5)
            else:
                assert actual[row, token] == logits[row, token]


def test_neutral_penalties_change_no_bit():
    logits = torch.randn(2, 50)
    neutral = Penalties(
        torch.randint(0, 51, (2, 9)), torch.tensor([4, 0]), torch.zeros(2), torch.zeros(2), torch.ones(2)
    )
    assert torch.equal(adjust(logits, sampling_inputs(2, penalties=neutral)), logits)


def test_mask_and_bias():
    logits = torch.zeros(2, 70)
    allowed = torch.zeros(2, 3, dtype=torch.int32)
    allowed[0, 0], allowed[0, 2], allowed[1, 0] = 1 << 5, 1 << 3, -(1 << 31)
    inputs = sampling_inputs(2, allowed=allowed, temperature=[1.0, 0.0])
    assert filtered(logits, inputs)[0].nonzero().flatten().tolist() == [5, 67]
    assert draw(logits, inputs)[1] == 31
    bias = LogitBias(torch.tensor([0, 0, 1]), torch.tensor([5, 5, 2]), torch.tensor([3.0, 4.0, 9.0]))
    both = adjust(logits, dataclasses.replace(inputs, bias=bias))
    assert both[0, 5] == 7.0
    assert both[1, 2] == -math.inf  # a bias does not lift what the mask forbids


def test_logits_are_not_written():
    logits, inputs = _crowd()
    kept = logits.clone()
    draw(logits, inputs)
    assert torch.equal(logits, kept)


def test_logprobs_against_float64(providers, close):
    contract = CONTRACTS["logprobs"]
    for case in contract.samples(torch.float32):
        logits, tokens, k = case.make()
        expected = logits.double() - logits.double().logsumexp(-1, keepdim=True)
        result = run(providers["logprobs"], case)
        close(result.chosen, expected.gather(1, tokens[:, None])[:, 0], contract.tolerance[torch.float32])
        for row in range(len(tokens)):
            order = sorted(range(logits.shape[1]), key=lambda i: (-float(logits[row, i]), i))
            assert result.top_ids[row].tolist() == order[:k]
            assert order.index(int(tokens[row])) + 1 == result.rank[row]
            close(result.top[row], expected[row, order[:k]], contract.tolerance[torch.float32])


def test_logprobs_are_those_of_the_raw_logits():
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    bias = LogitBias(torch.tensor([0]), torch.tensor([0]), torch.tensor([100.0]))
    inputs = sampling_inputs(1, temperature=0.1, bias=bias, num_logprobs=1)
    result = sampler.build_sample(_INSTANCE)(logits, inputs)
    assert result.token_ids.tolist() == [0]
    assert result.logprobs.rank.tolist() == [3]
    assert result.logprobs.top_ids.tolist() == [[2]]
    assert float(result.logprobs.chosen) == pytest.approx(float(logits.log_softmax(-1)[0, 0]), abs=1e-6)
