"""What the processor plugin reads of a machine (from files made up here) and what it chooses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from hardpoint_cpu import machine, tuning
from hardpoint_cpu.machine import Machine, parse_cpu_list
from hardpoint_platforms.discovery import discover
from hardpoint_platforms.errors import DeviceUnavailable, PlatformError
from hardpoint_platforms.ops.samples import SCHEMES, Source, quantized
from hardpoint_platforms.selection import open_device, select

pytestmark = pytest.mark.reference

BIG = Machine(
    "Big", frozenset(range(16)), 8, None, {0: frozenset(range(8)), 1: frozenset(range(8, 16))}, frozenset({"avx2"})
)


@pytest.fixture(autouse=True)
def keep_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def files(root: Path, content: dict[str, str]) -> Path:
    for name, text in content.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.mark.parametrize(("text", "cpus"), [("", []), ("0", [0]), ("0-3,8", [0, 1, 2, 3, 8]), ("2,4-5\n", [2, 4, 5])])
def test_cpu_lists(text: str, cpus: list[int]) -> None:
    assert parse_cpu_list(text) == frozenset(cpus)


def test_hardware_threads_of_a_core_count_once(tmp_path, monkeypatch) -> None:
    topology = {}
    for cpu in range(8):
        topology[f"cpu{cpu}/topology/physical_package_id"] = str(cpu % 4 // 2)
        topology[f"cpu{cpu}/topology/core_id"] = str(cpu % 2)
    monkeypatch.setattr(machine, "_CPUS", files(tmp_path, topology))
    assert machine.physical_cores(frozenset(range(8))) == 4
    assert machine.physical_cores(frozenset({0, 4})) == 1
    assert machine.physical_cores(frozenset({0, 1, 2, 6, 99})) == 4


def cgroup(monkeypatch, root: Path, *folders: str) -> None:
    monkeypatch.setattr(machine, "_cgroup_folders", lambda controller: [root / folder for folder in folders])


@pytest.mark.parametrize(
    ("content", "quota"),
    [
        ({}, None),
        ({"a/cpu.max": "max 100000"}, None),
        ({"a/cpu.max": "150000 100000"}, 1.5),
        ({"a/b/cpu.max": "400000 100000", "a/cpu.max": "200000 100000"}, 2.0),
        ({"a/cpu.cfs_quota_us": "-1", "a/cpu.cfs_period_us": "100000"}, None),
        ({"a/cpu.cfs_quota_us": "50000", "a/cpu.cfs_period_us": "100000"}, 0.5),
    ],
)
def test_cpu_quota_of_both_cgroup_versions(tmp_path, monkeypatch, content, quota) -> None:
    files(tmp_path, content)
    cgroup(monkeypatch, tmp_path, "a/b", "a")
    assert machine.look_at_machine().quota == quota


def test_memory_is_what_the_cgroup_leaves(tmp_path, monkeypatch) -> None:
    free, total = machine.memory()
    assert 0 < free <= total
    text = "anon 5\ninactive_file 3000000"
    files(tmp_path, {"a/memory.max": "50000000", "a/memory.current": "10000000", "a/memory.stat": text})
    cgroup(monkeypatch, tmp_path, "a")
    assert machine.memory() == (43000000, 50000000)
    files(tmp_path, {"a/memory.max": "max"})
    assert machine.memory()[1] == total


def test_the_cgroups_above_are_looked_at(monkeypatch) -> None:
    monkeypatch.setattr(machine, "_text", lambda path: "0::/x/y" if path.name == "cgroup" else None)
    root = machine._CGROUP
    assert list(machine._cgroup_folders("cpu")) == [root / "x/y", root / "x", root]
    monkeypatch.setattr(
        machine, "_text", lambda path: "3:cpu,cpuacct:/z\n4:memory:/m" if path.name == "cgroup" else None
    )
    assert list(machine._cgroup_folders("cpu")) == [root / "cpu,cpuacct/z", root / "cpu,cpuacct"]


@pytest.mark.parametrize(
    ("quota", "asked", "threads"), [(None, None, 8), (2.5, None, 2), (0.3, None, 1), (64.0, None, 8), (2.0, 5, 5)]
)
def test_threads_follow_cores_and_quota(monkeypatch, quota, asked, threads) -> None:
    monkeypatch.setattr(tuning, "physical_cores", lambda cpus: len(cpus) // 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = tuning.tune(Machine("x", BIG.cpus, 8, quota, BIG.nodes, BIG.flags), {"threads": asked, "dtype": "float32"})
    assert found.threads == torch.get_num_threads() == threads


@pytest.mark.parametrize(("named", "asked", "threads"), [("3", None, 3), ("3", 2, 2), ("0", None, 8), ("2,1", None, 8)])
def test_threads_follow_the_usual_variable(monkeypatch, named, asked, threads) -> None:
    monkeypatch.setattr(tuning, "physical_cores", lambda cpus: len(cpus) // 2)
    monkeypatch.setenv("OMP_NUM_THREADS", named)
    assert tuning.tune(BIG, {"threads": asked, "dtype": "float32"}).threads == threads


def test_weights_lie_in_blocks_where_that_is_possible(monkeypatch) -> None:
    plain = {"threads": 1, "dtype": "float32"}
    assert tuning.tune(BIG, plain).blocked
    assert not tuning.tune(BIG, {**plain, "layout": "plain"}).blocked
    assert not tuning.tune(BIG, {**plain, "dtype": "bfloat16"}).blocked
    monkeypatch.setattr(tuning, "has_blocks", lambda: False)
    found = tuning.tune(BIG, {**plain, "layout": "blocked"})
    assert not found.blocked
    assert "no blocked products" in found.choices[-1].reason


def test_a_node_keeps_every_thread_there(monkeypatch) -> None:
    pinned = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(tuning, "physical_cores", lambda cpus: len(cpus) // 2)
    monkeypatch.setattr(os, "sched_setaffinity", lambda task, cpus: pinned.append(cpus))
    found = tuning.tune(BIG, {"numa": 1, "dtype": "float32"})
    assert set(pinned) == {BIG.nodes[1]}
    assert found.threads == 4
    with pytest.raises(DeviceUnavailable, match="no NUMA node 7"):
        tuning.tune(BIG, {"numa": 7, "dtype": "float32"})


@pytest.mark.parametrize(
    ("speeds", "flags", "first"),
    [
        ([80, 20, 10, 17], {"avx2"}, torch.float32),
        ([80, 160, 10, 17], {"avx512_bf16"}, torch.bfloat16),
        ([80, 90, 10, 11], {"avx512_bf16"}, torch.float32),
        ([80, 70, 10, 30], {"amx_bf16"}, torch.float32),
        ([80, 160, 10, 17], {"avx2"}, torch.float32),
    ],
)
def test_bf16_goes_first_only_where_it_clearly_wins(monkeypatch, speeds, flags, first) -> None:
    monkeypatch.setattr(tuning, "_measure", lambda: [float(speed) for speed in speeds])
    found = tuning.tune(Machine("x", frozenset({0}), 1, None, {0: frozenset({0})}, frozenset(flags)), {"threads": 1})
    assert found.compute_dtypes[0] is first
    assert (torch.bfloat16 in found.compute_dtypes) == (first is torch.bfloat16)


def test_the_measurement_gives_numbers() -> None:
    assert all(0.01 < speed < 1e6 for speed in tuning._measure())


def test_options_are_taken_and_checked() -> None:
    chosen = select("cpu", discover())
    device = open_device(chosen, {"threads": "1", "dtype": "bfloat16"})
    assert device.capabilities().compute_dtypes == (torch.bfloat16,)
    assert device.capabilities().kv_dtypes[0] is torch.bfloat16
    assert torch.get_num_threads() == 1
    for wrong in ({"threads": 0}, {"dtype": "int4"}, {"cores": 2}):
        with pytest.raises(PlatformError):
            open_device(chosen, wrong)
    with pytest.raises(DeviceUnavailable, match="there is no cpu:1"):
        select("cpu:1", discover())


@pytest.mark.parametrize("name", SCHEMES)
def test_rows_of_a_quantized_table_equal_the_whole_table(name: str) -> None:
    from hardpoint_cpu.ops.dense import CpuEmbedding
    from hardpoint_platforms.ops.catalogue import CONTRACTS
    from hardpoint_platforms.ops.samples import specs

    table = quantized(Source(3), (40, 256), SCHEMES[name])
    instance = CONTRACTS["embedding"].instance("here", torch.float32, specs({"weight": table}, torch.float32))
    provider, ids = CpuEmbedding(), torch.tensor([3, 39, 3, 0])
    packed = provider.pack(instance, {"weight": table})
    assert sum(part.nbytes for part in packed) == table.nbytes
    assert torch.equal(provider.build(instance)(ids, packed), table.dequantize()[ids])
