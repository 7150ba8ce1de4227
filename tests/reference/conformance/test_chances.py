"""The kit's own probabilities and its test of counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hardpoint_platforms.batch import LogitBias, Penalties
from hardpoint_platforms.conformance.chances import SIGMAS, chances, deviation
from hardpoint_platforms.ops.sampling import sampling_inputs

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
