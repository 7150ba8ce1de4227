"""The platform `tpu`: finds TPU chips without touching them, and opens one through JAX.

Where JAX_PLATFORMS=cpu or cuda is set it offers that back end of JAX instead, for tests and for looking around: the
same programs, compiled for the processor or a GPU. That device says in its name that it is no TPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hardpoint_platforms.communication import TENSOR_AXIS, Mesh
from hardpoint_platforms.device import Device, DeviceInfo
from hardpoint_platforms.errors import DeviceUnavailable
from hardpoint_platforms.hookspecs import hookimpl
from hardpoint_platforms.platform import Platform, ProbeResult
from hardpoint_tpu.chips import find_chips

#: What JAX compiles for in a TPU's place, and how such a device is called.
NO_TPU, NO_TPU_BUT_GPU = "XLA on the processor, no TPU", "XLA on a GPU, no TPU"
_INSTALL = "pip install 'jax==0.10.2' && pip install --no-deps 'torchax==0.0.13'"
_INSTALL_TPU = "pip install 'libtpu==0.0.42.*'"
#: Either is JAX's part for NVIDIA GPUs.
_CUDA = ("jax_cuda13_plugin", "jax_cuda12_plugin")


class TpuPlatform(Platform):
    """TPU chips of this host, or the processor or GPUs in their place."""

    def __init__(self, root: Path = Path("/")) -> None:
        """`root`: where /dev and /sys are, for tests."""
        self._root = root

    def probe(self) -> ProbeResult:
        missing = [name for name in ("jax", "torchax") if find_spec(name) is None]
        if missing:
            return ProbeResult((), (f"{' and '.join(missing)} not installed: {_INSTALL}",))
        if (wanted := _wanted_backend()) == "cpu":
            return ProbeResult(_stand_ins(NO_TPU, int(os.environ.get("JAX_NUM_CPU_DEVICES") or 1)))
        if wanted in ("cuda", "gpu"):
            return self._gpus()
        chips, why = find_chips(self._root)
        if not chips:
            return ProbeResult((), (f"{why}; JAX_PLATFORMS=cpu tries the plugin on the processor",))
        if find_spec("libtpu") is None:
            return ProbeResult((), (f"{len(chips)} TPU chips, but no libtpu: {_INSTALL_TPU}",))
        return ProbeResult(tuple(DeviceInfo("tpu", index, name) for index, name in enumerate(chips)))

    def _gpus(self) -> ProbeResult:
        count = len(list(self._root.glob("proc/driver/nvidia/gpus/*")))
        if not count:
            return ProbeResult((), ("JAX_PLATFORMS asks for CUDA, but the NVIDIA driver lists no GPU",))
        if all(find_spec(name) is None for name in _CUDA):
            return ProbeResult((), ("JAX_PLATFORMS asks for CUDA: pip install 'jax[cuda13]==0.10.2'",))
        return ProbeResult(_stand_ins(NO_TPU_BUT_GPU, count))

    def open(self, index: int, options: Mapping[str, Any]) -> Device:
        return self.open_mesh(index, Mesh((), ()), options)

    def open_mesh(self, index: int, mesh: Mesh, options: Mapping[str, Any]) -> Device:
        found = self.probe()
        info = next((device for device in found.devices if device.index == index), None)
        if info is None:
            reasons = "; ".join(found.reasons) or f"there are {len(found.devices)} devices"
            raise DeviceUnavailable(f"there is no tpu:{index}: {reasons}", hint="`hardpoint doctor` lists them")
        if mesh.axes not in ((), (TENSOR_AXIS,)):
            raise DeviceUnavailable(f"a mesh of TPU chips has the axis {TENSOR_AXIS!r} alone, not {mesh.axes}")

        from hardpoint_tpu.device import TpuDevice
        from hardpoint_tpu.mesh import Chips
        from hardpoint_tpu.runtime import Runtime

        _keep_programs(options.get("cache"))
        runtime = Runtime(Chips(_devices(info, mesh.ranks)), str(info), options.get("effort"))
        return TpuDevice(info, runtime, options)

    def target(self, name: str, mesh: Mesh, options: Mapping[str, Any]) -> Device:
        missing = [package for package in ("jax", "torchax", "libtpu") if find_spec(package) is None]
        if missing:
            raise DeviceUnavailable(
                f"compiling for {name} needs {' and '.join(missing)}", hint=f"{_INSTALL} && {_INSTALL_TPU}"
            )
        from hardpoint_tpu.target import open_target

        # nothing is kept on disk: JAX cannot read a program back for a chip that is not here
        return open_target(name, mesh, options)


def _stand_ins(name: str, count: int) -> tuple[DeviceInfo, ...]:
    return tuple(DeviceInfo("tpu", index, name, stand_in=True) for index in range(count))


def _devices(info: DeviceInfo, count: int) -> list[Any]:
    """JAX's devices from this one on. Raises DeviceUnavailable."""
    import jax

    backend = {NO_TPU: "cpu", NO_TPU_BUT_GPU: "cuda"}.get(info.name, "tpu")
    on_host = backend == "cpu"
    if on_host:
        # JAX may have been imported before JAX_PLATFORMS was set, and would wake every chip that it knows
        jax.config.update("jax_platforms", "cpu")
        _split_host(info.index + count)
    try:
        found = jax.devices(backend)
    except RuntimeError as error:
        told = str(error).partition("\n")[0]
        raise DeviceUnavailable(
            f"{info} ({info.name}) cannot be used: {told}",
            hint="another process may hold the chip; libtpu must fit this jax",
        ) from error
    chosen: list[Any] = found[info.index : info.index + count]
    if len(chosen) < count:
        raise DeviceUnavailable(
            f"{count} chips from {info} on are wanted, JAX has {len(found)} in all",
            hint="give a smaller --tensor-parallel-size"
            + (f", or set JAX_NUM_CPU_DEVICES={info.index + count} before the process starts" if on_host else ""),
        )
    return chosen


def _split_host(count: int) -> None:
    """Have JAX see the processor as so many devices, while it has not looked yet."""
    import jax

    if count > max(1, jax.config.jax_num_cpu_devices):
        with suppress(RuntimeError):  # it has: what there are too few of is said by the caller
            jax.config.update("jax_num_cpu_devices", count)


def _wanted_backend() -> str:
    """The first back end that JAX_PLATFORMS names, empty where it names none."""
    return os.environ.get("JAX_PLATFORMS", "").partition(",")[0].strip().lower()


def _keep_programs(folder: str | None) -> None:
    """Have JAX keep what it compiles on disk, so that the next start only traces."""
    import jax

    if folder == "off":
        return
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = Path(folder).expanduser() if folder else home / "hardpoint" / "xla"
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@hookimpl
def hardpoint_platform() -> Platform:
    """Registered under the entry point `tpu`."""
    return TpuPlatform()
