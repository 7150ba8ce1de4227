"""The sampling kernels against the reference: the same tokens, the same kept sets, the same log-probabilities."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hardpoint_torch_gpu.kernels.sample_adjust import adjusted
from hardpoint_torch_gpu.kernels.sample_draw import draw
from hardpoint_torch_gpu.kernels.sample_filter import Edges, edges_of
from hardpoint_torch_gpu.kernels.sample_pieces import block_of, pieces_of, scale_of
from hardpoint_torch_gpu.kernels.sample_score import score
from hardpoint_torch_gpu.sampling import TritonLogprobs, TritonSample, TritonVerify, draw_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint_platforms.batch import LogitBias, Penalties, SamplingInputs
from hardpoint_platforms.ops.samples import Source
from hardpoint_platforms.ops.sampling import LOGPROBS, SAMPLE, VERIFY, sampling_inputs
from hardpoint_platforms.program import BIAS_ENTRIES
from hardpoint_platforms.reference import sampling as reference
from hardpoint_platforms.reference.logit_rules import adjust
from hardpoint_platforms.strict.static.sampling import kept_weights

pytestmark = [
    pytest.mark.reference,
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the conformance kit runs these"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # NaNs and infinities are among the inputs
]

INFINITY = float("inf")
#: (top_k, top_p, min_p): each alone, off, at or beyond its end; in pairs; and all three, where either may end first.
FILTERS = [
    (7, 1.0, 0.0), (1, 1.0, 0.0), (300, 1.0, 0.0), (10**6, 0.9, 0.0), (0, 0.4, 0.0), (0, 1e-6, 0.0), (0, 1.0, 0.02),
    (0, 1.0, 1.0), (0, 1.0, 0.0), (60, 0.9, 0.0), (4, 0.95, 0.0), (60, 1.0, 0.3), (0, 0.9, 0.1), (9, 0.6, 0.02),
]  # fmt: skip


def inputs_of(rows: int, source: Source, **changes: Any) -> SamplingInputs:
    """Draws with seeds and positions from all of int64."""
    seeds, positions = (source.integers(-(1 << 63), (1 << 63) - 1, rows) for _ in range(2))
    return dataclasses.replace(sampling_inputs(rows, **changes), seeds=seeds, positions=positions)


def expected(logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    return reference.draw_tokens(adjust(logits, inputs), inputs)


def filtered(source: Source, **changes: Any) -> SamplingInputs:
    """A row for each of FILTERS, at four temperatures."""
    top_k, top_p, min_p = (list(values) for values in zip(*FILTERS, strict=True))
    temperature = [(1.0, 0.3, 2.5, 40.0)[row % 4] for row in range(len(FILTERS))]
    return inputs_of(len(FILTERS), source, top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature, **changes)


def kept(x: torch.Tensor, inputs: SamplingInputs, edges: Edges) -> torch.Tensor:
    """bool [R, V]: what edges let through, by their definition, of tokens that weigh anything in fixed point."""
    bits = torch.where(x == 0, 0.0, x).view(torch.int32)
    key = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    z = (x - x.amax(-1, keepdim=True)) / inputs.temperature[:, None]
    level = key == edges.key[:, None]
    level &= level.cumsum(-1) <= edges.kept[:, None]
    return ((key > edges.key[:, None]) | level) & (z >= edges.floor[:, None]) & (z.exp() * scale_of(x.shape[1]) >= 1)


@pytest.mark.parametrize(("vocab", "block"), [(300, 64), (5000, 1024), (1, 0), (129, 128)])
def test_plain_draws_are_the_references(vocab: int, block: int) -> None:
    source = Source(vocab + block)
    logits = source.normal(60, vocab, scale=3.0)
    inputs = inputs_of(60, source, temperature=[0.0, 0.3, 1.0, 2.5, 50.0, 1e-30] * 10, filters=False)
    tokens, finite = draw_tokens(logits, inputs, block)
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens, expected(logits, inputs))
    assert finite.dtype == torch.bool
    assert bool(finite.all())


@pytest.mark.parametrize("scale", [0.5, 4.0])
def test_filtered_draws_are_the_references(scale: float) -> None:
    source = Source(int(scale * 10))
    logits, inputs = source.normal(len(FILTERS), 300, scale=scale), filtered(source)
    assert torch.equal(draw_tokens(logits, inputs, 64)[0], expected(logits, inputs))


def some_rows(kind: str, source: Source, vocab: int) -> torch.Tensor:
    """Logits for FILTERS, float32 [len(FILTERS), vocab]."""
    rows = len(FILTERS)
    numbers = source.normal(rows, vocab, scale=3.0)
    if kind == "numbers":
        numbers[:, vocab - 1] = numbers.amax(-1)  # the largest is nowhere alone
    elif kind == "narrow":
        numbers = 0.05 * numbers - 7.0
    elif kind == "few values":
        numbers = source.integers(-3, 3, rows, vocab).float()
    elif kind == "all equal":
        numbers = torch.full((rows, vocab), -2.5)
    elif kind == "one is all":
        numbers[:, vocab // 2] = 60.0
    elif kind == "two levels":
        numbers = torch.where(source.uniform(rows, vocab) < 0.5, 1.0, 1.0 + 2.0**-23)
    elif kind == "mostly minus infinity":
        numbers[:, 1:] = torch.where(source.uniform(rows, vocab - 1) < 0.95, -INFINITY, numbers[:, 1:])
    elif kind == "steep":
        numbers = torch.linspace(0.0, -300.0, vocab).expand(rows, vocab).contiguous()
    elif kind == "far below":  # more than any filter's bins below the largest
        numbers[:, vocab // 3] = 200.0
    else:
        raise ValueError(kind)
    return numbers


KINDS = (
    "numbers", "narrow", "few values", "all equal", "one is all", "two levels", "mostly minus infinity", "steep",
    "far below",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_filters_keep_what_the_reference_keeps(kind: str) -> None:
    """Whether bins are divided and lists short, by several programs, or the row itself is searched, by one."""
    source = Source(5)
    logits, inputs = some_rows(kind, source, 300), filtered(source)
    pieces = pieces_of(logits, inputs.temperature, block=128)
    wanted = kept_weights(logits, inputs, slice(None)) * scale_of(300) >= 1
    for longest, many, programs in ((32768, 4, 30), (3, 1024, 1)):
        edges = edges_of(logits, inputs.temperature, inputs, pieces, longest, many, programs)
        assert torch.equal(kept(logits, inputs, edges), wanted), f"lists up to {longest}, bins up to {many}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "block"), [(1, 0), (7, 0), (1000, 256)])
def test_filtered_draws_of_rows_of_every_kind(kind: str, vocab: int, block: int) -> None:
    if vocab == 1 and kind != "numbers":
        return
    source = Source(vocab)
    logits, inputs = some_rows(kind, source, vocab), filtered(source)
    assert torch.equal(draw_tokens(logits, inputs, block)[0], expected(logits, inputs))


@pytest.mark.parametrize(("top_k", "temperature", "longest"), [(0, 1.0, 32768), (0, 9.0, 32768), (4000, 5.0, 100)])
def test_a_large_flat_vocabulary(top_k: int, temperature: float, longest: int) -> None:
    """Bins that are divided; a list of several stretches, and a row in the place of one."""
    source = Source(8)
    logits = source.normal(1, 5000)
    inputs = inputs_of(1, source, temperature=temperature, top_k=top_k, top_p=0.9)
    x, heat, pieces = adjusted(logits, inputs, sums=False)
    edges = edges_of(x, heat, inputs, pieces, longest)
    assert torch.equal(kept(x, inputs, edges), kept_weights(x, inputs, slice(None)) > 0)
    assert torch.equal(draw(x, heat, inputs, pieces, edges)[0], expected(logits, inputs))


@pytest.mark.parametrize("vocab", [32003, pytest.param(128256, marks=pytest.mark.long)])
def test_vocabularies_of_models(vocab: int) -> None:
    """Flat rows, rounded as 16-bit products are, and of two levels of equals, beside a greedy and a cold one."""
    source = Source(vocab)
    logits = source.normal(5, vocab)
    logits[1] = logits[1].bfloat16().float() * 4.0
    logits[2] = torch.where(source.uniform(vocab) < 0.3, 2.0, 1.0)
    inputs = inputs_of(
        5, source, temperature=[1.0, 1.0, 1.0, 0.0, 0.1], top_p=[0.9, 0.9, 0.5, 0.9, 1.0], top_k=[0, 0, 0, 0, 50]
    )  # fmt: skip
    x, heat, pieces = adjusted(logits, inputs, sums=False)
    edges = edges_of(x, heat, inputs, pieces, programs=1)
    drawn = inputs.temperature > 0.0
    wanted = kept_weights(x, inputs, slice(None)) * scale_of(vocab) >= 1
    assert torch.equal(kept(x, inputs, edges)[drawn], wanted[drawn])
    assert torch.equal(draw(x, heat, inputs, pieces, edges)[0], expected(logits, inputs))


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_any_row_and_filters(data: st.DataObject) -> None:
    vocab = data.draw(st.integers(2, 48))
    values = st.sampled_from([-INFINITY, -90.0, -20.0, -1.0, -0.0, 0.0, 0.125, 0.126, 1.0, 17.0, 1e30])
    logits = torch.tensor([data.draw(st.lists(values, min_size=vocab, max_size=vocab))])
    logits[0, data.draw(st.integers(0, vocab - 1))] = 0.5  # one is finite
    inputs = inputs_of(
        1,
        Source(data.draw(st.integers(0, 99))),
        top_k=data.draw(st.integers(0, vocab + 1)),
        top_p=data.draw(st.sampled_from([1e-6, 0.25, 0.7, 0.999, 1.0])),
        min_p=data.draw(st.sampled_from([0.0, 1e-8, 0.2, 1.0])),
        temperature=data.draw(st.sampled_from([0.05, 1.0, 30.0])),
    )
    pieces = pieces_of(logits, inputs.temperature, block=16)
    wanted = kept_weights(logits, inputs, slice(None)) * scale_of(vocab) >= 1
    for longest, many in ((32768, 1024), (2, 1)):
        edges = edges_of(logits, inputs.temperature, inputs, pieces, longest, many)
        assert torch.equal(kept(logits, inputs, edges), wanted)
        assert torch.equal(draw(logits, inputs.temperature, inputs, pieces, edges)[0], expected(logits, inputs))


def test_greedy_takes_the_first_of_equals_and_both_zeros_are_equal() -> None:
    logits = torch.full((3, 300), -1.0)
    logits[0, [70, 200]] = 5.0
    logits[1, [9, 290]] = torch.tensor([-0.0, 0.0])
    logits[2] = 3.0
    for options in ({"all_greedy": True}, {"filters": False}, {}):
        tokens, _ = draw_tokens(logits, sampling_inputs(3, temperature=0.0, **options), 64)
        assert tokens.tolist() == [70, 9, 0]


@pytest.mark.parametrize("filters", [False, True])
def test_rows_that_cannot_be_drawn_from(filters: bool) -> None:
    source = Source(3)
    logits = source.normal(7, 300)
    logits[1, [150, 151]] = float("nan")
    logits[2, 77] = INFINITY
    logits[3] = -INFINITY
    logits[4, :299] = -INFINITY
    logits[5, 40:] = -INFINITY
    inputs = inputs_of(7, source, top_p=0.9 if filters else 1.0, filters=filters)
    tokens, finite = draw_tokens(logits, inputs, 64)
    assert finite.tolist() == [True, False, False, False, True, True, True]
    assert tokens[1:5].tolist() == [150, 77, 0, 299]
    assert torch.equal(tokens, expected(logits, inputs))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_finite_tells_of_the_raw_logits(temperature: float) -> None:
    logits = torch.zeros(2, 64)
    logits[0, 5] = INFINITY
    allowed = torch.tensor([[~(1 << 5), -1], [0, 0]], dtype=torch.int32)
    for greedy in {False, temperature == 0.0}:
        inputs = sampling_inputs(2, temperature=temperature, allowed=allowed, all_greedy=greedy, filters=False)
        tokens, finite = draw_tokens(logits, inputs)
        assert finite.tolist() == [False, True]
        assert tokens[0] != 5
        assert tokens[1] == 0  # nothing is allowed there


def penalties_of(source: Source, rows: int, vocab: int, length: int) -> Penalties:
    """Rows of which one is without effect; tokens occur several times in prompt and output."""
    history = source.integers(0, vocab // 4, rows, length)
    history[1, length // 2 :] = vocab
    off = torch.arange(rows) == 0
    return Penalties(
        history,
        source.integers(0, length + 1, rows),
        source.uniform(rows, low=-1.0).masked_fill(off, 0.0),
        source.uniform(rows, low=-1.0).masked_fill(off, 0.0),
        source.uniform(rows, low=0.5, high=2.0).masked_fill(off, 1.0),
    )


@pytest.mark.parametrize("parts", [("allowed",), ("bias",), ("penalties",), ("allowed", "bias", "penalties"), ()])
@pytest.mark.parametrize("length", [0, 40, 1500])
def test_logits_are_adjusted_as_by_the_reference(parts: tuple[str, ...], length: int) -> None:
    source, rows, vocab = Source(len(parts) + length), 4, 300
    logits = source.normal(rows, vocab, scale=3.0)
    before = logits.clone()
    made = {
        "allowed": source.integers(-(1 << 31), 1 << 31, rows, 10).to(torch.int32),
        "bias": LogitBias(
            torch.tensor([0, 3, 3, 1, 0]),
            torch.tensor([7, 299, 299, 0, 0]),
            torch.tensor([2.0, -1.0, -1.5, -INFINITY, 0.0]),
        ),
        "penalties": penalties_of(source, rows, vocab, length),
    }
    inputs = sampling_inputs(rows, filters=False, **{name: made[name] for name in parts})
    x, _, pieces = adjusted(logits, inputs, sums=False, block=64)
    torch.testing.assert_close(x, adjust(before, inputs), atol=1e-6, rtol=1e-6)
    assert torch.equal(logits, before)
    largest = pieces.at.gather(1, pieces.best.argmax(-1, keepdim=True))
    assert torch.equal(x.gather(1, largest)[:, 0], x.amax(-1))
    if parts == ("penalties",):
        assert torch.equal(x[0], before[0])


def test_a_step_of_full_shape() -> None:
    """Everything at once, as a static step has it; then each token's log-probabilities are of the raw logits."""
    source, rows, vocab = Source(21), 4, 300
    logits = source.normal(rows, vocab, scale=2.0)
    zeros = torch.zeros(rows * BIAS_ENTRIES, dtype=torch.int64)
    bias = LogitBias(zeros.clone(), zeros.clone(), zeros.float())
    bias.rows[:3], bias.tokens[:3] = torch.tensor([1, 2, 3]), torch.tensor([5, 6, 7])
    bias.values[:3] = torch.tensor([4.0, -INFINITY, 1.0])
    inputs = inputs_of(
        rows, source, temperature=[0.0, 1.0, 0.7, 2.0], top_k=[0, 20, 0, 5], top_p=[1.0, 0.9, 0.8, 1.0],
        penalties=penalties_of(source, rows, vocab, 64), bias=bias,
        allowed=torch.full((rows, 10), -1, dtype=torch.int32), num_logprobs=20,
    )  # fmt: skip
    found = TritonSample().build(SAMPLE.instance("test", torch.float32))(logits, inputs)
    wanted = reference.build_sample(SAMPLE.instance("test", torch.float32))(logits, inputs)
    assert torch.equal(found.token_ids, wanted.token_ids)
    for ours, theirs in zip(vars(found.logprobs).values(), vars(wanted.logprobs).values(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_a_row_alone_draws_what_it_draws_in_a_batch() -> None:
    source = Source(31)
    logits = source.normal(6, 300)
    inputs = inputs_of(6, source, top_k=[0, 5, 0, 50, 0, 3], top_p=[0.9, 1.0, 0.5, 0.8, 1.0, 0.2])
    together, _ = draw_tokens(logits, inputs)
    fields = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
    for row in range(6):
        one = {name: getattr(inputs, name)[row : row + 1] for name in fields}
        alone, _ = draw_tokens(logits[row : row + 1], dataclasses.replace(inputs, **one))
        assert alone[0] == together[row]


@pytest.mark.parametrize(("vocab", "k"), [(300, 5), (300, 0), (7, 20), (5000, 20), (40, 40)])
@pytest.mark.parametrize("tied", [False, True])
def test_scores_are_the_references(vocab: int, k: int, tied: bool) -> None:
    source = Source(vocab + k)
    logits = source.integers(-4, 4, 3, vocab).float() if tied else source.normal(3, vocab, scale=4.0)
    tokens = torch.tensor([int(logits[0].argmax()), int(logits[1].argmin()), vocab // 2])
    wanted = reference.score(logits, tokens, k)
    for block, longest in ((64 if vocab < 5000 else 0, 4096), (128, 2))[: 1 if vocab == 5000 else 2]:
        found = score(logits, tokens, k, block, longest)
        assert torch.equal(found.rank, wanted.rank)
        torch.testing.assert_close(found.chosen, wanted.chosen, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found.top, wanted.top, atol=1e-5, rtol=1e-5)
        if not tied:
            assert torch.equal(found.top_ids, wanted.top_ids)
        order = logits.sort(dim=-1, descending=True, stable=True).indices[:, : min(k, vocab)]
        assert torch.equal(found.top_ids, order)


def test_drafts_are_verified_as_by_the_reference() -> None:
    source, rows, depth, vocab = Source(41), 4, 2, 40
    logits = source.normal(rows, depth + 1, vocab, scale=2.0)
    inputs = inputs_of(rows * (depth + 1), source, top_k=20)
    instance = VERIFY.instance("test", torch.float32)
    drafts = expected(logits.flatten(0, 1), inputs).view(rows, depth + 1)[:, :depth].clone()
    drafts[::2, 1] = (drafts[::2, 1] + 1) % vocab
    lengths = torch.tensor([2, 2, 1, 0])
    probabilities = source.normal(rows, depth, vocab).softmax(-1)
    for each in (None, probabilities):
        found = TritonVerify().build(instance)(logits, drafts, lengths, each, inputs)
        wanted = reference.build_verify(instance)(logits, drafts, lengths, each, inputs)
        assert torch.equal(found.token_ids, wanted.token_ids)
        assert torch.equal(found.counts, wanted.counts)


def test_no_rows() -> None:
    tokens, finite = draw_tokens(torch.zeros(0, 300), sampling_inputs(0))
    assert (tokens.shape, tokens.dtype) == ((0,), torch.int64)
    assert (finite.shape, finite.dtype) == ((0,), torch.bool)
    none = TritonLogprobs().build(LOGPROBS.instance("test", torch.float32))(torch.zeros(0, 9), tokens, 5)
    assert (none.top_ids.shape, none.top_ids.dtype, none.top.shape) == ((0, 5), torch.int64, (0, 5))


@pytest.mark.parametrize("vocab", [1, 300, 4096, 32000, 128256, 151936, 262144])
def test_pieces_suit_the_vocabulary(vocab: int) -> None:
    count = -(-vocab // block_of(vocab))
    assert count <= 64
    assert count > 20 or vocab <= 4096
    assert scale_of(vocab) * vocab < 2.0**63
