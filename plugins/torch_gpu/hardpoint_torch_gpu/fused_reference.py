"""Ops for which there is no kernel, fused by torch.compile instead of called torch op by torch op.

Asked for by an option, never by default: the first start compiles for a minute or more. Later ones find the kernels in
torch's own cache. Only single ops are compiled: a whole step would be cut at each kernel of the plugin, and each piece
compiled for each layer anew, as torch tells layers apart.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from hardpoint_platforms.ops.contract import Kernel, OpInstance, Packed, Weight
from hardpoint_platforms.ops.provider import OpProvider, Support
from hardpoint_platforms.reference.providers import reference_providers
from hardpoint_torch_gpu.measured import kept

log = logging.getLogger(__name__)

#: Where torch keeps what it compiled.
_CACHE = "TORCHINDUCTOR_CACHE_DIR"


class FusedReference(OpProvider):
    """The reference of one op, compiled once for all instances that differ in their place alone."""

    name = "reference, fused"

    def __init__(self, reference: OpProvider, backend: str) -> None:
        """`backend`: torch.compile's."""
        self.op, self.version = reference.op, reference.version
        self._reference, self._backend = reference, backend
        self._built: dict[Hashable, Fused] = {}

    def supports(self, instance: OpInstance) -> Support:
        answer = self._reference.supports(instance)
        return Support(True, f"{answer.reason}, fused by torch.compile") if answer else answer

    def pack(self, instance: OpInstance, weights: Mapping[str, Weight]) -> Packed:
        return self._reference.pack(instance, weights)

    def build(self, instance: OpInstance) -> Kernel:
        weights = tuple((name, spec.shape, spec.dtype) for name, spec in instance.weights.items())
        likeness = (repr(sorted(instance.attrs.items())), instance.dtype, weights)
        if likeness not in self._built:
            told = f"{self.op} as at {instance.where}"
            self._built[likeness] = Fused(self._reference.build(instance), self._backend, told)
        return self._built[likeness]


class Fused:
    """A kernel compiled at its first call, for any number of tokens; plain where that cannot be done."""

    def __init__(self, plain: Kernel, backend: str, told: str) -> None:
        """`told`: what it is, for the log."""
        self._plain, self._told = plain, told
        self._compiled: Kernel | None = torch.compile(plain, backend=backend, fullgraph=True, dynamic=True)

    def __call__(self, *arguments: Any) -> Any:
        """As the contract has it. What can be compiled is known after the first call, which is made before serving."""
        if self._compiled is None or _get_current_dispatch_mode() is not None:
            return self._plain(*arguments)  # a mode watches torch's ops, which a compiled kernel would hide
        try:
            return self._compiled(*arguments)
        except Exception as error:
            # Whoever compiles raises what he likes; if the fault is the arguments', the plain kernel says so.
            log.warning("%s is not fused: %s", self._told, str(error).partition("\n")[0])
            self._compiled = None
            return self._plain(*arguments)


def fused_references(backend: str = "inductor") -> tuple[OpProvider, ...]:
    """One per op that takes no plan, to be asked last. Torch keeps what it compiles under `~/.cache/hardpoint`, unless
    the environment names another place."""
    os.environ.setdefault(_CACHE, str(kept("inductor")))
    return tuple(FusedReference(one, backend) for one in reference_providers() if one.planner() is None)
