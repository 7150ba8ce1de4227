"""The gated MLP of 8-bit products: one pass that activates and rounds gives what the two passes give."""

from __future__ import annotations

import pytest
import torch
from hardpoint_torch_gpu.gated_mlp import EightBitMlp
from hardpoint_torch_gpu.kernels.activate_round import activate_round
from hardpoint_torch_gpu.kernels.activation import activate
from hardpoint_torch_gpu.kernels.round_input import round_rows

from hardpoint_platforms.binding import ask
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Sample
from hardpoint_platforms.ops.samples import SCHEMES, Source, quantized, run, sample
from hardpoint_platforms.quant import Codes, Rounding
from hardpoint_platforms.reference.blocks import build_gated_mlp

pytestmark = pytest.mark.reference
CONTRACT = CONTRACTS["gated_mlp"]
SAMPLES = tuple(CONTRACT.samples(torch.float32))


@pytest.mark.parametrize("case", SAMPLES, ids=[case.instance.where for case in SAMPLES])
def test_takes_products_of_8_bit_numbers_and_agrees(case: Sample) -> None:
    ours = EightBitMlp()
    answer = ask(CONTRACT, ours, case.instance)
    scheme = case.instance.weights["down"].scheme
    if scheme is None or scheme.rounding is None:
        assert not answer
        assert "no product of 8-bit numbers" in answer.reason
        return
    assert answer, answer.reason
    with torch.inference_mode():
        found = run(ours, case)
        plain = [weight.dequantize() for weight in case.weights.values()]
        wanted = build_gated_mlp(case.instance)(*case.make(), plain)
    tolerance = CONTRACT.tolerance[torch.float32]
    torch.testing.assert_close(found, wanted, atol=tolerance.atol, rtol=tolerance.rtol)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("group", [0, 64], ids=["row", "group"])
@pytest.mark.parametrize("codes", [Codes.INT8, Codes.FLOAT8], ids=["int8", "float8"])
@pytest.mark.parametrize(("kind", "limit", "offset"), [("silu", None, 0.0), ("gelu_tanh", 1.5, 1.0)])
def test_one_pass_equals_two_to_the_bit(
    codes: Codes, group: int, tokens: int, kind: str, limit: float | None, offset: float
) -> None:
    x = Source(3).normal(tokens, 2 * 192, dtype=torch.float16, scale=2.0)
    x[0, :64], x[0, 192:256] = 0.0, 0.0
    rounding = Rounding(codes, group)
    ours = activate_round(x, kind, limit, offset, rounding)
    theirs = round_rows(activate(x, kind, True, limit, offset), rounding)
    assert torch.equal(ours.scales, theirs.scales)
    assert torch.equal(ours.codes.view(torch.uint8), theirs.codes.view(torch.uint8))
    assert ours.dtype is torch.float16


def test_no_rows() -> None:
    weights = {name: quantized(Source(1), (512, 256), SCHEMES["fp8"]) for name in ("gate_up",)}
    weights["down"] = quantized(Source(2), (256, 256), SCHEMES["fp8"])
    case = sample(
        CONTRACT,
        "none",
        torch.float32,
        lambda s: (torch.zeros(0, 256),),
        weights,
        hidden=256,
        intermediate=256,
        kind="silu",
    )
    assert run(EightBitMlp(), case).shape == (0, 256)


def test_biases() -> None:
    source = Source(4)
    weights = {
        "gate_up": quantized(source, (512, 256), SCHEMES["int8"]),
        "down": quantized(source, (256, 256), SCHEMES["int8"]),
        "gate_up_bias": source.normal(512),
        "down_bias": source.normal(256),
    }
    case = sample(
        CONTRACT,
        "biases",
        torch.float32,
        lambda s: (s.normal(2, 256),),
        weights,
        hidden=256,
        intermediate=256,
        kind="silu",
    )
    plain = [w if isinstance(w, torch.Tensor) else w.dequantize() for w in weights.values()]
    wanted = build_gated_mlp(case.instance)(*case.make(), plain)
    torch.testing.assert_close(run(EightBitMlp(), case), wanted, atol=1e-4, rtol=1e-4)


def test_floats_are_left_where_the_device_has_none() -> None:
    case = next(case for case in SAMPLES if case.instance.where == "fp8")
    assert "multiplies no float8" in EightBitMlp(float8=False).supports(case.instance).reason
