"""What AMD's kernel driver says of the GPUs, read from files, without a context on any of them.

The driver lists all processors under /sys/class/kfd/kfd/topology/nodes, one folder each: `properties` has a word and a
number per line, `mem_banks/*/properties` the memory (heap types 1 and 2 are the GPU's own). The names are those of
Linux's drivers/gpu/drm/amd/amdkfd/kfd_topology.c; a CPU has `simd_count` 0. A node of another container cannot be read.
"""

from __future__ import annotations

import grp
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hardpoint_rocm.architectures import ARCHITECTURES, named

_VRAM = (1, 2)
_ACCESS = os.R_OK | os.W_OK


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver lists it.

    Attributes:
        architecture: LLVM's name ("gfx942"); name: what people call it.
        memory_bytes: its own memory; wave: threads in lockstep; lds_bytes: shared memory of a compute unit.
        uuid: by which ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES may name it ("GPU-" and 16 digits).
        render: number of its file under /dev/dri.
    """

    architecture: str
    name: str
    memory_bytes: int
    wave: int
    lds_bytes: int
    uuid: str
    render: int


@dataclass(frozen=True)
class Places:
    """Where the driver's files are."""

    system: Path = Path("/sys/class")
    devices: Path = Path("/dev")

    @property
    def nodes(self) -> Path:
        """One folder per processor."""
        return self.system / "kfd" / "kfd" / "topology" / "nodes"


def list_gpus(places: Places) -> tuple[tuple[Gpu, ...], str]:
    """All GPUs of this machine in the driver's order, or none and the reason. Knows nothing of hidden ones."""
    if not places.nodes.is_dir():
        return (), "no AMD GPU driver is loaded (/sys/class/kfd is not there): install amdgpu, or `modprobe amdgpu`"
    folders = sorted((path for path in places.nodes.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    gpus = tuple(gpu for folder in folders if (gpu := _describe(folder, places)) is not None)
    if not gpus:
        return (), "the AMD driver lists no GPU"
    return gpus, ""


def refusal(places: Places, gpu: Gpu | None = None) -> str:
    """Why this process may not use the driver, or one GPU of it; "" where it may."""
    path = places.devices / "kfd" if gpu is None else places.devices / "dri" / f"renderD{gpu.render}"
    shown = f"/dev/{path.relative_to(places.devices)}"
    if not path.exists():
        return f"{shown} is not there: in a container start it with --device=/dev/kfd --device=/dev/dri"
    if os.access(path, _ACCESS):
        return ""
    group = _group(path)
    return (
        f"{shown} may not be opened: it belongs to group {group!r}; `sudo usermod -aG {group} $USER`, and log in again "
        f"(in a container: --group-add with that group's number on the host)"
    )


def visible(gpus: tuple[Gpu, ...], environment: Mapping[str, str]) -> tuple[list[Gpu], str]:
    """The GPUs that this process sees, in its order, and the variable that hides all, if one does.

    ROCR_VISIBLE_DEVICES counts the driver's GPUs; HIP_VISIBLE_DEVICES, or else CUDA_VISIBLE_DEVICES, what that leaves.
    """
    second = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in environment else "CUDA_VISIBLE_DEVICES"
    left = list(gpus)
    for variable in ("ROCR_VISIBLE_DEVICES", second):
        if variable in environment and left:
            left = _chosen(left, environment[variable])
            if not left:
                return [], f"{variable}={environment[variable]!r}"
    return left, ""


def _chosen(gpus: list[Gpu], wanted: str) -> list[Gpu]:
    """As the runtime reads it: the first entry that names no GPU ends the list."""
    chosen: list[Gpu] = []
    for part in map(str.strip, wanted.split(",")):
        by_name = [gpu for gpu in gpus if gpu.uuid.lower() == part.lower()]
        if part.isdigit() and int(part) < len(gpus):
            chosen.append(gpus[int(part)])
        elif by_name:
            chosen += by_name
        else:
            break
    return chosen


def _describe(folder: Path, places: Places) -> Gpu | None:
    facts = _numbers(folder / "properties")
    if not facts.get("simd_count"):
        return None
    architecture, render = named(facts.get("gfx_target_version", 0)), facts.get("drm_render_minor", 0)
    banks = [_numbers(path) for path in sorted(folder.glob("mem_banks/*/properties"))]
    return Gpu(
        architecture,
        _name(architecture, places.system / "drm" / f"renderD{render}" / "device" / "product_name"),
        sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in _VRAM),
        facts.get("wave_front_size", 0),
        facts.get("lds_size_in_kb", 0) * 1024,
        f"GPU-{facts.get('unique_id', 0):016x}",
        render,
    )


def _name(architecture: str, file: Path) -> str:
    """What is printed on it if its board says so, else which chips are of its architecture."""
    try:
        said = file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        said = ""
    known = ARCHITECTURES.get(architecture)
    return said or (f"AMD {architecture} ({known.chips})" if known else f"AMD {architecture}")


def _numbers(file: Path) -> dict[str, int]:
    """Words and numbers of a file; nothing where it may not be read."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _group(path: Path) -> str:
    number = path.stat().st_gid
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
