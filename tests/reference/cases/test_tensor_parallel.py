"""What an engine says to --tensor-parallel-size where it cannot do it. What it does elsewhere: tests/reference/tpu."""

from __future__ import annotations

from pathlib import Path

import pytest

from hardpoint import LLM
from hardpoint.errors import ConfigError
from hardpoint_platforms.errors import DeviceUnavailable

pytestmark = pytest.mark.reference


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_a_platform_of_one_rank_per_process_says_so(tiny: Path, device: str) -> None:
    with pytest.raises(DeviceUnavailable, match="one rank per process, and cannot open 2 devices as one") as error:
        LLM(str(tiny), device=device, tensor_parallel_size=2)
    assert "--tensor-parallel-size" in str(error.value.hint)


def test_layers_are_not_cut_twice(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="--placement and --tensor-parallel-size do not go together"):
        LLM(str(tiny), placement="layers[:1]=reference,layers[1:]=cpu", tensor_parallel_size=2)
