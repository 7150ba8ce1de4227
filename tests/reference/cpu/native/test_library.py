"""Finding and loading the library, choosing a variant, and what the device does where there is none."""

from __future__ import annotations

import ctypes
import ctypes.util
from pathlib import Path
from typing import Any

import pytest
import torch

import hardpoint_cpu
from hardpoint_cpu.machine import Machine
from hardpoint_cpu.native import backend
from hardpoint_cpu.native.abi import OP, Batch, Code, Group, Matrix, pack_op
from hardpoint_cpu.native.library import FILE, VARIABLE, LibraryUnavailable, NativeLibrary, Pool, find_library
from hardpoint_cpu.native.stage import Stage
from hardpoint_platforms.discovery import discover
from hardpoint_platforms.errors import DeviceUnavailable, UnsupportedOperation
from hardpoint_platforms.selection import open_device, select

pytestmark = pytest.mark.reference


@pytest.fixture(autouse=True)
def keep_threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation that built nothing."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr("hardpoint_cpu.native.library.FILE", "nothing-of-this-name.so")


def open_cpu(**options: Any) -> Any:
    return open_device(select("cpu", discover()), options)


def choices(device: Any) -> dict[str, tuple[str, str]]:
    return {choice.name: (choice.value, choice.reason) for choice in device.capabilities().tuning}


def test_mirrors_have_the_sizes_of_the_header() -> None:
    assert (OP.size, ctypes.sizeof(Group), ctypes.sizeof(Batch), ctypes.sizeof(Matrix)) == (288, 24, 64, 104)


def test_ops_are_laid_out_as_the_header_says() -> None:
    packed = pack_op(Code.NORM, 1, 7, (11, 12), (21, 22, 23), (0.5,))
    assert OP.unpack(packed)[:5] == (Code.NORM, 1, 7, 11, 12)
    assert OP.unpack(packed)[15:18] == (21, 22, 23)
    assert OP.unpack(packed)[35:] == (0.5, 0.0, 0.0, 0.0)


def test_a_file_that_is_no_library_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_bytes(b"not a library")
    monkeypatch.setenv(VARIABLE, str(path))
    with pytest.raises(LibraryUnavailable, match="cannot be loaded") as caught:
        find_library()
    assert "compiler" in caught.value.mend


def test_a_library_of_somebody_else_is_refused() -> None:
    other = ctypes.util.find_library("c")
    assert other is not None
    with pytest.raises(LibraryUnavailable, match="cannot be loaded"):
        NativeLibrary(Path(other))


def test_another_interface_is_refused(library: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hardpoint_cpu.native.library.ABI", 99)
    with pytest.raises(LibraryUnavailable, match=r"interface 1, this package speaks 99"):
        NativeLibrary(library.path)


def test_without_a_library_torch_runs_and_says_why(absent: None) -> None:
    device = open_cpu(dtype="float32")
    try:
        value, reason = choices(device)["kernels"]
        assert value == "torch"
        assert "no kernel library" in reason
        assert "compiler" in reason
        assert not any(provider.name.startswith("native") for provider in device.providers())
    finally:
        device.close()


@pytest.mark.parametrize("options", [{"kernels": "native"}, {"isa": "avx2"}])
def test_asking_for_what_is_not_there_is_an_error(absent: None, options: dict[str, str]) -> None:
    with pytest.raises(DeviceUnavailable, match="no native kernels"):
        open_cpu(**options)


def test_torch_on_request_and_for_other_dtypes(library: NativeLibrary) -> None:
    for options in ({"kernels": "torch", "dtype": "float32"}, {"dtype": "bfloat16"}):
        device = open_cpu(**options)
        assert choices(device)["kernels"][0] == "torch"
        device.close()
    with pytest.raises(DeviceUnavailable, match="float32"):
        open_cpu(kernels="native", dtype="bfloat16")


@pytest.mark.parametrize(("numerics", "cached"), [("fast", torch.float16), ("exact", torch.float32)])
def test_numerics_choose_the_cache(library: NativeLibrary, numerics: str, cached: torch.dtype) -> None:
    device = open_cpu(numerics=numerics, threads=2)
    try:
        assert device.capabilities().kv_dtypes[0] is cached
        assert device.capabilities().compute_dtypes == (torch.float32,)
        assert choices(device)["numerics"][0] == numerics
        assert choices(device)["kernels"][0] == f"native {library.use()}"
        assert choices(device)["threads"][0] == "2"
    finally:
        device.close()


def test_a_variant_can_be_forced(library: NativeLibrary) -> None:
    runnable = [name for name, runs in library.variants.items() if runs]
    try:
        for name in runnable:
            device = open_cpu(isa=name, threads=1)
            assert choices(device)["kernels"][0] == f"native {name}"
            device.close()
        with pytest.raises(DeviceUnavailable, match="no 'sse9' kernels") as caught:
            open_cpu(isa="sse9")
        assert runnable[0] in str(caught.value.hint)
    finally:
        library.use()


def test_a_code_that_does_not_exist_is_not_run(library: NativeLibrary) -> None:
    pool = Pool(library, 1)
    stage = Stage(library, pool)
    with pytest.raises(UnsupportedOperation, match="op 0 of 1"):
        stage.run(pack_op(63, 0, 1, ()), 1, 0)
    pool.close()
    pool.close()
    with pytest.raises(DeviceUnavailable, match="closed"):
        stage.run(pack_op(Code.COPY, 0, 0, (0, 0)), 1, 0)


@pytest.mark.parametrize(
    ("cpus", "threads", "pinned"), [(2, 2, False), (8, 8, True), (8, 4, False), (8, 7, False), (3, 3, False)]
)
def test_threads_are_pinned_only_where_each_has_a_processor(
    library: NativeLibrary, monkeypatch: pytest.MonkeyPatch, cpus: int, threads: int, pinned: bool
) -> None:
    given: list[Any] = []

    class NoPool:
        def __init__(self, library: Any, threads: int, cpus: Any) -> None:
            given.append(cpus)

    monkeypatch.setattr(backend, "Pool", NoPool)
    machine = Machine("x", frozenset(range(cpus)), cpus, None, {0: frozenset(range(cpus))}, frozenset())
    made = backend.Backend(library, machine, threads, {})
    assert given == [list(range(cpus)) if pinned else None]
    assert (made.choices[-1].value == "none") is not pinned


def test_the_installed_library_is_found_in_any_folder_of_the_package(
    library: NativeLibrary, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "installed" / "lib"
    folder.mkdir(parents=True)
    (folder / FILE).symlink_to(library.path)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(hardpoint_cpu, "__path__", [str(tmp_path / "sources"), str(folder.parent)])
    assert find_library().path == folder / FILE
