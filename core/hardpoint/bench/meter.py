"""Bound kernels that are timed where they are called: in a step of the model, on its own arguments and weights.

A matrix that was just read lies in a cache. In a step, all other weights pass by before a layer's are read again, so
kernels are timed inside of whole steps, op by op, and never in a loop of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hardpoint.bench.costs import Attended, Call
from hardpoint_platforms.binding import BoundOp, OpTable, Place
from hardpoint_platforms.choices import KernelChoice
from hardpoint_platforms.device import Device
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import OpInstance
from hardpoint_platforms.reference.providers import reference_providers

#: Attributes that say where an op is, not what it does.
_PLACES = frozenset({"group", "pool_layer"})

Key = tuple[Any, ...]


@dataclass
class Timing:
    """All calls of one kind in one step's shape.

    Attributes:
        call: sizes of the last one.
        provider: who computes it.
        kernel_seconds: of each call, without what it takes to call it where the device can tell.
        call_seconds: of each call, from the outside.
    """

    call: Call
    provider: str
    kernel_seconds: list[float] = field(default_factory=list)
    call_seconds: list[float] = field(default_factory=list)


class Meter:
    """Times kernels while `measuring`; they are called straight through otherwise."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._timings: dict[Key, Timing] | None = None
        self._attended: Callable[[OpInstance], Attended] | None = None

    @contextmanager
    def measuring(self, timings: dict[Key, Timing], attended_by: Callable[[OpInstance], Attended]) -> Iterator[None]:
        """Add to `timings` what runs inside; `attended_by` knows the batch."""
        self._timings, self._attended = timings, attended_by
        try:
            yield
        finally:
            self._timings = self._attended = None

    def watch(self, bound: BoundOp) -> BoundOp:
        """The same op with a kernel that is timed."""
        kernel, key = bound.kernel, kind_of(bound)

        def timed(*args: Any, **named: Any) -> Any:
            timings = self._timings
            if timings is None:
                return kernel(*args, **named)
            self._device.synchronize()
            self._device.kernel_seconds()  # forgets what was before
            started = time.perf_counter()
            result = kernel(*args, **named)
            self._device.synchronize()
            taken = time.perf_counter() - started
            counted = self._device.kernel_seconds()
            if key not in timings:
                timings[key] = Timing(self._sizes(bound, args), bound.provider.name)
            timing = timings[key]
            timing.call_seconds.append(taken)
            timing.kernel_seconds.append(counted or taken)
            return result

        return replace(bound, kernel=timed)

    def _sizes(self, bound: BoundOp, args: Sequence[Any]) -> Call:
        instance = bound.instance
        packed = args[-1] if instance.weights else ()
        paged = "pool_layer" in instance.attrs and self._attended is not None
        return Call(
            instance,
            rows=args[0].shape[0],
            sizes=tuple(arg.numel() if isinstance(arg, torch.Tensor) else 0 for arg in args),
            weight_bytes=sum(bound.provider.packed_bytes(packed).values()),
            attended=self._attended(instance) if paged and self._attended is not None else None,
            experts=int(args[2].unique().numel()) if instance.op == "experts" else 0,
        )


class WatchedTable(OpTable):
    """The op table of a device whose bound kernels are all timed by a meter."""

    def __init__(self, device: Device, meter: Meter, choices: Sequence[KernelChoice] = ()) -> None:
        super().__init__(CONTRACTS, device.providers(), reference_providers(device.to_device), choices)
        self._meter = meter
        #: Kinds of bound ops, each once, with the number of instances.
        self.kinds: dict[Key, int] = {}

    def claim(self, instance: OpInstance, parts: Sequence[Place] = ()) -> BoundOp | None:
        bound = super().claim(instance, parts)
        if bound is None:
            return None
        key = kind_of(bound)
        self.kinds[key] = self.kinds.get(key, 0) + 1
        return self._meter.watch(bound)


def kind_of(bound: BoundOp) -> Key:
    """Equal for ops that do the same work on weights of the same form."""
    instance = bound.instance
    attrs = tuple((name, value) for name, value in instance.attrs.items() if name not in _PLACES)
    weights = tuple((name, spec.shape, spec.dtype, spec.scheme) for name, spec in instance.weights.items())
    return instance.op, bound.provider.name, instance.dtype, attrs, weights


def short_name(instance: OpInstance) -> str:
    """An op and its sizes: "linear 576 -> 960 q4_1"."""
    name = _NAMES[instance.op](instance.attrs) if instance.op in _NAMES else ""
    shapes = [spec.shape for spec in instance.weights.values()]
    if not name and shapes:
        rows, *columns = shapes[0]
        name = f"{columns[0]} -> {rows}" if instance.op == "logits" and columns else "x".join(map(str, shapes[0]))
    schemes = dict.fromkeys(spec.scheme.name for spec in instance.weights.values() if spec.scheme is not None)
    return " ".join(filter(None, (instance.op, name, "/".join(schemes))))


def _heads(attrs: Mapping[str, Any]) -> str:
    window = f" window {attrs['window']}" if attrs["window"] else ""
    return f"{attrs['heads']}/{attrs['kv_heads']} x {attrs['head_dim']}{window}"


_NAMES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "linear": lambda a: f"{a['in_features']} -> {a['out_features']}",
    "gated_mlp": lambda a: f"{a['hidden']} x {a['intermediate']}",
    "norm_linear": lambda a: f"{a['in_features']} -> {a['out_features']}",
    "norm_gated_mlp": lambda a: f"{a['hidden']} x {a['intermediate']}",
    "experts": lambda a: f"{a['experts']} x {a['hidden']} x {a['intermediate']}, {a['top_k']} each",
    "moe_route": lambda a: f"{a['top_k']} of {a['experts']}",
    "rope": lambda a: f"{a['rotary_dim']}",
    "attention": _heads,
    "rotary_attention": lambda a: f"{_heads(a)} rope {a['rotary_dim']}" + (f" {a['norm']}" if a["norm"] else ""),
    "mla_attention": lambda a: f"{a['heads']} x {a['latent_dim']}+{a['rope_dim']}",
}
