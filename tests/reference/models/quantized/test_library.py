"""What the compressed-tensors library itself writes, where it is installed; it is not needed otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from writers import integers

from hardpoint.weights.quantized.registry import find_method, open_quantized
from hardpoint.weights.safetensors import SafetensorsSource

pytestmark = pytest.mark.reference

#: preset, the library's format, bits, columns per scale, symmetric
PRESETS = [
    ("W4A16", "pack-quantized", 4, 128, True),
    ("W4A16_ASYM", "pack-quantized", 4, 128, False),
    ("W8A16", "pack-quantized", 8, 128, True),
    ("W8A8", "int-quantized", 8, -1, True),
    ("FP8", "float-quantized", 8, 0, True),
    ("FP8_DYNAMIC", "float-quantized", 8, -1, True),
    ("FP8_BLOCK", "float-quantized", 8, 128, True),
]


@pytest.mark.parametrize(("preset", "form", "bits", "group", "symmetric"), PRESETS)
def test_a_module_of_the_library(
    preset: str, form: str, bits: int, group: int, symmetric: bool, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import preset_name_to_scheme

    weight = torch.randn(300 if "BLOCK" in preset else 72, 256, generator=torch.Generator().manual_seed(1))
    scheme = preset_name_to_scheme(preset, ["Linear"])
    scales, zeros = _scales(weight, preset, bits, group, symmetric)
    state = {"weight": weight, "weight_scale": scales} | ({} if symmetric else {"weight_zero_point": zeros})
    compressor = BaseCompressor.get_value_from_registry(form)
    tensors = compressor.compress(state, scheme)
    wanted = compressor.decompress(dict(tensors), scheme)["weight"].float()
    save_file({f"a.{name}": tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    group_config = scheme.model_dump(mode="json")
    config: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group_config},
    }
    method = find_method(tmp_path, {"quantization_config": config})
    assert method is not None
    source = open_quantized(SafetensorsSource(tmp_path), tmp_path, method)
    loaded: Any = source.load("a.weight")
    assert source.spec("a.weight").shape == weight.shape
    assert (loaded.scheme.rounding is None) == ("A16" in preset)
    torch.testing.assert_close(loaded.dequantize(), wanted, atol=1e-6, rtol=1e-5)
    assert float((loaded.dequantize() - weight).norm() / weight.norm()) < (0.12 if bits == 4 else 0.04)


def _scales(
    weight: torch.Tensor, preset: str, bits: int, group: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 scales and int8 zero points in the shapes that the library wants."""
    if not preset.startswith("FP8"):
        _, scales, zeros, _ = integers(weight, bits, group, symmetric, torch.float32)
        return scales, (zeros - (1 << bits - 1)).to(torch.int8)
    if preset == "FP8_BLOCK":
        padded = torch.nn.functional.pad(weight, (0, 0, 0, -weight.shape[0] % group))
        return padded.unflatten(1, (-1, group)).unflatten(0, (-1, group)).abs().amax((1, 3)) / 448, weight
    most = weight.abs().amax(1, keepdim=True) if group else weight.abs().max().reshape(1)
    return most / 448, weight
