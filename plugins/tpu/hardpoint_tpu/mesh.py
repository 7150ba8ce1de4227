"""Several chips as one device: a program runs on all of them at once, each on its own part of weights and state.

What differs from chip to chip is one array whose first axis is the chips' arrays one after another; a program sees its
chip's own (`jax.shard_map`). Everything else is the same on each chip.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from hardpoint_platforms.communication import TENSOR_AXIS, Communicator, Mesh
from hardpoint_platforms.errors import UnsupportedOperation

#: How an array lies on the chips: a part on each, or the same on all.
APART, SAME = PartitionSpec(TENSOR_AXIS), PartitionSpec()


class Chips:
    """The chips of one opened device, one or several."""

    def __init__(self, devices: Sequence[Any]) -> None:
        self.devices = tuple(devices)
        self.mesh: Any = None
        if len(self.devices) > 1:
            self.mesh = jax.sharding.Mesh(np.array(self.devices), (TENSOR_AXIS,), axis_types=(AxisType.Auto,))

    @property
    def count(self) -> int:
        """How many."""
        return len(self.devices)

    def placed(self, spec: PartitionSpec) -> Any:
        """Where an array goes: the chip, or the mesh and how it lies there."""
        return self.devices[0] if self.mesh is None else NamedSharding(self.mesh, spec)

    def spread(self, run: Callable[..., Any], specs: Sequence[PartitionSpec], out: Any) -> Callable[..., Any]:
        """`run` of each chip's arrays as a function of whole ones. specs: of its arguments; out: of its results."""
        if self.mesh is None:
            return run
        mapped: Callable[..., Any] = jax.shard_map(
            run, mesh=self.mesh, in_specs=tuple(specs), out_specs=out, check_vma=False
        )
        return mapped

    def join(self, parts: Sequence[Any]) -> Any:
        """The chips' own arrays, of one shape and each on its chip, as one. No copy."""
        shape = (self.count * parts[0].shape[0], *parts[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.placed(APART), list(parts))


def spec_of(array: Any) -> PartitionSpec | None:
    """How an array lies on the chips; None for one that lies on a single chip, or is being traced."""
    if isinstance(array, jax.core.Tracer):
        return None
    sharding = getattr(array, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else None


class Collectives(Communicator):
    """Collectives inside a program. All ranks are one program: nobody can say which rank this is but the program."""

    def __init__(self, mesh: Mesh, wrap: Callable[[Any], torch.Tensor]) -> None:
        self._mesh, self._wrap = mesh, wrap

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @property
    def rank(self) -> int:
        raise UnsupportedOperation("one program runs all ranks: `index` tells inside of it")

    def index(self, axis: str) -> torch.Tensor:
        if self._mesh.size(axis) == 1:
            return self._wrap(jnp.zeros((), jnp.int64))
        return self._wrap(jax.lax.axis_index(axis).astype(jnp.int64))

    def all_reduce(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        return self._collect(x, axis, lambda array: jax.lax.psum(array, axis))

    def all_gather(self, x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
        return self._collect(x, axis, lambda array: jax.lax.all_gather(array, axis, axis=dim, tiled=True))

    def reduce_scatter(self, x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
        return self._collect(
            x, axis, lambda array: jax.lax.psum_scatter(array, axis, scatter_dimension=dim, tiled=True)
        )

    def all_to_all(self, parts: Sequence[torch.Tensor], axis: str) -> tuple[torch.Tensor, ...]:
        if len({part.shape for part in parts}) > 1:
            raise UnsupportedOperation("all_to_all inside a program takes parts of one shape")
        sent = jnp.stack([part._elem for part in parts])  # type: ignore[attr-defined]
        if self._mesh.size(axis) > 1:
            sent = jax.lax.all_to_all(sent, axis, 0, 0)
        return tuple(self._wrap(sent[place]) for place in range(len(parts)))

    def broadcast(self, x: torch.Tensor, axis: str, root: int = 0) -> torch.Tensor:
        return self._collect(x, axis, lambda array: jax.lax.all_gather(array, axis)[root])

    def send(self, x: torch.Tensor, to_rank: int) -> None:
        raise UnsupportedOperation("one program runs all ranks: nothing is sent from one to another")

    def receive(self, like: torch.Tensor, from_rank: int) -> torch.Tensor:
        raise UnsupportedOperation("one program runs all ranks: nothing is sent from one to another")

    def barrier(self) -> None:
        return

    def close(self) -> None:
        return

    def _collect(self, x: torch.Tensor, axis: str, run: Callable[[Any], Any]) -> torch.Tensor:
        if self._mesh.size(axis) == 1:
            return x
        return self._wrap(run(x._elem))  # type: ignore[attr-defined]
