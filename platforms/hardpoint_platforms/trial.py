"""A trial before serving: each kind of bound kernel runs once or twice, and its results are held against the contract.

The engine's own kernels stay unwrapped: the model is built a second time on the choices made before, each kernel behind
a check of dtypes and shapes, and a prefill and a decode of page 0 run on it, op by op. Programs are recorded later,
from the model whose kernels are not checked.

    layer 0    norm  linear  rope  attention ...     run and checked
    layer 1    norm  linear  rope  attention ...     of the same kinds: zeros of the right form in their place
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hardpoint_platforms.batch import AttentionBatch, SamplingInputs
from hardpoint_platforms.binding import BoundOp, OpTable, Place
from hardpoint_platforms.capabilities import ExecutionMode
from hardpoint_platforms.device import Device
from hardpoint_platforms.guarding import advice, named_op, place_of_code, plugin_of
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import OpInstance
from hardpoint_platforms.ops.provider import AttentionPlanner
from hardpoint_platforms.program import ANY_SIZE, Bucket, SamplingShape, StepFunction, StepInputs, Weights
from hardpoint_platforms.reference.providers import ReferenceProvider
from hardpoint_platforms.state_cache import CacheLayout, State

#: Tokens of the prefill: few, and a number that is seldom one of heads or sizes.
_PROMPT = 5
#: Attributes that say where an op is, not what it does.
_PLACES = ("group", "pool_layer")


@dataclass(frozen=True)
class Form:
    """What a tensor must look like."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


#: A result in forms: one, or a tuple of them in which a number stands for the state, the argument of that number.
Forms = Form | tuple[Form | int, ...]


def _like(index: int) -> Callable[[OpInstance, Sequence[Any]], Form]:
    return lambda instance, args: Form(tuple(args[index].shape), args[index].dtype)


def _last(x: torch.Tensor, size: int, dtype: torch.dtype | None = None) -> Form:
    """As x, but for the last dimension."""
    return Form((*x.shape[:-1], size), dtype or x.dtype)


def _routed(instance: OpInstance, args: Sequence[Any]) -> tuple[Form, ...]:
    shape = (args[0].shape[0], instance.attrs["top_k"])
    return Form(shape, torch.float32), Form(shape, torch.int64)


def _first_weight(instance: OpInstance) -> tuple[int, ...]:
    return next(iter(instance.weights.values())).shape


#: By contract: what an instance returns for these arguments. Ops that are not here return more than tensors.
RESULTS: Mapping[str, Callable[[OpInstance, Sequence[Any]], Forms]] = {
    "embedding": lambda i, args: Form((*args[0].shape, _first_weight(i)[1]), i.dtype),
    "linear": lambda i, args: _last(args[0], i.attrs["out_features"]),
    "norm": _like(0),
    "add_norm": lambda i, args: (_like(0)(i, args), _like(1)(i, args)),
    "rope": lambda i, args: (_like(0)(i, args), _like(1)(i, args)),
    "activation": _like(0),
    "gated_activation": lambda i, args: _last(args[0], args[0].shape[-1] // 2),
    "gated_mlp": _like(0),
    "norm_linear": lambda i, args: (_last(args[0], i.attrs["out_features"]), _like(1)(i, args)),
    "norm_gated_mlp": lambda i, args: (_like(0)(i, args), _like(1)(i, args)),
    "attention": lambda i, args: (_last(args[0], i.attrs["v_head_dim"]), 3),
    "rotary_attention": lambda i, args: (_last(args[0], i.attrs["v_head_dim"]), 4),
    "mla_attention": lambda i, args: (_last(args[0], i.attrs["v_head_dim"]), 4),
    "moe_route": _routed,
    "experts": _like(0),
    "lora": _like(0),
    "conv_state": lambda i, args: (_like(0)(i, args), 1),
    "ssm_scan": lambda i, args: (_like(0)(i, args), 4),
    "gated_delta": lambda i, args: (_like(2)(i, args), 5),
    "logits": lambda i, args: _last(args[0], _first_weight(i)[0], torch.float32),
}


def fault(instance: OpInstance, args: Sequence[Any], result: Any) -> str:
    """What is wrong with the form of a kernel's result: what came and what the contract says; empty if it fits."""
    if instance.op not in RESULTS:
        return _wrong_draw(args, result) if instance.op == "sample" else ""
    wanted = RESULTS[instance.op](instance, args)
    if isinstance(wanted, Form):
        return "" if _form(result) == wanted else f"returned {_told(result)}, the contract says {wanted}"
    if not isinstance(result, (tuple, list)) or len(result) != len(wanted):
        return f"returned {_told(result)}, the contract says {len(wanted)} values"
    for place, (found, form) in enumerate(zip(result, wanted, strict=True)):
        if isinstance(form, Form) and _form(found) != form:
            return f"returned {_told(found)} as its value {place}, the contract says {form}"
    return ""


def _wrong_draw(args: Sequence[Any], result: Any) -> str:
    rows = (args[0].shape[0],)
    found = _form(getattr(result, "token_ids", None))
    if found != Form(rows, torch.int64):
        told = _told(getattr(result, "token_ids", result))
        return f"returned {told} as token_ids, the contract says {Form(rows, torch.int64)}"
    if result.finite is not None and _form(result.finite) != Form(rows, torch.bool):
        return f"returned {_told(result.finite)} as finite, the contract says {Form(rows, torch.bool)}"
    return ""


def _form(value: Any) -> Form | None:
    return Form(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None


def _told(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"{len(value)} values"
    return str(_form(value) or f"{value!r:.40} ({type(value).__name__})")


class CheckedTable(OpTable):
    """The choices of another table once more, in the same order, with kernels that check what they return."""

    def __init__(self, chosen: OpTable, device: Device, before: Callable[[], None] | None = None) -> None:
        """`before` is called before each kernel that runs."""
        super().__init__(CONTRACTS, (), ())
        self._chosen, self._device, self._before = iter(chosen.claims), device, before
        self._seen: set[tuple[Any, ...]] = set()

    def claim(self, instance: OpInstance, parts: Sequence[Place] = ()) -> BoundOp | None:
        """The choice that was made for the same instance. Refusals are not told again."""
        bound = next(self._chosen)
        if bound is None:
            return None
        return replace(bound, kernel=checked(bound, self._device, self._seen, self._before))


def checked(
    bound: BoundOp, device: Device, seen: set[tuple[Any, ...]], before: Callable[[], None] | None = None
) -> Callable[..., Any]:
    """The kernel of a bound op, which raises PluginError for a result of another form than its contract's.

    One whose kind ran on such sizes before (it is in `seen`), and the reference's, give zeros without running.
    """
    kernel, instance, kind = bound.kernel, bound.instance, _kind(bound)
    ours = isinstance(bound.provider, ReferenceProvider)

    def checking(*args: Any, **named: Any) -> Any:
        key = (*kind, tuple(args[0].shape))
        if instance.op in RESULTS and (ours or key in seen):
            return _zeros(device, RESULTS[instance.op](instance, args), args)
        seen.add(key)
        if before is not None:
            before()
        result = kernel(*args, **named)
        wrong = fault(instance, args, result)
        if wrong:
            plugin, place = plugin_of(device), place_of_code(kernel)
            told = f"{named_op(instance)} ({bound.provider.name}) {wrong}{f', at {place}' if place else ''}"
            raise plugin.error("validation", told, advice(plugin, instance.op))
        return result

    return checking


def _kind(bound: BoundOp) -> tuple[Any, ...]:
    """Equal for ops that differ in their place and in the numbers of their weights alone."""
    instance = bound.instance
    attrs = tuple((name, value) for name, value in instance.attrs.items() if name not in _PLACES)
    weights = tuple((name, spec.shape, spec.dtype, spec.scheme) for name, spec in instance.weights.items())
    return instance.op, id(bound.provider), instance.dtype, attrs, weights


def _zeros(device: Device, forms: Forms, args: Sequence[Any]) -> Any:
    if isinstance(forms, Form):
        return device.zeros(forms.shape, forms.dtype)
    return tuple(args[form] if isinstance(form, int) else device.zeros(form.shape, form.dtype) for form in forms)


@dataclass(frozen=True)
class Trial:
    """What is tried: the layers of one device, on checked kernels.

    Attributes:
        step: of the checked model; planners: of its table; weights: as loaded.
        layout: of the paged state; table_width: pages of the longest sequence.
        carried: tensors [T, hidden] that it takes from the layers before; hidden: their width; dtype: of these.
        draws: whether it ends the model.
        max_tokens, max_requests: of a step, by which a device names its buckets.
    """

    step: StepFunction
    planners: tuple[AttentionPlanner, ...]
    weights: Weights
    layout: CacheLayout
    table_width: int
    carried: int
    hidden: int
    dtype: torch.dtype
    draws: bool
    max_tokens: int
    max_requests: int


def is_worthwhile(device: Device, ops: OpTable) -> bool:
    """Whether a device has ops of its own, which compute and can be called one by one."""
    capabilities = device.capabilities()
    return ops.has_own_providers and capabilities.computes and capabilities.mode is not ExecutionMode.COMPILE


def try_out(device: Device, trial: Trial, state: State) -> State:
    """A prefill and a decode into page 0, op by op. Returns the new state; `state` is dead.

    Raises PluginError for a result of the wrong form, and whatever a kernel raises.
    """
    buckets = device.programs().buckets(trial.max_tokens, trial.max_requests) or (ANY_SIZE,)
    most = min(_PROMPT, trial.max_tokens, trial.table_width * trial.layout.page_tokens)
    with torch.inference_mode():
        for count, computed in ((most, 0), (1, most - 1)):
            bucket = next((b for b in buckets if b.fits(count, 1, count, SamplingShape.GREEDY)), None)
            if bucket is not None:
                inputs = _inputs(device, trial, bucket, count, computed)
                _, state = trial.step(inputs, state, trial.weights)
        device.synchronize()
    return state


def _inputs(device: Device, trial: Trial, bucket: Bucket, count: int, computed: int) -> StepInputs:
    """One request of `count` new tokens behind `computed` ones, padded to the bucket; every token is number 0."""
    tokens, requests = bucket.tokens or count, bucket.requests or 1
    positions = np.zeros(tokens, np.int64)
    positions[:count] = np.arange(computed, computed + count)
    index = np.full(requests if trial.draws else 0, 0, np.int64)
    index[:1] = count - 1
    host = [np.zeros(tokens, np.int64), positions, index]
    ids, places, picked = device.upload([torch.from_numpy(array) for array in host])
    batch = _batch(trial, bucket, count, computed)
    blank = torch.zeros((tokens, trial.hidden), dtype=trial.dtype)
    return StepInputs(
        token_ids=ids,
        positions=places,
        plans=tuple(planner.plan(batch) for planner in trial.planners),
        logits_index=picked,
        sampling=_greedy(device, len(index)),
        carried=tuple(device.to_device(blank) for _ in range(trial.carried)),
    )


def _batch(trial: Trial, bucket: Bucket, count: int, computed: int) -> AttentionBatch:
    tokens, requests, size = bucket.tokens or count, bucket.requests or 1, trial.layout.page_tokens
    starts, lengths = np.full(requests + 1, count, np.int32), np.zeros(requests, np.int32)
    starts[0], lengths[0] = 0, computed + count
    width = trial.table_width if bucket.tokens else -(-(computed + count) // size)
    slots = np.zeros(tokens, np.int32)
    slots[:count] = np.arange(computed, computed + count) % size
    groups = len(trial.layout.groups)
    tables = (np.zeros((requests, width), np.int32),) * groups
    return AttentionBatch(starts, lengths, tables, (slots,) * groups, size, 1, count)


def _greedy(device: Device, rows: int) -> SamplingInputs:
    def filled(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype)

    reals, whole = torch.float32, torch.int64
    host = [filled(0, reals), filled(0, whole), filled(1, reals), filled(0, reals), filled(0, whole), filled(0, whole)]
    temperature, top_k, top_p, min_p, seeds, places = device.upload(host)
    return SamplingInputs(temperature, top_k, top_p, min_p, seeds, places, all_greedy=True, filters=False)
