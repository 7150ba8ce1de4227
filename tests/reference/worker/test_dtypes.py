"""Which dtype a model runs in."""

from __future__ import annotations

import pytest
import torch

from hardpoint.errors import ConfigError
from hardpoint.worker.dtypes import choose_dtype
from hardpoint_platforms.capabilities import Capabilities

pytestmark = pytest.mark.reference
HALVES = Capabilities(compute_dtypes=(torch.bfloat16, torch.float16, torch.float32))
SINGLE = Capabilities(compute_dtypes=(torch.float32, torch.bfloat16))


@pytest.mark.parametrize(
    ("wanted", "own", "capabilities", "expected"),
    [
        ("auto", "float16", HALVES, torch.float16),
        ("auto", "float32", HALVES, torch.bfloat16),
        ("auto", None, HALVES, torch.bfloat16),
        ("auto", "bfloat16", SINGLE, torch.float32),
        ("bf16", "float32", SINGLE, torch.bfloat16),
    ],
)
def test_choice(wanted, own, capabilities, expected):
    assert choose_dtype(wanted, {"torch_dtype": own}, capabilities) is expected


@pytest.mark.parametrize("wanted", ["float16", "int7"])
def test_refused_with_the_flag_and_what_there_is(wanted):
    with pytest.raises(ConfigError, match=r"--dtype.*float32"):
        choose_dtype(wanted, {}, SINGLE)
