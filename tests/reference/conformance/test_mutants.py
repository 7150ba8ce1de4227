"""The kit proves itself: every seeded fault of the reference is caught, and the sound reference is not blamed."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hardpoint_platforms.conformance import memory
from hardpoint_platforms.conformance.mutants.catalogue import FAULTS, run
from hardpoint_platforms.conformance.mutants.platform import SOUND, Fault
from hardpoint_platforms.conformance.runner import Selection
from hardpoint_platforms.conformance.verdict import Status
from hardpoint_platforms.reference.platform import ReferenceDevice

pytestmark = pytest.mark.reference


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def sound() -> frozenset[str]:
    """Ids that fail without any fault: what a mutant's own failures are told from. Collectives come with theirs."""
    groups = ("load", "memory", "ops", "attention", "state", "programs", "sampling")
    report = run(SOUND, Selection(groups=groups))
    assert len(report.verdicts) > 250
    return frozenset(verdict.case for verdict in report.failures())


def test_nothing_is_held_against_the_sound_one(sound: frozenset[str]) -> None:
    assert not sound


def test_there_are_enough() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 25


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_caught(fault: Fault, sound: frozenset[str]) -> None:
    report = run(fault)
    found = [verdict for verdict in report.failures() if verdict.case not in sound]
    assert found, f"{len(report.verdicts)} checks of {fault.groups} pass"
    for verdict in found:
        assert verdict.message.startswith("mutant-hardpoint 0: ")
        assert verdict.contract in verdict.message or verdict.contract == "setup"
        assert f"--case {verdict.case}" in verdict.repeat.replace("'", "")
    assert any(verdict.blame for verdict in found)


def test_a_leak_is_seen_in_a_process_whose_heap_has_holes() -> None:
    """Free memory that a process still holds, 280 MB in pieces, would take up what leaks."""
    fault = next(fault for fault in FAULTS if fault.name == "zeros leaks")
    run(fault)  # once, so that the next run finds all that it sets up
    freed, between = [], []
    for _ in range(4000):
        freed.append(torch.ones(70_000, dtype=torch.uint8))
        between.append(torch.ones(300))
    del freed
    assert [verdict.contract for verdict in run(fault).failures()] == ["accounting"]
    del between


def test_pages_of_files_are_not_held(tmp_path: Path) -> None:
    """The system takes them back when it likes, and a leak of as much would not be seen."""
    (tmp_path / "file").write_bytes(bytes(64 << 20))
    with (tmp_path / "file").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        before = memory._held(ReferenceDevice())
        assert not any(mapped[at] for at in range(0, len(mapped), 4096))
        assert abs(memory._held(ReferenceDevice()) - before) < memory.DRIFT_BYTES // 2


def test_a_failing_case_repeats_alone() -> None:
    fault = next(fault for fault in FAULTS if fault.name == "a stale page is read")
    first = run(fault, Selection(groups=("attention",), seed=5)).failures()[0]
    again = run(fault, Selection(cases=(first.case,), seed=5))
    assert [(v.case, v.status, v.error) for v in again.verdicts] == [(first.case, Status.FAIL, first.error)]
    assert "--seed 5" in first.repeat
