"""8-bit floats of checkpoints as the kind that gfx942 multiplies: every code, and whole products by Triton kernels."""

from __future__ import annotations

import pytest
import torch
from hardpoint_rocm.fnuz import AsFnuz, as_fnuz, to_fnuz
from hardpoint_torch_gpu import eight_bits
from hardpoint_torch_gpu.dense import TorchLinear
from hardpoint_torch_gpu.experts import TritonExperts
from hardpoint_torch_gpu.gated_mlp import EightBitMlp
from hardpoint_torch_gpu.providers import triton_providers
from hardpoint_torch_gpu.rounded_input import NormBlock

from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Sample, Weight
from hardpoint_platforms.ops.samples import SCHEMES, Source, quantized, run, sample
from hardpoint_platforms.reference.blocks import build_gated_mlp
from hardpoint_platforms.reference.platform import ReferenceDevice
from hardpoint_platforms.reference.providers import ReferenceProvider, reference_providers

pytestmark = pytest.mark.reference

F8, F8Z = torch.float8_e4m3fn, torch.float8_e4m3fnuz
REFERENCE = {provider.op: provider for provider in reference_providers()}


def test_all_256_codes() -> None:
    bits = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    before, after = bits.view(F8).float(), to_fnuz(bits.view(F8))
    assert after.dtype is F8Z
    assert torch.equal(after.float().isnan(), before.isnan())
    numbers = ~before.isnan()
    assert numbers.sum() == 254
    assert torch.equal(after.float()[numbers] * 2.0, before[numbers])
    changed = after.view(torch.uint8) != bits
    assert bits[changed].tolist() == [0x7F, 0x80, 0xFF]
    assert after.view(torch.uint8)[changed].tolist() == [0x80, 0x00, 0x80]


def test_the_weight_at_hand_stays_as_it_is() -> None:
    values = torch.tensor([0x80, 0x7F], dtype=torch.uint8).view(F8)
    to_fnuz(values)
    assert values.view(torch.uint8).tolist() == [0x80, 0x7F]


def test_an_input_is_the_same_numbers() -> None:
    """Rounded for a weight of either kind: half as large for the other, and never a negative zero."""
    case = fp8_sample("linear", "fp8")
    instance, weights = case.instance, case.weights
    x = torch.tensor([[-1e-30, -0.0, 3.0, -448.0, *torch.randn(instance.attrs["in_features"] - 4).tolist()]])
    kinds = []
    for provider in (TorchLinear(), AsFnuz(TorchLinear())):
        kinds.append(eight_bits.unpacked(instance, provider.pack(instance, weights)).rounded(x))
    ours, theirs = kinds[1], kinds[0]
    assert (theirs.codes.dtype, ours.codes.dtype) == (F8, F8Z)
    assert torch.equal(ours.codes.float() * 2.0, theirs.codes.float())
    assert torch.equal(ours.scales, theirs.scales)


def fp8_sample(op: str, scheme: str) -> Sample:
    """The contract's sample whose weight is of this scheme; experts have none in 8-bit floats, so one is made."""
    if op == "experts":
        return fp8_experts(scheme)
    return next(case for case in CONTRACTS[op].samples(torch.float32) if case.instance.where == scheme)


def fp8_experts(scheme: str) -> Sample:
    """Two tokens, an expert each, with a gated activation."""
    weights: dict[str, Weight] = {
        "gate_up": quantized(Source(1), (2, 512, 256), SCHEMES[scheme]),
        "down": quantized(Source(2), (2, 256, 256), SCHEMES[scheme]),
    }

    def make(source: Source) -> tuple[torch.Tensor, ...]:
        return source.normal(2, 256), torch.tensor([[0.7], [0.5]]), torch.tensor([[1], [0]])

    attrs = {"experts": 2, "top_k": 1, "hidden": 256, "intermediate": 256}
    return sample(CONTRACTS["experts"], scheme, torch.float32, make, weights, **attrs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the test mode of the conformance kit runs these")
@pytest.mark.parametrize("op", ["linear", "experts"])
@pytest.mark.parametrize("scheme", ["fp8", "fp8_block"])
def test_products_agree_with_the_reference(op: str, scheme: str) -> None:
    provider = AsFnuz(TorchLinear() if op == "linear" else TritonExperts())
    case = fp8_sample(op, scheme)
    packed = provider.pack(case.instance, case.weights)
    assert any(part.dtype is F8Z for part in packed)
    assert not any(part.dtype is F8 for part in packed)
    assert provider.supports(case.instance).reason.endswith("; as e4m3fnuz")
    tolerance = CONTRACTS[op].tolerance[torch.float32]
    with torch.inference_mode():
        found, wanted = run(provider, case), run(REFERENCE[op], case)
    torch.testing.assert_close(found, wanted, atol=tolerance.atol, rtol=tolerance.rtol)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the test mode of the conformance kit runs these")
@pytest.mark.parametrize("scheme", ["fp8", "fp8_block"])
def test_the_gated_mlp_agrees_with_the_reference(scheme: str) -> None:
    """Its second product's input is rounded by the activation, and must be of the other kind too."""
    case, provider = fp8_sample("gated_mlp", scheme), AsFnuz(EightBitMlp())
    packed = provider.pack(case.instance, case.weights)
    assert [part.dtype for part in packed].count(F8Z) == 2
    assert not any(part.dtype is F8 for part in packed)
    with torch.inference_mode():
        plain = [weight.dequantize() for weight in case.weights.values()]
        found, wanted = run(provider, case), build_gated_mlp(case.instance)(*case.make(), plain)
    tolerance = CONTRACTS["gated_mlp"].tolerance[torch.float32]
    torch.testing.assert_close(found, wanted, atol=tolerance.atol, rtol=tolerance.rtol)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the test mode of the conformance kit runs these")
@pytest.mark.parametrize("scheme", ["fp8", "fp8_block"])
@pytest.mark.parametrize("op", ["norm_linear", "norm_gated_mlp"])
def test_blocks_behind_a_norm_agree_with_the_reference(op: str, scheme: str) -> None:
    """Whether the block is converted or what it is made of."""
    case = fp8_sample(op, scheme)
    product = TorchLinear() if op == "norm_linear" else EightBitMlp()
    for provider in (AsFnuz(NormBlock(product)), NormBlock(AsFnuz(product))):
        assert provider.supports(case.instance).reason.endswith("; as e4m3fnuz")
        packed = provider.pack(case.instance, case.weights)
        assert not any(part.dtype is F8 for part in packed)
        with torch.inference_mode():
            found, wanted = run(provider, case), run(ReferenceProvider(CONTRACTS[op]), case)
        tolerance = CONTRACTS[op].tolerance[torch.float32]
        torch.testing.assert_close(found, wanted, atol=tolerance.atol, rtol=tolerance.rtol)


def test_what_takes_no_rounded_input_says_so() -> None:
    assert "rounds its input itself" in AsFnuz(TritonExperts()).against(fp8_sample("experts", "fp8").instance)


def test_only_products_are_replaced() -> None:
    plain = triton_providers(ReferenceDevice())
    ours = as_fnuz(plain)
    assert [provider.op for provider in ours] == [provider.op for provider in plain]
    replaced = {new.op for old, new in zip(plain, ours, strict=True) if new is not old}
    assert replaced == {"linear", "experts", "gated_mlp", "norm_linear", "norm_gated_mlp"}


def test_other_weights_are_told_and_packed_as_ever() -> None:
    case = fp8_sample("linear", "int8")
    plain, ours = TorchLinear(), AsFnuz(TorchLinear())
    assert ours.supports(case.instance) == plain.supports(case.instance)
    for one, other in zip(ours.pack(case.instance, case.weights), plain.pack(case.instance, case.weights), strict=True):
        assert torch.equal(one, other)
