"""Native argmax and sampling: the tokens that the reference draws, whatever the filters, the batch and the threads."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from hardpoint_cpu.native.abi import Code
from hardpoint_platforms.batch import LogitBias, Penalties
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.sampling import sampling_inputs
from hardpoint_platforms.reference import sampling as sampler
from hardpoint_platforms.reference.logit_rules import adjust

pytestmark = pytest.mark.reference

#: Codes of the ops that change logits in place.
PENALTIES, BIAS = 44, 45


@pytest.fixture(params=("best", "baseline"))
def stage(request, library, stages):
    """Two threads, with the best variant that runs here and with the one that runs anywhere."""
    library.use(None if request.param == "best" else request.param)
    yield stages(2)
    library.use()


def argmax(stage, logits):
    rows, vocab = logits.shape
    ids, finite = torch.full((rows,), -1), torch.empty(rows, dtype=torch.bool)
    stage.call(Code.ARGMAX, rows, (logits, ids, finite), (vocab, logits.stride(0)))
    return ids, finite


def change(stage, logits, inputs):
    """Bias and penalties, in place."""
    rows, vocab = logits.shape
    if inputs.bias is not None:
        b = inputs.bias
        stage.call(BIAS, rows, (logits, b.rows, b.tokens, b.values), (vocab, vocab, len(b.rows)))
    if inputs.penalties is not None:
        p = inputs.penalties
        pointers = (logits, p.history, p.prompt_lengths, p.presence, p.frequency, p.repetition)
        stage.call(PENALTIES, rows, pointers, (vocab, vocab, p.history.shape[1]))


def sample(stage, logits, inputs):
    """Ids and flags of the sampler over logits, which stay as they are."""
    work = logits.clone()
    change(stage, work, inputs)
    rows, vocab = work.shape
    ids, finite = torch.full((rows,), -1), torch.empty(rows, dtype=torch.bool)
    i = inputs
    pointers = (work, i.temperature, i.top_k, i.top_p, i.min_p, i.seeds, i.positions, ids, finite, i.allowed)
    stage.call(Code.SAMPLE, rows, pointers, (vocab, vocab))
    return ids, finite


def reference(logits, inputs):
    return sampler.draw_tokens(adjust(logits, inputs), inputs)


def case(inputs, rows):
    """The inputs of some rows."""
    names = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
    return dataclasses.replace(inputs, **{name: getattr(inputs, name)[rows] for name in names})


@pytest.mark.parametrize("vocab", [1, 3, 64, 65, 1000, 8192, 8193, 50001])
def test_argmax(stage, vocab):
    torch.manual_seed(vocab)
    logits = torch.randn(5, vocab + 3).round(decimals=1)[:, :vocab]
    logits[3] = -math.inf
    logits[4] = 2.0
    logits[4, vocab // 2 :] = 7.0
    ids, finite = argmax(stage, logits)
    assert torch.equal(ids[:3], logits[:3].argmax(-1))
    assert ids[3] == 0
    assert ids[4] == vocab // 2
    assert finite.tolist() == [True, True, True, False, True]


def test_rows_that_are_no_numbers_are_flagged(stage):
    torch.manual_seed(0)
    logits = torch.randn(6, 9000)
    sound = logits.clone()
    logits[0, 8999] = math.nan
    logits[1, 17] = math.inf
    logits[2] = -math.inf
    logits[3, :8000] = -math.inf
    flags = [False, False, False, True, True, True]
    inputs = sampling_inputs(6, temperature=[1.0, 1.0, 1.0, 0.0, 1.0, 0.5], top_p=[0.9, 1.0, 0.9, 1.0, 1.0, 0.5])
    ids, finite = argmax(stage, logits)
    assert finite.tolist() == flags
    assert torch.equal(ids, logits.argmax(-1))
    drawn, finite = sample(stage, logits, inputs)
    assert finite.tolist() == flags
    assert torch.equal(drawn[:4], ids[:4])
    assert torch.equal(drawn[4:], sample(stage, sound, inputs)[0][4:])


@pytest.mark.parametrize("number", range(len(list(CONTRACTS["sample"].samples(torch.float32)))))
def test_contract_samples(stage, number):
    logits, inputs = list(CONTRACTS["sample"].samples(torch.float32))[number].make()
    changed = logits.clone()
    change(stage, changed, inputs)
    assert torch.equal(changed, adjust(logits, dataclasses.replace(inputs, allowed=None)))
    ids, finite = sample(stage, logits, inputs)
    assert torch.equal(ids, reference(logits, inputs))
    assert finite.all()


def shapes(rows, vocab):
    """Rows of logits of several kinds."""
    torch.manual_seed(vocab)
    flat = torch.rand(rows, vocab)
    peaked = torch.randn(rows, vocab) * 4
    ties = (torch.randn(rows, vocab) * 2).round()
    thin = torch.randn(rows, vocab)
    thin[:, torch.rand(vocab) < 0.9] = -math.inf
    thin[:, vocab // 3] = 9.0
    return {"flat": flat, "peaked": peaked, "ties": ties, "mostly banned": thin, "equal": torch.zeros(rows, vocab)}


def some_inputs(rows):
    """Every row its own mixture of filters, seeds and positions."""
    torch.manual_seed(7)

    def choose(*values):
        return torch.tensor(values)[torch.randint(len(values), (rows,))].tolist()

    return sampling_inputs(
        rows,
        temperature=choose(1.0, 0.7, 1.3, 0.2, 0.0),
        top_k=choose(0, 0, 1, 40, 300, 100000),
        top_p=choose(1.0, 1.0, 0.95, 0.5, 0.999, 1e-6),
        min_p=choose(0.0, 0.0, 0.05, 0.5, 1.0),
        seeds=torch.randint(-(2**62), 2**62, (rows,)).tolist(),
        positions=torch.randint(0, 1 << 20, (rows,)).tolist(),
    )


@pytest.mark.parametrize("kind", shapes(1, 8))
def test_same_draws_as_the_reference_on_ten_thousand_pairs(stages, library, kind):
    library.use()
    rows = 10000
    inputs = some_inputs(rows)
    logits = shapes(1, 700)[kind].expand(rows, -1)
    ids, finite = sample(stages(2), logits, inputs)
    assert torch.equal(ids, reference(logits, inputs))
    assert finite.all()


@pytest.mark.parametrize("kind", shapes(1, 8))
def test_same_draws_from_a_large_vocabulary(stage, kind):
    inputs = some_inputs(60)
    logits = shapes(60, 20011)[kind]
    assert torch.equal(sample(stage, logits, inputs)[0], reference(logits, inputs))


@pytest.mark.parametrize("kind", shapes(1, 8))
@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 5000},
        {"top_k": 19999},
        {"top_p": 0.9},
        {"top_p": 0.99999},
        {"top_k": 9000, "top_p": 0.7},
        {"top_k": 9000, "top_p": 0.7, "min_p": 0.001},
        {"top_p": 0.8, "min_p": 0.1},
        {"temperature": 1e4, "top_p": 0.6},
        {"temperature": 1e30, "top_k": 7000},
        {"temperature": 1e30, "top_k": 7, "top_p": 0.5},
    ],
    ids=str,
)
def test_filters_that_keep_more_than_can_be_sorted(stage, kind, filters):
    rows = 12
    logits = shapes(rows, 20011)[kind]
    inputs = sampling_inputs(rows, **filters)
    assert torch.equal(sample(stage, logits, inputs)[0], reference(logits, inputs))


def test_weights_that_differ_in_their_last_bits(stage):
    """Which of them top-p keeps hangs on the last bit of exp, which torch has one of per processor."""
    logits = shapes(12, 20011)["flat"]
    inputs = sampling_inputs(12, temperature=1e12, top_p=0.3)
    apart = (sample(stage, logits, inputs)[0] - reference(logits, inputs)).abs()
    assert apart.max() <= 16


def test_logits_that_differ_less_than_their_weights(stage):
    """Beside a large logit, tiny ones have one weight: of these the lower ids stay."""
    torch.manual_seed(5)
    logits = torch.randn(8, 9001) * 1e-25
    logits[:, 4000] = 1.0
    for filters in ({"top_k": 100}, {"top_k": 6000}, {"top_p": 0.4}, {"top_p": 0.004}):
        inputs = sampling_inputs(8, **filters)
        assert torch.equal(sample(stage, logits, inputs)[0], reference(logits, inputs)), filters


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 10**9},
        {"temperature": 1e-9},
        {"temperature": 1e-38},
        {"temperature": 1e6, "top_k": 1},
        {"top_p": 1e-12},
        {"top_p": 0.0},
        {"min_p": 1.0},
        {"min_p": 2.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab", [300, 30000])
def test_extremes(stage, changes, vocab):
    torch.manual_seed(1)
    logits = torch.randn(4, vocab) * 5
    logits[1, :] = -math.inf
    logits[1, 123] = -1e30
    logits[2, 5:] = -math.inf
    logits[3, 7] = 3e38
    logits[3, 8] = -3e38
    inputs = sampling_inputs(4, **changes)
    ids, finite = sample(stage, logits, inputs)
    assert torch.equal(ids, reference(logits, inputs))
    assert ids[1] == 123
    assert finite.all()


@pytest.mark.parametrize("vocab", [131, 49152, 49153])
def test_allowed_tokens(stage, vocab):
    torch.manual_seed(2)
    rows = 5
    logits = torch.randn(rows, vocab)
    allowed = torch.randint(-(1 << 31), 1 << 31, (rows, -(-vocab // 32))).to(torch.int32)
    allowed[1] = 0
    allowed[1, 2] = 1 << 20
    allowed[2] = -1
    allowed[3] = 0
    logits[0, 0] = math.nan  # whether it is allowed or not
    inputs = sampling_inputs(
        rows, allowed=allowed, top_p=[1.0, 0.9, 0.9, 1.0, 1.0], temperature=[1.0, 1.0, 1.0, 1.0, 0.0]
    )
    ids, finite = sample(stage, logits, inputs)
    assert torch.equal(ids[1:], reference(logits, inputs)[1:])
    assert ids[1] == 84
    assert finite.tolist() == [False, True, True, True, True]


@pytest.mark.parametrize("vocab", [700, 49152])
def test_a_row_alone_equals_the_row_in_a_crowd_on_any_number_of_threads(stages, library, vocab):
    rows = 30
    inputs = some_inputs(rows)
    torch.manual_seed(3)
    logits = torch.randn(rows, vocab) * torch.linspace(0.1, 4, rows)[:, None]
    for variant in (None, "baseline"):
        library.use(variant)
        together = sample(stages(2), logits, inputs)[0]
        for threads in (1, 3):
            assert torch.equal(sample(stages(threads), logits, inputs)[0], together)
        for row in range(rows):
            alone = slice(row, row + 1)
            assert sample(stages(1 + row % 3), logits[alone], case(inputs, alone))[0] == together[row]
    library.use()


def test_penalties_and_bias_change_the_same_bits_as_the_reference(stage):
    torch.manual_seed(4)
    rows, vocab, length = 7, 500, 900
    logits = torch.randn(rows, vocab) * 3
    logits[1, 4] = -math.inf
    history = torch.randint(0, vocab + 1, (rows, length))
    history[2, 5:] = vocab
    neutral = [True] + [False] * (rows - 1)
    numbers = [torch.where(torch.tensor(neutral), off, torch.rand(rows) + 0.5) for off in (0.0, 0.0, 1.0)]
    made = Penalties(history, torch.randint(0, length, (rows,)), *numbers)
    at = torch.tensor([0, 0, 6, 3])
    bias = LogitBias(at, torch.tensor([3, 3, 499, 0]), torch.tensor([0.1, 7.3, -math.inf, 2.0]))
    inputs = sampling_inputs(rows, penalties=made, bias=bias)
    changed = logits.clone()
    change(stage, changed, inputs)
    assert torch.equal(changed, adjust(logits, inputs))
    unbiased = dataclasses.replace(inputs, bias=None)
    changed = logits.clone()
    change(stage, changed, unbiased)
    assert torch.equal(changed[0], logits[0])


def logprobs(stage, logits, tokens, k):
    rows, vocab = logits.shape
    chosen, rank = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    ids, top = torch.empty((rows, k), dtype=torch.int64), torch.empty((rows, k))
    stage.call(Code.LOGPROBS, rows, (logits, tokens, chosen, rank, ids, top), (vocab, vocab, k))
    return chosen, rank, ids, top


@pytest.mark.parametrize(("rows", "vocab", "k"), [(4, 97, 5), (1, 97, 0), (3, 11, 20), (2, 5000, 20), (2, 50001, 1000)])
def test_logprobs_against_float64(stage, rows, vocab, k):
    torch.manual_seed(vocab)
    logits = torch.randn(rows, vocab) * 4
    logits[0, 3:6] = -math.inf
    tokens = torch.randint(0, vocab, (rows,))
    chosen, rank, ids, top = logprobs(stage, logits, tokens, k)
    exact = logits.double().log_softmax(-1)
    torch.testing.assert_close(chosen.double(), exact.gather(1, tokens[:, None])[:, 0], atol=1e-5, rtol=1e-5)
    own = logits.gather(1, tokens[:, None])
    tied = (exact - exact.gather(1, tokens[:, None])).abs() < 1e-5  # float32 may call them equal
    more = ((logits > own) & ~tied).sum(-1) + 1
    assert ((rank >= more) & (rank <= (logits > own).sum(-1) + 1)).all()
    count = min(k, vocab)
    best, order = exact.sort(dim=-1, descending=True, stable=True)
    torch.testing.assert_close(top[:, :count].double(), best[:, :count], atol=1e-5, rtol=1e-5)
    if vocab <= 5000:
        assert torch.equal(ids[:, :count], order[:, :count])
    assert (ids[:, count:] == -1).all()
    assert (top[:, 1:] <= top[:, :-1]).all()


def test_logprobs_of_equals_come_by_id(stage):
    logits = torch.zeros(2, 6000)
    logits[1, 5000:] = 1e-9  # larger, but not once the logarithm of the sum is taken away
    chosen, rank, ids, top = logprobs(stage, logits, torch.tensor([5999, 5999]), 5)
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert rank.tolist() == [1, 1]
    torch.testing.assert_close(chosen, torch.full((2,), -math.log(6000)))
    assert (top == chosen[:, None]).all()


def test_logprobs_of_rows_that_are_no_numbers(stage):
    logits = torch.randn(4, 100)
    logits[0, 3], logits[1, 3], logits[2] = math.nan, math.inf, -math.inf
    chosen, rank, ids, top = logprobs(stage, logits, torch.tensor([5, 6, 7, 8]), 3)
    assert chosen[:3].isnan().all()
    assert top[:3].isnan().all()
    assert chosen[3].isfinite()
    assert ((ids >= 0) & (ids < 100)).all()
    assert ((rank >= 1) & (rank <= 100)).all()


def test_logprobs_do_not_depend_on_batch_and_threads(stages, library):
    library.use()
    torch.manual_seed(6)
    logits, tokens = torch.randn(9, 30000), torch.randint(0, 30000, (9,))
    together = logprobs(stages(2), logits, tokens, 8)
    for threads in (1, 3):
        for ours, theirs in zip(logprobs(stages(threads), logits, tokens, 8), together, strict=True):
            assert torch.equal(ours, theirs)
    for row in range(9):
        for ours, theirs in zip(
            logprobs(stages(2), logits[row : row + 1], tokens[row : row + 1], 8), together, strict=True
        ):
            assert torch.equal(ours[0], theirs[row])
