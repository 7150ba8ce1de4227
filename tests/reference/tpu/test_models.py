"""Tiny models of six families through the engine's own runner and scheduler, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("jax")

from hardpoint.conformance.tiny import FAMILIES, Crowd, crowd
from hardpoint_platforms.reference.platform import ReferenceDevice

pytestmark = pytest.mark.reference


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_the_references(device: Any, family: str) -> None:
    """Chunks of prompts, preemptions and shared prefixes included; and nothing is compiled on the way."""
    messages = crowd(5)
    served = Crowd(device, family, torch.float32, torch.float32, 16)
    late = device.late_compiles
    ours = served.serve(messages)
    assert device.late_compiles == late
    theirs = Crowd(ReferenceDevice(), family, torch.float32, torch.float32, 16).serve(messages)
    assert served.hits > 0
    assert ours.keys() == theirs.keys()
    for name, answer in theirs.items():
        assert ours[name].tokens == answer.tokens, name
        assert ours[name].logprobs == pytest.approx(answer.logprobs, abs=2e-3)
