"""What this process may use of the machine: cores, NUMA nodes and memory, under affinity and cgroup limits.

Everything is read from /proc and /sys on Linux; elsewhere the plain counts stand in.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_CPUS = Path("/sys/devices/system/cpu")
_NODES = Path("/sys/devices/system/node")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Machine:
    """Attributes:
    name: the processor's name.
    cpus: logical processors that this process may run on.
    cores: physical cores among them.
    quota: processors' worth of time that the cgroup grants, None for no limit.
    nodes: NUMA nodes, number -> their logical processors, as far as allowed.
    flags: instruction sets, as the kernel names them.
    """

    name: str
    cpus: frozenset[int]
    cores: int
    quota: float | None
    nodes: dict[int, frozenset[int]]
    flags: frozenset[str]


def look_at_machine() -> Machine:
    """Read it now; affinity and limits may change later."""
    cpus = allowed_cpus()
    name, flags = _processor()
    return Machine(name, cpus, physical_cores(cpus), _cpu_quota(), _numa_nodes(cpus), flags)


def allowed_cpus() -> frozenset[int]:
    """Logical processors in this process's affinity mask."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def physical_cores(cpus: frozenset[int]) -> int:
    """Physical cores behind `cpus`; two hardware threads of one core count once."""
    found = set()
    for cpu in cpus:
        topology = _CPUS / f"cpu{cpu}" / "topology"
        found.add((_text(topology / "physical_package_id") or "?", _text(topology / "core_id") or f"cpu{cpu}"))
    return max(1, len(found))


def memory() -> tuple[int, int]:
    """(free, total) bytes that this process can have: the machine's, or its cgroup's where that is less."""
    host = psutil.virtual_memory()
    free, total = host.available, host.total
    for limit, used in _memory_limits():
        total = min(total, limit)
        free = min(free, max(0, limit - used))
    return free, total


def parse_cpu_list(text: str) -> frozenset[int]:
    """Read the kernel's list form, "0-3,8"."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _numa_nodes(cpus: frozenset[int]) -> dict[int, frozenset[int]]:
    nodes = {}
    for folder in sorted(_NODES.glob("node[0-9]*")):
        here = parse_cpu_list(_text(folder / "cpulist") or "") & cpus
        if here:
            nodes[int(folder.name.removeprefix("node"))] = here
    return nodes or {0: cpus}


def _cpu_quota() -> float | None:
    quotas = []
    for folder in _cgroup_folders("cpu"):
        quota, _, period = (_text(folder / "cpu.max") or "").partition(" ")  # version 2
        if not quota:
            quota = _text(folder / "cpu.cfs_quota_us") or ""  # version 1
            period = _text(folder / "cpu.cfs_period_us") or ""
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _memory_limits() -> Iterator[tuple[int, int]]:
    for folder in _cgroup_folders("memory"):
        for limit_file, used_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _text(folder / limit_file) or "", _text(folder / used_file) or ""
            if limit.isdigit() and used.isdigit():
                yield int(limit), max(0, int(used) - _reclaimable(folder))


def _reclaimable(folder: Path) -> int:
    """File pages that the kernel drops when memory gets short; a model just read fills many."""
    for line in (_text(folder / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _cgroup_folders(controller: str) -> Iterator[Path]:
    """This process's cgroup and those above it, whose limits hold as well."""
    for line in (_text(Path("/proc/self/cgroup")) or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUP / controllers if controllers else _CGROUP
        folder = root / path.lstrip("/")
        while True:
            yield folder
            if folder == root or root not in folder.parents:
                break
            folder = folder.parent


def _processor() -> tuple[str, frozenset[str]]:
    facts: dict[str, str] = {}
    for line in (_text(Path("/proc/cpuinfo")) or "").splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    name = facts.get("model name") or facts.get("Model") or platform.processor() or platform.machine()
    return name, frozenset((facts.get("flags") or facts.get("Features") or "").split())


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
