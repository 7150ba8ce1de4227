"""Fixtures of the op tests: providers by name, and a comparison that says where two results differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hardpoint_platforms.ops.contract import Tolerance
from hardpoint_platforms.ops.provider import OpProvider
from hardpoint_platforms.reference.providers import reference_blocks, reference_providers


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def providers() -> dict[str, OpProvider]:
    """The reference's provider of every contract, blocks included."""
    return {provider.op: provider for provider in (*reference_providers(), *reference_blocks())}


@pytest.fixture
def close() -> Callable[..., None]:
    def check(actual: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance, where: Any = "") -> None:
        assert actual.shape == expected.shape, where
        torch.testing.assert_close(
            actual.double(),
            expected.double(),
            atol=tolerance.atol,
            rtol=tolerance.rtol,
            msg=lambda text: f"{where}: {text}",
        )

    return check
