"""Chips that are not here: programs are traced and compiled for them by libtpu, weights and state are shapes alone."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

from hardpoint_platforms.communication import Mesh
from hardpoint_platforms.device import Device, DeviceInfo
from hardpoint_platforms.errors import DeviceUnavailable
from hardpoint_platforms.program import Weights
from hardpoint_tpu.arrays import to_numpy
from hardpoint_tpu.device import TpuDevice
from hardpoint_tpu.mesh import APART, SAME, Chips, spec_of
from hardpoint_tpu.runtime import Runtime
from hardpoint_tpu.trees import Form, flatten, rebuild

#: Kind -> (JAX's name of a topology, published bytes of memory per device that JAX shows; a 7x chip shows two).
_KINDS = {
    "v4": ("v4", 32 << 30),
    "v5e": ("v5e", 16 << 30),
    "v5p": ("v5p", 95 << 30),
    "v6e": ("v6e", 32 << 30),
    "7x": ("tpu7x", 96 << 30),
}
#: Without these libtpu looks for a machine with chips, and lets one process at a time be loaded into.
_ALONE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def open_target(name: str, mesh: Mesh, options: Mapping[str, Any]) -> Device:
    """Chips of a kind and arrangement ("v5e-2x2", "7x-2x2x1"), as many as the mesh has ranks.

    Raises DeviceUnavailable.
    """
    from jax.experimental import topologies

    kind, _, arrangement = name.partition("-")
    if kind not in _KINDS or not arrangement:
        raise DeviceUnavailable(
            f"{name!r} names no TPU: a kind and an arrangement, as in v5e-2x2",
            hint=f"kinds: {', '.join(_KINDS)}; a 7x has three dimensions, 7x-2x2x1",
        )
    topology, memory = _KINDS[kind]
    # all that is not compiled for the chip runs on the processor
    jax.config.update("jax_platforms", "cpu")
    for variable, value in _ALONE.items():
        os.environ.setdefault(variable, value)
    try:
        found = topologies.get_topology_desc(f"{topology}:{arrangement}", "tpu").devices
    except Exception as error:  # JAX passes on whatever libtpu raises
        told = str(error).partition("\n")[0]
        raise DeviceUnavailable(f"libtpu knows no {name}: {told}") from error
    if len(found) < mesh.ranks:
        raise DeviceUnavailable(f"{name} has {len(found)} devices, {mesh.ranks} are wanted")
    info = DeviceInfo("tpu", 0, f"{mesh.ranks} of {found[0].device_kind}, not here", memory)
    return TargetDevice(info, TargetRuntime(found[: mesh.ranks], info), options)


class TargetRuntime(Runtime):
    """Small arrays lie on the processor; those that differ from chip to chip are shapes."""

    def __init__(self, devices: Sequence[Any], info: DeviceInfo) -> None:
        super().__init__(Chips(devices), info.name)
        self._memory, self._held = info.memory_bytes, 0
        self._host = jax.devices("cpu")[0]
        self._whole = self.chips.mesh or jax.sharding.Mesh(np.array(devices), ("chip",))
        kind = AbstractDevice(devices[0].device_kind, devices[0].num_cores, "tpu")
        self._abstract = AbstractMesh(
            self._whole.axis_sizes,
            self._whole.axis_names,
            axis_types=(AxisType.Auto,) * len(self._whole.axis_names),
            abstract_device=kind,
        )

    def memory(self) -> list[tuple[int, int]]:
        return [(self._memory, self._held)]

    def hold(self, shapes: Sequence[Any]) -> None:
        """Weights of a chip: arrays of these shapes are in its memory from now on."""
        self._held += sum(math.prod(found.shape) * found.dtype.itemsize for found in shapes)

    def put(self, tensors: Sequence[torch.Tensor], copy: bool) -> tuple[torch.Tensor, ...]:
        arrays = jax.device_put([to_numpy(tensor, copy) for tensor in tensors], self._host)
        return tuple(map(self.wrap, arrays))

    def zeros(self, shape: Sequence[int], dtype: Any, spec: PartitionSpec) -> Any:
        return self.shape(shape, dtype) if spec == APART else jax.numpy.zeros(tuple(shape), dtype, device=self._host)

    def shape(self, shape: Sequence[int], dtype: Any, spec: PartitionSpec = APART) -> Any:
        """An array that is nowhere, of which each chip has a part."""
        spec = spec if self.chips.count > 1 else SAME
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=NamedSharding(self._whole, spec))

    def lowered(self, jitted: Any, arrays: Sequence[Any]) -> Any:
        there = [self.shape(array.shape, array.dtype, spec_of(array) or SAME) for array in arrays]
        with jax.sharding.use_abstract_mesh(self._abstract):
            return jitted.lower(*there)


class TargetDevice(TpuDevice):
    """Chips that are not here, as one device."""

    _runtime: TargetRuntime

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """On the processor; without numbers (torch's "meta") a shape, while weights are traced."""
        if tensor.device.type != "meta":
            return super().to_device(tensor)
        from torchax.ops.mappings import t2j_dtype

        return self._runtime.wrap(jax.numpy.zeros(tuple(tensor.shape), t2j_dtype(tensor.dtype)))

    def load_ranks(self, loads: Sequence[Callable[[Device], Weights]]) -> Weights:
        """Traced for the first rank: the others have weights of the same shapes."""
        told: list[Form] = []
        order: list[int] = []

        def load() -> list[Any]:
            arrays: list[Any] = []
            told.append(flatten(loads[0](self), arrays))
            own = {id(array): array for array in arrays}  # what ops share is there once
            places = {key: place for place, key in enumerate(own)}
            order.extend(places[id(array)] for array in arrays)
            return list(own.values())

        shapes = jax.eval_shape(load)
        self._runtime.hold(shapes)
        count = self._runtime.chips.count
        whole = [self._runtime.shape((found.shape[0] * count, *found.shape[1:]), found.dtype) for found in shapes]
        tensors = [self._runtime.wrap(array) for array in whole]
        weights: Weights = rebuild(told[-1], iter(order), lambda place: tensors[place])
        return weights
