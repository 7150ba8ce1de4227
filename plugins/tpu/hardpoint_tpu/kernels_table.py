"""Kernels as functions that XLA compiles: one for all ops that differ in their place alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Kernel, OpInstance
from hardpoint_platforms.ops.provider import AttentionPlanner, OpProvider
from hardpoint_platforms.strict.providers import STATE_AT
from hardpoint_tpu.runtime import Routine, Runtime
from hardpoint_tpu.state import Pools, StateHandle


class Kernels:
    """Kernels as routines, one for all ops that differ in their place alone: each is traced once per program size."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._known: dict[Hashable, Routine] = {}

    def bind(
        self, provider: OpProvider, instance: OpInstance, build: Callable[[OpInstance], Kernel], dense: bool = True
    ) -> Kernel:
        """The kernel that `build` makes of an instance; it may be called alone or while a step is traced.

        dense: it takes the state as the reference has it, else as `Pools`.
        """
        at = STATE_AT.get(instance.op)
        layer = instance.attrs.get("pool_layer", 0)
        # a kernel sees its own layer's part of the state, as the only one
        placed = instance if at is None else replace(instance, attrs={**instance.attrs, "pool_layer": 0})
        key = (type(provider), provider.name, placed.op, placed.dtype, *_frozen(placed))
        if key not in self._known:
            kernel = build(placed)
            body = _on_tree(kernel, at) if at is not None and dense else kernel
            self._known[key] = self._runtime.routine(body, () if at is None else (at,))
        routine = self._known[key]
        return routine if at is None else _stateful(routine, at, layer, f"{instance.op} at {instance.where}")


def _frozen(instance: OpInstance) -> tuple[Hashable, ...]:
    weights = tuple((name, spec.shape, spec.dtype, spec.scheme) for name, spec in instance.weights.items())
    return tuple(sorted(instance.attrs.items())), weights, instance.wide_weights


def _on_tree(kernel: Kernel, at: int) -> Kernel:
    """A kernel of the reference's tree as one of `Pools`."""

    def spread(*arguments: Any) -> Any:
        pools: Pools = arguments[at]
        out, tree = kernel(*arguments[:at], pools.spread(), *arguments[at + 1 :])
        return out, pools.gathered(tree)

    return spread


def _stateful(routine: Routine, at: int, layer: int, who: str) -> Kernel:
    """A routine of one layer's pools as a kernel of the whole state: a handle, or the pools while a step is traced."""

    def kernel(*arguments: Any) -> Any:
        state = arguments[at]
        pools: Pools = state.take(who) if isinstance(state, StateHandle) else state
        out, one = routine(*arguments[:at], pools.only(layer), *arguments[at + 1 :])
        after = pools.with_layer(layer, one)
        return out, StateHandle(after) if isinstance(state, StateHandle) else after

    return kernel


class TpuProvider(OpProvider):
    """What this plugin's own providers share: the runtime, the kernels so far, and the planner of what keeps state."""

    def __init__(self, op: str, runtime: Runtime, kernels: Kernels, planner: AttentionPlanner | None = None) -> None:
        self.op, self.version = op, CONTRACTS[op].version
        self.runtime, self.kernels, self._planner = runtime, kernels, planner

    def planner(self) -> AttentionPlanner | None:
        return self._planner
