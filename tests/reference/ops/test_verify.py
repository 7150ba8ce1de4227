"""Verification of drafts: the text is distributed as without drafts, and the same for certain drafts."""

from __future__ import annotations

import pytest
import torch

from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.samples import run
from hardpoint_platforms.ops.sampling import SAMPLE, VERIFY, sampling_inputs
from hardpoint_platforms.reference.sampling import build_sample, build_verify

pytestmark = pytest.mark.reference

verify = build_verify(VERIFY.instance("v", torch.float32))
sample = build_sample(SAMPLE.instance("s", torch.float32))


def test_shapes_and_counts(providers):
    for case in CONTRACTS["verify"].samples(torch.float32):
        logits, drafts, lengths, *_ = case.make()
        result = run(providers["verify"], case)
        assert result.token_ids.shape == (5, 4)
        for row, count in enumerate(result.counts.tolist()):
            assert 1 <= count <= lengths[row] + 1
            assert (result.token_ids[row, count:] == -1).all()
            assert torch.equal(result.token_ids[row, : count - 1], drafts[row, : count - 1])
            assert 0 <= result.token_ids[row, count - 1] < logits.shape[-1]


@pytest.mark.parametrize("probabilities", [False, True])
def test_greedy_takes_the_longest_right_beginning(probabilities):
    logits = torch.zeros(3, 4, 6)
    for place, token in enumerate([2, 4, 1, 5]):
        logits[:, place, token] = 1.0
    drafts = torch.tensor([[2, 4, 1], [2, 3, 1], [0, 4, 1]])
    probs = torch.full((3, 3, 6), 1 / 6) if probabilities else None
    inputs = sampling_inputs(12, temperature=0.0, all_greedy=not probabilities)
    result = verify(logits, drafts, torch.tensor([3, 3, 3]), probs, inputs)
    assert result.token_ids.tolist() == [[2, 4, 1, 5], [2, 4, -1, -1], [2, -1, -1, -1]]
    assert result.counts.tolist() == [4, 2, 1]
    short = verify(logits, drafts, torch.tensor([1, 0, 2]), probs, inputs)
    assert short.token_ids.tolist() == [[2, 4, -1, -1], [2, -1, -1, -1], [2, -1, -1, -1]]


def test_certain_drafts_give_the_text_of_the_plain_sampler():
    torch.manual_seed(0)
    rows, depth, vocab = 40, 3, 5
    logits = torch.randn(rows, depth + 1, vocab)
    inputs = sampling_inputs(rows * (depth + 1), top_p=0.9)
    own = sample(logits.flatten(0, 1), inputs).token_ids.view(rows, depth + 1)
    drafts = torch.randint(0, vocab, (rows, depth))
    result = verify(logits, drafts, torch.full((rows,), depth), None, inputs)
    assert result.counts.unique().numel() > 2
    for row, count in enumerate(result.counts.tolist()):
        assert torch.equal(result.token_ids[row, :count], own[row, :count])


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("filters", [{}, {"top_k": 4, "temperature": 0.7}])
def test_the_first_token_follows_the_target(certain, filters):
    """Whatever the draft model prefers."""
    torch.manual_seed(1)
    n, vocab = 30000, 8
    target, draft = torch.randn(2, vocab).mul(1.5), torch.randn(vocab).mul(1.5).softmax(-1)
    drafts = torch.multinomial(draft, n, replacement=True)[:, None]
    probs = None if certain else draft.expand(n, 1, vocab)
    inputs = sampling_inputs(2 * n, **filters)
    result = verify(target.expand(n, 2, vocab), drafts, torch.ones(n, dtype=torch.int64), probs, inputs)
    for place in range(2):
        weights = target[place] / filters.get("temperature", 1.0)
        if "top_k" in filters:
            weights = weights.masked_fill(weights < weights.topk(4).values[-1], -torch.inf)
        expected = weights.softmax(-1).double()
        reached = result.token_ids[result.counts > place, place]
        share = torch.bincount(reached, minlength=vocab) / len(reached)
        error = (expected * (1 - expected) / len(reached)).sqrt()
        assert (share[expected == 0] == 0).all()
        assert ((share - expected).abs() <= 5 * error + 1e-12).all()


def test_acceptance_rate_is_the_overlap():
    """min(1, p / q) accepts with probability sum(min(p, q)), the most that any scheme can."""
    torch.manual_seed(2)
    n, vocab = 30000, 8
    target, draft = torch.randn(vocab), torch.randn(vocab).softmax(-1)
    drafts = torch.multinomial(draft, n, replacement=True)[:, None]
    result = verify(
        target.expand(n, 2, vocab),
        drafts,
        torch.ones(n, dtype=torch.int64),
        draft.expand(n, 1, vocab),
        sampling_inputs(2 * n),
    )
    overlap = float(torch.minimum(target.softmax(-1), draft).sum())
    assert float((result.counts == 2).double().mean()) == pytest.approx(overlap, abs=0.015)


def test_requests_do_not_depend_on_each_other():
    torch.manual_seed(3)
    logits, drafts = torch.randn(6, 3, 9), torch.randint(0, 9, (6, 2))
    lengths, probs = torch.tensor([2, 1, 0, 2, 2, 1]), torch.randn(6, 2, 9).softmax(-1)
    inputs = sampling_inputs(18)
    together = verify(logits, drafts, lengths, probs, inputs)
    for r in range(6):
        rows = slice(3 * r, 3 * r + 3)
        mine = sampling_inputs(3, seeds=inputs.seeds[rows].tolist(), positions=inputs.positions[rows].tolist())
        one = slice(r, r + 1)
        alone = verify(logits[one], drafts[one], lengths[one], probs[one], mine)
        assert torch.equal(alone.token_ids[0], together.token_ids[r])
