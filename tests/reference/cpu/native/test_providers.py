"""Native kernels against the contracts' samples: each agrees with the reference, or refuses with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hardpoint_cpu.native.program import TapeBuilder
from hardpoint_cpu.native.provider import Setting
from hardpoint_cpu.native.providers import native_providers
from hardpoint_cpu.native.stage import Stage
from hardpoint_cpu.ops.providers import cpu_providers
from hardpoint_platforms.batch import AttentionBatch
from hardpoint_platforms.binding import ask
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Sample
from hardpoint_platforms.ops.provider import OpProvider
from hardpoint_platforms.ops.samples import run
from hardpoint_platforms.reference.providers import reference_providers

pytestmark = pytest.mark.reference

REFERENCE = {provider.op: provider for provider in reference_providers()}
OPS = (
    "embedding", "linear", "norm", "add_norm", "rope", "activation", "gated_activation", "attention", "mla_attention",
    "moe_route", "experts", "lora", "conv_state", "ssm_scan", "gated_delta", "logits", "sample", "logprobs",
)  # fmt: skip
#: What is left to others, by a word of the sample's name.
LEFT = ("ln (3, 4, 16), 1 weights",)
#: Products of weights with activations rounded to int8 per block: error relative to the result's size.
ROUNDED = ("linear", "logits", "experts")
MOST_ROUNDING = 0.02


def samples() -> Iterator[Any]:
    for op in OPS:
        for case in CONTRACTS[op].samples(torch.float32):
            yield pytest.param(op, case, id=f"{op}-{case.instance.where}")


def provider_of(setting: Setting, op: str) -> OpProvider:
    return next(provider for provider in native_providers(setting) if provider.op == op)


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for part in tree:
            yield from tensors(part)
    elif hasattr(tree, "__dataclass_fields__"):
        for name in tree.__dataclass_fields__:
            if name != "finite":  # the reference does not look
                yield from tensors(getattr(tree, name))


def real(result: Any, case: Sample) -> Any:
    """Without what may be anything: rows of padding, and page 0, which is nobody's."""
    batch = next((argument for argument in case.make() if isinstance(argument, AttentionBatch)), None)
    if batch is None:
        return result
    out, state = result
    return out[: batch.num_tokens], tuple(tuple(part[1:] for part in layer) for layer in state)


@pytest.mark.parametrize(("op", "case"), samples())
def test_agrees_with_the_reference(setting: Setting, op: str, case: Sample) -> None:
    provider = provider_of(setting, op)
    answer = ask(CONTRACTS[op], provider, case.instance)
    if not answer:
        scheme = case.instance.weights["weight"].scheme if op == "linear" else None
        rounds = scheme is not None and scheme.rounding is not None  # see test_eight_bits.py
        assert rounds or any(word in case.instance.where for word in LEFT), answer.reason
        return
    with torch.inference_mode():
        found, wanted = real(run(provider, case), case), real(run(REFERENCE[op], case), case)
    tolerance = CONTRACTS[op].tolerance[torch.float32]
    quantized = any(spec.scheme is not None for spec in case.instance.weights.values())
    pairs = list(zip(tensors(found), tensors(wanted), strict=True))
    assert pairs
    for ours, theirs in pairs:
        assert ours.dtype == theirs.dtype
        if op in ROUNDED and quantized and not setting.exact:
            assert float((ours - theirs).norm() / theirs.norm()) < MOST_ROUNDING
        else:
            torch.testing.assert_close(ours, theirs, atol=tolerance.atol, rtol=tolerance.rtol)


@pytest.mark.parametrize("op", OPS)
def test_other_dtypes_are_refused_with_a_reason(stage: Stage, op: str) -> None:
    provider = provider_of(Setting(stage), op)
    case = next(iter(CONTRACTS[op].samples(torch.bfloat16)))
    if case.instance.dtype is torch.float32:
        return  # logits are float32 whatever the model computes in
    answer = ask(CONTRACTS[op], provider, case.instance)
    assert not answer
    assert "bfloat16" in answer.reason


@pytest.mark.parametrize("op", ["linear", "embedding", "attention"])
def test_a_library_without_the_kernel_leaves_the_op_to_others(op: str) -> None:
    class Empty:
        def has(self, code: int) -> bool:
            return False

    stage = Stage(Empty(), None)  # type: ignore[arg-type]
    case = next(iter(CONTRACTS[op].samples(torch.float32)))
    answer = ask(CONTRACTS[op], provider_of(Setting(stage), op), case.instance)
    assert not answer
    assert "no" in answer.reason


def test_packed_bytes_are_those_of_the_library(stage: Stage) -> None:
    """The handle is eight bytes; the weight behind it is not."""
    case = next(case for case in CONTRACTS["linear"].samples(torch.float32) if case.instance.where == "q4_k")
    provider = provider_of(Setting(stage), "linear")
    packed = provider.pack(case.instance, case.weights)
    held = provider.packed_bytes(packed)
    rows, columns = case.instance.weights["weight"].shape
    assert sum(held.values()) >= rows * columns // 2
    assert held == provider.packed_bytes(packed)


def test_a_tape_holds_native_calls_alone(stage: Stage) -> None:
    programs = TapeBuilder(stage)
    assert all(programs.holds(provider) for provider in native_providers(Setting(stage)))
    assert not any(programs.holds(provider) for provider in (*cpu_providers(blocked=False), *REFERENCE.values()))
