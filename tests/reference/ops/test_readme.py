"""The platform in the README of hardpoint-platforms is whole: it opens, binds every op and computes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from hardpoint_platforms import CONTRACTS, DeviceUnavailable, op_table
from hardpoint_platforms.ops.samples import run

pytestmark = pytest.mark.reference

README = Path(__file__).resolve().parents[3] / "platforms" / "README.md"


def test_the_example_serves_every_contract():
    text = README.read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 40
    space: dict[str, object] = {}
    exec(compile(code, "README", "exec", dont_inherit=True), space)
    platform = space["hardpoint_platform"]()
    (info,) = platform.probe().devices
    device = platform.open(info.index, {})
    with pytest.raises(DeviceUnavailable, match="acme:1"):
        platform.open(1, {})
    table = op_table(device)
    instance = next(iter(CONTRACTS["attention"].samples(torch.float32)))
    bound = table.bind(instance.instance)
    assert bound.plan_index == 0
    out, _ = run(bound.provider, instance, device.torch_device)
    assert torch.isfinite(out).all()
    assert device.zeros((2, 3), torch.float32).shape == (2, 3)


def test_the_table_of_contracts_is_complete():
    text = README.read_text(encoding="utf-8")
    section = text.partition("## Op contracts")[2]
    assert set(CONTRACTS) <= set(re.findall(r"`(\w+)`", section))
