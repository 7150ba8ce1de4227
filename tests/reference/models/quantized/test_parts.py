"""Pieces of the readers: words of integers, grids of scales, groups of a config, and what a float8 dtype holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hardpoint.errors import WeightsError
from hardpoint.weights.quantized.compressed_groups import find_group, groups_of
from hardpoint.weights.quantized.method import Stored
from hardpoint.weights.quantized.registry import find_method, open_quantized
from hardpoint.weights.quantized.words import awq_integers, integers, offsets_of, one_more, signed
from hardpoint.weights.safetensors import SafetensorsSource
from hardpoint_platforms.quant import Codes, Rounding

pytestmark = pytest.mark.reference

F8 = torch.float8_e4m3fn


def _source(folder: Path, config: dict[str, Any], **tensors: torch.Tensor) -> Any:
    save_file({name.replace("__", "."): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    method = find_method(folder, {"quantization_config": config})
    assert method is not None
    return open_quantized(SafetensorsSource(folder), folder, method)


def test_integers_lie_lowest_first() -> None:
    assert integers(torch.tensor([0x76543210]), 4).tolist() == list(range(8))
    assert integers(torch.tensor([[-1]], dtype=torch.int32), 4).tolist() == [[15] * 8]
    assert integers(torch.tensor([0x7F010203], dtype=torch.int32), 8).tolist() == [3, 2, 1, 0x7F]


def test_awq_interleaves_the_two_halves_of_eight() -> None:
    # from the lowest nibble on: columns 0 2 4 6 1 3 5 7
    assert awq_integers(torch.tensor([[0x75316420]], dtype=torch.int32)).tolist() == [list(range(8))]


def test_signed_integers_are_128_less() -> None:
    assert signed(torch.tensor([0, 127, 128, 255], dtype=torch.uint8)).tolist() == [-128, -1, 0, 127]


def test_one_more_undoes_a_borrow() -> None:
    """Zeros of the first version of GPTQ are words less 0x11111111: a zero of 0 has borrowed from its neighbour."""
    zeros = torch.tensor([[0, 3, 0, 0, 15, 1, 0, 9]])
    word = sum(int(zero) << 4 * place for place, zero in enumerate(zeros[0]))
    less = (word - 0x11111111) & 0xFFFFFFFF
    stored = torch.tensor([[less - (1 << 32) if less >= 1 << 31 else less]], dtype=torch.int32)
    assert integers(one_more(stored, 4), 4).tolist() == zeros.tolist()


@pytest.mark.parametrize("zeros", [8, torch.tensor([[0, 7, 15]], dtype=torch.uint8), torch.tensor([[-3, 0, 16]])])
@pytest.mark.parametrize("scale", [1.5, 0.333, 60000.0, 6e-8])
def test_offsets_are_exact(zeros: Any, scale: float) -> None:
    """60000 * 8 is beyond fp16."""
    scales = torch.full((1, 3), scale, dtype=torch.float16)
    found = offsets_of(scales, zeros)
    wanted = -(scales.double() * (zeros.double() if isinstance(zeros, torch.Tensor) else zeros))
    assert torch.equal(found.double(), wanted)


@pytest.mark.parametrize(
    ("scale", "wanted"),
    [
        (torch.tensor(3.0), [3, 3, 3]),
        (torch.tensor([3.0]), [3, 3, 3]),
        (torch.tensor([[3.0]]), [3, 3, 3]),
        (torch.tensor([1.0, 2.0, 4.0]), [1, 2, 4]),
        (torch.tensor([[1.0], [2.0], [4.0]]), [1, 2, 4]),
        (torch.tensor([[1.0], [2.0], [4.0]]).to(torch.float8_e8m0fnu), [1, 2, 4]),
    ],
)
def test_scales_of_all_rows_or_of_each(scale: torch.Tensor, wanted: list[float], tmp_path: Path) -> None:
    source = _source(tmp_path, {"quant_method": "fp8"}, a__weight=torch.ones(3, 4).to(F8), a__weight_scale=scale)
    assert source.spec("a.weight").scheme.group == 4
    assert source.load("a.weight").dequantize()[:, 0].tolist() == wanted


@pytest.mark.parametrize("scale", [torch.tensor([2.0, 3.0]), torch.tensor([[[2.0]], [[3.0]]]), torch.tensor(2.0)])
def test_scales_of_experts_in_one_tensor(scale: torch.Tensor, tmp_path: Path) -> None:
    """gate_up_proj of all experts, [experts, rows, columns]."""
    codes = torch.ones(2, 3, 4).to(F8)
    source = _source(tmp_path, {"quant_method": "fp8"}, e__gate_up_proj=codes, e__gate_up_proj_scale=scale)
    assert list(source.names()) == ["e.gate_up_proj"]
    loaded = source.load("e.gate_up_proj")
    assert loaded.scales.shape == (2, 3, 1)
    assert loaded.dequantize()[:, 0, 0].tolist() == (scale.flatten().tolist() * 2)[:2]


def test_blocks_of_experts_in_one_tensor(tmp_path: Path) -> None:
    scales = torch.arange(1.0, 9.0).reshape(2, 2, 2)
    source = _source(
        tmp_path,
        {"quant_method": "fp8", "weight_block_size": [2, 4]},
        e__gate_up_proj=torch.ones(2, 3, 8).to(F8),
        e__gate_up_proj_scale_inv=scales,
    )
    plain = source.load("e.gate_up_proj").dequantize()
    assert plain[:, :, 0].tolist() == [[1, 1, 3], [5, 5, 7]]
    assert plain[:, :, 7].tolist() == [[2, 2, 4], [6, 6, 8]]


def test_a_block_larger_than_the_weight_is_the_whole_row(tmp_path: Path) -> None:
    source = _source(
        tmp_path,
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        a__weight=torch.ones(3, 40).to(F8),
        a__weight_scale_inv=torch.tensor([[2.0]]),
    )
    scheme = source.spec("a.weight").scheme
    assert (scheme.group, scheme.group_rows, scheme.rounding) == (40, 128, Rounding(Codes.FLOAT8))
    assert torch.equal(source.load("a.weight").dequantize(), torch.full((3, 40), 2.0))


def test_what_is_called_a_scale_and_belongs_to_no_weight_stays(tmp_path: Path) -> None:
    source = _source(
        tmp_path,
        {"quant_method": "fp8"},
        a__layer_scale=torch.ones(4),
        b__weight_scale=torch.ones(1),
        b__k_scale=torch.ones(1),
    )
    assert source.load("a.layer_scale").tolist() == [1.0] * 4
    assert "b.k_scale" not in source
    with pytest.raises(WeightsError, match=r"values are missing; there is only 'b\.weight_scale'"):
        source.spec("b.weight")


def _group(targets: list[str], bits: int) -> dict[str, Any]:
    return {"targets": targets, "weights": {"num_bits": bits, "type": "int", "group_size": 32, "strategy": "group"}}


def test_a_name_comes_before_a_pattern_and_that_before_a_class(tmp_path: Path) -> None:
    groups = groups_of(
        {"config_groups": {"c": _group(["Linear"], 8), "p": _group(["re:.*down_proj$"], 4), "n": _group(["l.0.up"], 2)}}
    )
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    files = SafetensorsSource(tmp_path)
    found = {
        name: find_group(groups, Stored(f"{name}.weight", {"values": "x"}, files)).bits
        for name in ("l.0.up", "l.0.down_proj", "l.0.gate", "embed_tokens")
    }
    assert found == {"l.0.up": 2, "l.0.down_proj": 4, "l.0.gate": 8, "embed_tokens": 8}


def _blocks(bits: int, symmetric: bool) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "strategy": "block", "block_structure": "2x4", "symmetric": symmetric}
    return {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"], "weights": weights}}}


def test_blocks_of_integers(tmp_path: Path) -> None:
    values, scales = torch.ones(3, 8, dtype=torch.int8), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    source = _source(tmp_path, _blocks(8, True), a__weight=values, a__weight_scale=scales)
    assert source.load("a.weight").dequantize()[:, ::4].tolist() == [[1, 2], [1, 2], [3, 4]]


def test_blocks_with_zero_points_are_refused(tmp_path: Path) -> None:
    parts = {
        "a__weight_packed": torch.zeros(3, 1, dtype=torch.int32),
        "a__weight_shape": torch.tensor([3, 8]),
        "a__weight_scale": torch.ones(2, 2),
    }
    with pytest.raises(WeightsError, match="blocks of scales are read with 8 bits"):
        _source(tmp_path, _blocks(4, True), **parts).spec("a.weight")


def test_zero_points_one_by_one_may_be_of_any_width(tmp_path: Path) -> None:
    group = _group(["Linear"], 4)
    group["weights"] |= {"symmetric": False, "group_size": 8}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": group}}
    parts = {
        "a__weight_packed": torch.zeros(3, 1, dtype=torch.int32),  # -8 each
        "a__weight_shape": torch.tensor([3, 8]),
        "a__weight_scale": torch.ones(3, 1),
    }
    for dtype in (torch.int8, torch.int32, torch.int64):
        zeros = torch.tensor([[-8], [0], [7]], dtype=dtype)
        source = _source(tmp_path, config, **parts, a__weight_zero_point=zeros)
        assert source.load("a.weight").dequantize()[:, 0].tolist() == [0, -8, -15]


@pytest.mark.parametrize(
    ("inputs", "wanted"),
    [
        (None, None),
        ({"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True}, Rounding(Codes.INT8)),
        ({"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}, Rounding(Codes.FLOAT8)),
        ({"num_bits": 8, "type": "float", "strategy": "group", "group_size": 64}, Rounding(Codes.FLOAT8, 64)),
        ({"num_bits": 4, "type": "int", "strategy": "token"}, None),
        ({"num_bits": 8, "type": "int", "strategy": "token", "symmetric": False}, None),
    ],
)
def test_what_inputs_are_rounded_to(inputs: Any, wanted: Rounding | None) -> None:
    (group,) = groups_of({"config_groups": {"g": _group(["Linear"], 8) | {"input_activations": inputs}}})
    assert group.rounding == wanted
    assert bool(group.left_out) == (inputs is not None and wanted is None)
