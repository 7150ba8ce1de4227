"""The conformance kit up to level 3: all of what is quick, every n-th of what compiles a program each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

pytest.importorskip("jax")

from hardpoint_tpu.platform import TpuPlatform
from tpu_bench import FAST

from hardpoint_platforms.conformance.catalogue import own_groups
from hardpoint_platforms.conformance.checks import Check, Group
from hardpoint_platforms.conformance.ladder import reached
from hardpoint_platforms.conformance.runner import Selection, conduct
from hardpoint_platforms.conformance.subject import Subject, of_platform
from hardpoint_platforms.conformance.verdict import Status

pytestmark = pytest.mark.reference

#: Of the checks of a group every n-th runs, and the first of each contract.
EVERY = {"ops": 20, "attention": 48, "state": 24, "programs": 8, "sampling": 16, "memory": 1, "load": 1}


def thinned(group: Group, every: int) -> Group:
    """The group with fewer checks."""

    def made(subject: Subject) -> Iterable[Check]:
        contracts: set[str] = set()
        for number, check in enumerate(c for c in group.made(subject) if c.level <= 3):
            if number % every == 0 or check.contract not in contracts:
                contracts.add(check.contract)
                yield check

    return replace(group, made=made)


def test_level_three() -> None:
    subject = replace(of_platform(TpuPlatform(), "tpu", "hardpoint-tpu"), options=FAST)
    groups = [thinned(group, EVERY[group.name]) for group in own_groups() if group.name in EVERY]
    report = conduct(subject, groups, Selection(level=3))
    assert not report.failures(), [f"{v.case}: {v.message} at {v.blame}" for v in report.failures()]
    assert reached(list(report.verdicts), 3)[0] == 3
    passed = [verdict for verdict in report.verdicts if verdict.status is Status.PASS]
    assert len(passed) > 50
    assert {verdict.contract for verdict in passed} >= {"attention", "state_cache", "program", "sample", "linear"}
