"""The kit's own probabilities, its test of counts, and the canonical draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hardpoint_platforms.batch import LogitBias, Penalties
from hardpoint_platforms.conformance.chances import BORDER, SIGMAS, chances, deviation, strays, uniform
from hardpoint_platforms.ops.sampling import sampling_inputs
from hardpoint_platforms.reference.draw import uniform as reference_uniform

pytestmark = pytest.mark.reference

LOGITS = np.log(np.array([0.5, 0.25, 0.15, 0.1]))


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, [0.5, 0.25, 0.15, 0.1]),
        ({"temperature": 0.0}, [1, 0, 0, 0]),
        ({"temperature": 0.5}, [0.25, 0.0625, 0.0225, 0.01]),
        ({"top_k": 2}, [2, 1, 0, 0]),
        ({"top_p": 0.7}, [2, 1, 0, 0]),
        ({"top_p": 0.5}, [1, 0, 0, 0]),
        ({"min_p": 0.25}, [50, 25, 15, 0]),
        ({"allowed": torch.tensor([[0b1010]], dtype=torch.int32)}, [0, 25, 0, 10]),
        (
            {"bias": LogitBias(torch.tensor([0, 0]), torch.tensor([3, 0]), torch.tensor([math.log(5), -math.inf]))},
            [0, 25, 15, 50],
        ),
    ],
)
def test_by_hand(options, wanted) -> None:
    found = chances(LOGITS, sampling_inputs(1, **options), 0)
    np.testing.assert_allclose(found, np.array(wanted) / sum(wanted), rtol=1e-6)


def test_penalties_by_hand() -> None:
    history = torch.tensor([[0, 1, 1, 2, 4]])  # prompt 0, output 1 1 2, one unused place
    one = torch.ones(1)
    inputs = sampling_inputs(1, penalties=Penalties(history, torch.tensor([1]), 0.5 * one, 0.25 * one, 2.0 * one))
    x = LOGITS.copy()
    x[:3] *= 2.0  # all are negative
    x -= np.array([0.0, 0.5 + 0.5, 0.5 + 0.25, 0.0])
    np.testing.assert_allclose(chances(LOGITS, inputs, 0), np.exp(x) / np.exp(x).sum(), rtol=1e-6)


def test_counts_that_fit_and_counts_that_do_not() -> None:
    rng = np.random.default_rng(1)
    right = np.array([0.5, 0.25, 0.15, 0.1])
    scores = [deviation(rng.multinomial(3000, right), right) for _ in range(300)]
    assert max(scores) < 4.5
    assert -0.3 < np.mean(scores) < 0.3
    off = np.array([0.44, 0.31, 0.15, 0.1])
    assert deviation(rng.multinomial(3000, off), right) > SIGMAS
    assert deviation(np.array([10, 10, 10, 1]), np.array([0.4, 0.3, 0.3, 0.0])) == math.inf
    assert deviation(np.array([10, 0]), np.array([1.0, 0.0])) == 0.0


def test_canonical_numbers_are_the_references() -> None:
    seeds = [0, 1, -1, 7, 2**63 - 1, -(2**63), 1 << 40]
    positions = [0, 5, 2**31, 1, 3, 4, 131071]
    theirs = reference_uniform(torch.tensor(seeds), torch.tensor(positions))
    np.testing.assert_array_equal(uniform(seeds, positions), theirs.numpy())


def test_strays_by_hand() -> None:
    """Intervals 0 to 0.5, to 0.75, nothing, to 1."""
    row = np.array([0.5, 0.25, 0.0, 0.25])

    def found(u: float, token: int) -> tuple[int, list[int]]:
        different, strange = strays(iter([row]), np.array([u]), [token])
        return different, [right for _, right, _ in strange]

    assert found(0.2, 0) == found(0.5, 1) == found(0.75, 3) == found(0.999, 3) == (0, [])
    assert found(0.5 - BORDER / 2, 1) == found(0.5 + BORDER / 2, 0) == (1, [])
    assert found(0.5 - 2 * BORDER, 1) == (1, [0])
    assert found(0.5 + 2 * BORDER, 0) == (1, [1])
    assert found(0.75, 2) == (1, [3])  # never one without probability
    assert found(0.9, 0) == (1, [3])


def test_draws_in_single_precision_are_canonical_and_others_are_not() -> None:
    """Sums of float32 in another order may fall to the neighbour, and the kit lets them; half precision it does not."""
    generator = torch.Generator().manual_seed(3)
    rows, vocab = 100, 8000
    logits = torch.randn(rows, vocab, generator=generator) * 2
    inputs = sampling_inputs(rows, seeds=list(range(rows)), filters=False)
    u = uniform(inputs.seeds.tolist(), inputs.positions.tolist())

    def strange(tokens: torch.Tensor) -> int:
        wanted = (chances(row.double().numpy(), inputs, place) for place, row in enumerate(logits))
        return len(strays(wanted, u, tokens.tolist())[1])

    def drawn(weights: torch.Tensor) -> torch.Tensor:
        total = weights.cumsum(-1)
        aim = torch.from_numpy(u).to(total.dtype)[:, None] * total[:, -1:]
        return (total <= aim).sum(-1).clamp(max=vocab - 1)

    assert strange(drawn(logits.softmax(-1))) == 0
    assert strange(drawn(logits.softmax(-1).to(torch.float16))) > 0
    assert strange(drawn(logits.softmax(-1).flip(1))) > rows // 2
