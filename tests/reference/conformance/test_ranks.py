"""Collectives whose ranks are processes: each opens its device, what is wrong in one is told with the line in it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hardpoint_platforms.conformance import collectives
from hardpoint_platforms.conformance.checks import Wrong
from hardpoint_platforms.conformance.ranks import Ranks, Task
from hardpoint_platforms.conformance.runner import Selection, conduct
from hardpoint_platforms.conformance.subject import Subject, named

pytestmark = pytest.mark.reference

#: Two devices. Sums are wrong at rank 1 alone, and the process of rank 1 ends in a broadcast.
PLATFORM = """
import os
import sys
from hardpoint_platforms.device import DeviceInfo
from hardpoint_platforms.hookspecs import hookimpl
from hardpoint_platforms.platform import Platform, ProbeResult
from hardpoint_platforms.reference.communication import GlooCommunicator
from hardpoint_platforms.reference.platform import ReferenceDevice


class Links(GlooCommunicator):
    def all_reduce(self, x, axis):
        return super().all_reduce(x, axis) + self.rank

    def broadcast(self, x, axis, root=0):
        if self.rank == 1:
            os._exit(7)
        return super().broadcast(x, axis, root)


class LinkedDevice(ReferenceDevice):
    def __init__(self, index):
        super().__init__()
        self.info = DeviceInfo("linked", index, "a fake chip")

    def communicator(self, mesh, rank, rendezvous):
        print(f"rank {rank} is on device {self.info.index}")
        return Links(mesh, rank, rendezvous)


class Linked(Platform):
    def probe(self):
        return ProbeResult(tuple(DeviceInfo("linked", index, "a fake chip") for index in (0, 1)))

    def open(self, index, options):
        return LinkedDevice(index)


@hookimpl
def hardpoint_platform():
    return Linked()
"""
MANIFEST = {
    "manifest": "1.0", "name": "linked", "vendor": "Nobody", "kind": "accelerator", "priority": 1,
    "interfaces": {"platform": "1.0", "device": "1.0"},
}  # fmt: skip


@pytest.fixture
def linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Subject]:
    """The plugin as if it were installed, here and in processes that are started."""
    package, info = tmp_path / "linked_chip", tmp_path / "linked_chip-1.0.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text(PLATFORM)
    (package / "hardpoint.json").write_text(json.dumps(MANIFEST))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: linked-chip\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hardpoint.platforms]\nlinked = linked_chip\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield named("linked")
    del sys.modules["linked_chip"]


def test_what_is_wrong_in_one_process_is_told_and_the_rest_runs(linked: Subject, capfd: Any) -> None:
    names = ("all_reduce", "all_gather", "broadcast", "send-and-receive")
    chosen = Selection(cases=tuple(f"collectives/communicator/{name}-of-2-ranks/float32" for name in names))
    report = conduct(linked, [collectives.GROUP], chosen)
    verdicts = {verdict.case.split("/")[2].partition("-of-")[0]: verdict for verdict in report.verdicts}
    assert {name: verdict.status.value for name, verdict in verdicts.items()} == {
        "all_reduce": "fail", "all_gather": "pass", "broadcast": "fail", "send-and-receive": "pass",
    }  # fmt: skip
    told = verdicts["all_reduce"]
    assert told.message.startswith("linked-chip 1.0: communicator all_reduce over 'tensor' at rank 1 is off by 1 at")
    assert told.blame.endswith("linked_chip/__init__.py:12 in Links.all_reduce")
    assert told.error == pytest.approx(1.0)
    assert "a rank's process ended with exit code 7" in verdicts["broadcast"].message
    said = capfd.readouterr()
    assert "rank 0 is on device 0" in said.err
    assert "rank 1 is on device 1" in said.err
    assert said.out == ""


def test_one_start_serves_every_mesh() -> None:
    """Processes stay from check to check, and end with the run."""
    subject = named("reference")
    ranks = Ranks(subject)
    for mesh in collectives.MESHES[:2]:
        for name in ("all_reduce", "send and receive", "mesh"):
            ranks.run(Task(mesh.axes, mesh.sizes, "float32", name, 5))
    children = [child._process for child in ranks._children]
    assert len(children) == 2
    assert [child.poll() for child in children] == [None, None]
    with pytest.raises(Wrong, match="no attribute"):
        ranks.run(Task(("tensor",), (2,), "float32", "no such collective", 5))
    ranks.run(Task(("tensor",), (2,), "int64", "all_gather", 5))
    assert [child.poll() for child in children] == [None, None]
    del ranks
    assert all(child.poll() is not None for child in children)
