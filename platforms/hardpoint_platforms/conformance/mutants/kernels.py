"""Faults in kernels around attention and in sampling."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch

from hardpoint_platforms.batch import SampleResult, SamplingInputs
from hardpoint_platforms.conformance.mutants.platform import BuildFault, Fault
from hardpoint_platforms.ops.contract import Kernel, OpInstance
from hardpoint_platforms.ops.provider import OpProvider, Support


def with_attrs(**changes: Any) -> BuildFault:
    """The reference's kernel of an instance whose attributes are misread; a callable changes the right value."""

    def build(right: OpProvider, instance: OpInstance) -> Kernel:
        attrs = dict(instance.attrs)
        for name, wrong in changes.items():
            attrs[name] = wrong(attrs[name]) if callable(wrong) else wrong
        return right.build(dataclasses.replace(instance, attrs=attrs))

    return build


def around(wrong: Callable[..., Any]) -> BuildFault:
    """wrong(right kernel, *arguments) instead of the right kernel."""

    def build(right: OpProvider, instance: OpInstance) -> Kernel:
        kernel = right.build(instance)

        def mutant(*arguments: Any) -> Any:
            return wrong(kernel, *arguments)

        return mutant

    return build


def with_inputs(**changes: Callable[[torch.Tensor], Any]) -> BuildFault:
    """A sampler that reads its inputs wrongly."""

    def wrong(kernel: Kernel, logits: torch.Tensor, inputs: SamplingInputs) -> Any:
        given = {name: change(getattr(inputs, name)) for name, change in changes.items()}
        return kernel(logits, dataclasses.replace(inputs, **given))

    return around(wrong)


def _no_bias(kernel: Kernel, x: torch.Tensor, w: Any) -> Any:
    return kernel(x, w[:1])


def _in_place(kernel: Kernel, x: torch.Tensor, w: Any) -> Any:
    out = kernel(x, w)
    x.mul_(2.0)
    return out


def _swapped_halves(kernel: Kernel, x: torch.Tensor) -> Any:
    return kernel(torch.cat(x.chunk(2, -1)[::-1], dim=-1))


def _low_precision(kernel: Kernel, x: torch.Tensor, w: Any) -> Any:
    return kernel(x.to(torch.bfloat16).to(x.dtype), w)


def _remembers(right: OpProvider, instance: OpInstance) -> Kernel:
    """Gives its first result again for the same shape: a buffer that is not refilled."""
    kernel, kept = right.build(instance), []

    def mutant(*arguments: Any) -> Any:
        kept.append(kernel(*arguments))
        return kept[-1] if len(kept) == 1 else kept[0] + 1.0

    # The engine builds a kernel once per instance and calls it many times; the kit builds it for each call.
    shared: dict[str, Kernel] = vars(right).setdefault("_built", {})
    return shared.setdefault(instance.where, mutant)


def _raises(kernel: Kernel, x: torch.Tensor, w: Any) -> Any:
    raise RuntimeError("device-side assertion")


def _hangs(kernel: Kernel, x: torch.Tensor, w: Any) -> Any:
    time.sleep(20.0)
    return kernel(x, w)


def _leaves(kernel: Kernel, x: torch.Tensor, w: Any) -> Any:
    raise SystemExit("bye")


def _lora_of_minus_one(kernel: Kernel, y: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, w: Any) -> Any:
    return kernel(y, x, slots.clamp(min=0), w)


def _last_of_equals(kernel: Kernel, logits: torch.Tensor, inputs: SamplingInputs) -> Any:
    drawn = kernel(logits.flip(1), inputs)
    greedy = inputs.temperature <= 0
    right = kernel(logits, inputs)
    ids = torch.where(greedy, logits.shape[1] - 1 - drawn.token_ids, right.token_ids)
    return SampleResult(ids, right.logprobs)


def _neighbours(kernel: Kernel, logits: torch.Tensor, inputs: SamplingInputs) -> Any:
    if not bool(torch.isfinite(logits).all()):
        logits = logits + (logits - logits).sum()
    return kernel(logits, inputs)


def _says_finite(kernel: Kernel, logits: torch.Tensor, inputs: SamplingInputs) -> Any:
    drawn = kernel(logits, inputs)
    return dataclasses.replace(drawn, finite=torch.ones(logits.shape[0], dtype=torch.bool))


def _place_in_batch(kernel: Kernel, logits: torch.Tensor, inputs: SamplingInputs) -> Any:
    """The generator is advanced row by row: a draw depends on where a row stands."""
    places = torch.arange(len(inputs.seeds))
    return kernel(logits, dataclasses.replace(inputs, seeds=inputs.seeds + places))


def _another_order(kernel: Kernel, logits: torch.Tensor, inputs: SamplingInputs) -> Any:
    """The right number, and the right distribution, but ids are gone through from the end."""
    right, turned = kernel(logits, inputs), kernel(logits.flip(1), inputs)
    plain = inputs.allowed is None and inputs.bias is None and inputs.penalties is None
    if inputs.all_greedy or not plain:
        return right
    ids = torch.where(inputs.temperature > 0, logits.shape[1] - 1 - turned.token_ids, right.token_ids)
    return dataclasses.replace(right, token_ids=ids)


def _after_temperature(kernel: Kernel, logits: torch.Tensor, inputs: SamplingInputs) -> Any:
    drawn = kernel(logits, inputs)
    if drawn.logprobs is None:
        return drawn
    heat = torch.where(inputs.temperature > 0, inputs.temperature, 1.0)[:, None]
    return dataclasses.replace(drawn, logprobs=kernel(logits / heat, inputs).logprobs)


def _accepts_all(kernel: Kernel, logits: torch.Tensor, drafts: Any, lengths: Any, probs: Any, inputs: Any) -> Any:
    right = kernel(logits, drafts, lengths, probs, inputs)
    if probs is None or drafts.shape[1] != 1:
        return right
    return dataclasses.replace(right, token_ids=torch.cat((drafts, right.token_ids[:, 1:]), dim=1))


def _penalized_prompt(kernel: Kernel, logits: torch.Tensor, inputs: SamplingInputs) -> Any:
    if inputs.penalties is None:
        return kernel(logits, inputs)
    wrong = dataclasses.replace(inputs.penalties, prompt_lengths=torch.zeros_like(inputs.penalties.prompt_lengths))
    return kernel(logits, dataclasses.replace(inputs, penalties=wrong))


def _no_reason(right: OpProvider, instance: OpInstance) -> Support:
    return Support(instance.dtype is not torch.float32)


def _plain_bool(right: OpProvider, instance: OpInstance) -> Any:
    return True


def _op(name: str, op: str, build: BuildFault, group: str = "ops", **more: Any) -> Fault:
    return Fault(name, (group,), (f"{group}/{op}/*",), kernels={op: build}, **more)


FAULTS: tuple[Fault, ...] = (
    _op("norm without epsilon", "norm", with_attrs(eps=0.0)),
    _op("norm multiplies by w where 1 + w is meant", "norm", with_attrs(kind=lambda k: "rms" if k == "rms1p" else k)),
    _op("rope pairs neighbours where halves are meant", "rope", with_attrs(interleaved=lambda flag: not flag)),
    _op("rope rotates the first dimensions always", "rope", with_attrs(tail=False)),
    _op("gate and up swapped", "gated_activation", around(_swapped_halves)),
    _op("gelu for its tanh form", "activation", with_attrs(kind=lambda k: "gelu" if k == "gelu_tanh" else k)),
    _op("gate without its limit", "gated_activation", with_attrs(limit=None)),
    _op("linear drops the bias", "linear", around(_no_bias)),
    _op("linear writes into its input", "linear", around(_in_place)),
    _op("linear returns float64", "linear", around(lambda kernel, x, w: kernel(x, w).double())),
    _op("linear adds a dimension", "linear", around(lambda kernel, x, w: kernel(x, w)[None])),
    _op("linear returns nothing", "linear", around(lambda kernel, x, w: None)),
    _op("linear gives a stale buffer at its second call", "linear", _remembers),
    _op("linear raises", "linear", around(_raises)),
    _op("linear leaves the process", "linear", around(_leaves)),
    Fault(
        "linear hangs", ("ops",), ("ops/linear/1x48*",), kernels={"linear": around(_hangs)}, patience=0.5,
    ),
    _op("embedding forgets its scale", "embedding", with_attrs(scale=1.0)),
    _op("logits without softcap", "logits", with_attrs(softcap=None)),
    _op("logits in low precision", "logits", around(_low_precision)),
    _op("routing does not renormalize", "moe_route", with_attrs(renormalize=False)),
    _op("routing ignores groups", "moe_route", with_attrs(groups=1)),
    _op("experts ignore the weight's place", "experts", with_attrs(weight_on_input=False)),
    _op("experts read gate and up as halves always", "experts", with_attrs(interleaved=False)),
    _op("lora adapts rows without adapter", "lora", around(_lora_of_minus_one)),
    _op("ssm without its bound on dt", "ssm_scan", with_attrs(dt_max=float("inf"))),
    _op("delta rule without unit keys", "gated_delta", with_attrs(l2norm=False)),
    Fault("supports() refuses without a reason", ("ops",), ("ops/linear/*",), supports=_no_reason),
    Fault("supports() returns a bool", ("ops",), ("ops/linear/*",), supports=_plain_bool),
    _op("greedy takes the last of equals", "sample", around(_last_of_equals), "sampling"),
    _op("one generator for the batch", "sample", with_inputs(seeds=lambda s: s[:1].expand_as(s)), "sampling"),
    _op("a draw depends on its place in the batch", "sample", around(_place_in_batch), "sampling"),
    _op("a generator of its own", "sample", with_inputs(seeds=lambda s: s ^ 0x5DEECE66D), "sampling"),
    _op("draws over tokens in another order", "sample", around(_another_order), "sampling"),
    _op("position is ignored", "sample", with_inputs(positions=torch.zeros_like), "sampling"),
    _op("temperature is ignored", "sample", with_inputs(temperature=lambda t: (t > 0).float()), "sampling"),
    _op("top-k keeps one more", "sample", with_inputs(top_k=lambda k: torch.where(k > 0, k + 1, k)), "sampling"),
    _op("top-p is a little larger", "sample", with_inputs(top_p=lambda p: (p + 0.1).clamp(max=1.0)), "sampling"),
    _op("min-p is ignored", "sample", with_inputs(min_p=torch.zeros_like), "sampling"),
    _op("the allowed mask is ignored", "sample", with_inputs(allowed=lambda mask: None), "sampling"),
    _op("bias is ignored", "sample", with_inputs(bias=lambda bias: None), "sampling"),
    _op("presence counts the prompt", "sample", around(_penalized_prompt), "sampling"),
    _op("a broken row breaks its neighbours", "sample", around(_neighbours), "sampling"),
    _op("a broken row is called finite", "sample", around(_says_finite), "sampling"),
    _op("log-probabilities after temperature", "sample", around(_after_temperature), "sampling"),
    _op("every draft is accepted", "verify", around(_accepts_all), "sampling"),
)  # fmt: skip
