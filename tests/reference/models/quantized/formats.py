"""Quantized checkpoints of every format, each beside the plain checkpoint that it stands for; `writers` packs them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from writers import (
    GROUP,
    Tensors,
    Writer,
    awq,
    float8_blocks,
    float8_rows,
    float8_tensor,
    gptq,
    integers8,
    mxfp4,
    packed,
)


@dataclass(frozen=True)
class Format:
    """One way to write a checkpoint.

    rounding: of the inputs: codes, and columns per scale, 0 for the whole row. plain: no scheme holds its weights.
    beside: tensors that belong to no weight.
    """

    name: str
    config: Mapping[str, Any]
    write: Writer
    rounding: tuple[str, int] | None = None
    plain: bool = False
    beside: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class Pair:
    """A quantized checkpoint, and the plain one that it means."""

    folder: Path
    plain: Path
    form: Format
    weights: Tensors
    taken: tuple[str, ...]


def write_pair(saved: Path, folder: Path, form: Format, sharded: bool = False) -> Pair:
    """Write the model of `saved` in a format, and the plain weights that it means."""
    plain = folder / "plain"
    quantized = folder / "quantized"
    for place in (plain, quantized):
        shutil.copytree(saved, place)
    tensors: Tensors = {}
    weights: Tensors = {}
    taken = []
    for name, weight in load_file(saved / "model.safetensors").items():
        if "_proj" not in name or weight.ndim != 2:
            tensors[name] = weights[name] = weight
            continue
        own, weights[name] = form.write(name.removesuffix(".weight"), weight)
        tensors |= own
        taken.append(name)
    tensors |= form.beside
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": dict(form.config)}))
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if not sharded:
        save_file(tensors, quantized / "model.safetensors")
        return Pair(quantized, plain, form, weights, tuple(taken))
    (quantized / "model.safetensors").unlink()
    places = {}
    for number in range(3):  # tensors of one weight land in several files
        file = f"model-{number + 1:05d}-of-00003.safetensors"
        part = sorted(tensors)[number::3]
        save_file({name: tensors[name] for name in part}, quantized / file)
        places |= dict.fromkeys(part, file)
    (quantized / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return Pair(quantized, plain, form, weights, tuple(taken))


def write_fused(saved: Path, folder: Path) -> Pair:
    """The experts of each layer of a Qwen3-MoE in one tensor, gate and up as one, in MXFP4; and the same plain."""
    tensors: Tensors = {}
    experts: dict[str, dict[int, Tensors]] = {}
    for name, weight in load_file(saved / "model.safetensors").items():
        found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)_proj\.weight", name)
        if found:
            experts.setdefault(found[1], {}).setdefault(int(found[2]), {})[found[3]] = weight
        else:
            tensors[name] = weight
    weights, taken = dict(tensors), []
    for layer, each in experts.items():
        both = [torch.cat((each[number]["gate"], each[number]["up"])) for number in range(len(each))]
        downs = [each[number]["down"] for number in range(len(each))]
        for name, parts in ((f"{layer}.gate_up_proj", both), (f"{layer}.down_proj", downs)):
            own, weights[name] = mxfp4(name, torch.stack(parts))
            tensors |= own
            taken.append(name)
    for place, content in (("plain", weights), ("quantized", tensors)):
        shutil.copytree(saved, folder / place)
        save_file(content, folder / place / "model.safetensors")
    form = Format("mxfp4", {"quant_method": "mxfp4"}, mxfp4)
    config = json.loads((saved / "config.json").read_text()) | {"quantization_config": dict(form.config)}
    (folder / "quantized" / "config.json").write_text(json.dumps(config))
    return Pair(folder / "quantized", folder / "plain", form, weights, tuple(taken))


def rounded(x: torch.Tensor, codes: str, group: int) -> torch.Tensor:
    """x [..., K] rounded to int8 or float8, token by token and group by group; computed without 8-bit dtypes."""
    width = group if 0 < group < x.shape[-1] else x.shape[-1]
    parts = x.float().reshape(*x.shape[:-1], -1, width)
    most = parts.abs().amax(-1, keepdim=True)
    scale = most / (127 if codes == "int8" else 448)
    ratio = torch.where(most > 0, parts / torch.where(most > 0, scale, 1), 0).double()
    if codes == "int8":
        whole = ratio.round()
    else:
        step = 2.0 ** ((torch.frexp(ratio.abs()).exponent - 1).clamp(min=-6) - 3).double()
        whole = step * (ratio / step).round()
    return (whole.float() * scale).reshape(x.shape)


@contextmanager
def rounded_inputs(model: torch.nn.Module, rounding: tuple[str, int] | None) -> Iterator[None]:
    """While it lasts, products with the projections of a transformers model round their inputs."""
    linear = torch.nn.functional.linear
    # Told by their memory: all experts lie in one tensor, of which parts are taken. kv_b is no linear layer of ours.
    taken = {
        parameter.untyped_storage().data_ptr()
        for name, parameter in model.named_parameters()
        if "_proj" in name and "kv_b_proj" not in name and parameter.ndim > 1
    }

    def rounding_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if rounding is not None and weight.untyped_storage().data_ptr() in taken:
            x = rounded(x, *rounding)
        return linear(x, weight, bias)

    with mock.patch.object(torch.nn.functional, "linear", rounding_linear):
        yield


def _compressed(
    form: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **more,
    }


_F8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
_I8 = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
_I4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP, "dynamic": False}
_TOKEN_F8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
_TOKEN_I8 = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
_GPTQ = {"quant_method": "gptq", "group_size": GROUP, "sym": True, "desc_act": False, "checkpoint_format": "gptq"}
_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [GROUP, GROUP]}

FORMATS: Mapping[str, Format] = {
    form.name: form
    for form in (
        Format("fp8-block", _BLOCKS, float8_blocks("weight_scale_inv"), ("float8", GROUP)),
        Format("fp8-block-e8m0", _BLOCKS, float8_blocks("weight_scale_inv", torch.float8_e8m0fnu), ("float8", GROUP)),
        Format(
            "fp8-static",
            {"quant_method": "fp8", "activation_scheme": "static"},
            float8_tensor(input_scale=0.1, k_scale=1.0),
            ("float8", 0),
        ),
        Format("fbgemm-fp8", {"quant_method": "fbgemm_fp8"}, float8_rows, ("float8", 0)),
        Format(
            "modelopt-fp8",
            {"quant_method": "modelopt", "quant_algo": "FP8"},
            float8_tensor((1,), input_scale=0.1),
            ("float8", 0),
        ),
        Format(
            "ct-fp8-tensor",
            _compressed(
                "float-quantized",
                _F8 | {"strategy": "tensor"},
                _TOKEN_F8 | {"dynamic": False, "strategy": "tensor"},
                kv_cache_scheme=_F8,
            ),
            float8_tensor((1,), input_scale=0.1),
            ("float8", 0),
            beside={"model.layers.0.self_attn.k_scale": torch.ones(1)},
        ),
        Format(
            "ct-fp8-channel",
            _compressed("float-quantized", _F8 | {"strategy": "channel"}, _TOKEN_F8),
            float8_rows,
            ("float8", 0),
        ),
        Format(
            "ct-fp8-block",
            _compressed(
                "float-quantized",
                _F8 | {"strategy": "block", "block_structure": [GROUP, GROUP]},
                _TOKEN_F8 | {"strategy": "group", "group_size": GROUP},
            ),
            float8_blocks("weight_scale"),
            ("float8", GROUP),
        ),
        Format("ct-fp8-weights", _compressed("naive-quantized", _F8 | {"strategy": "channel"}), float8_rows),
        Format(
            "ct-int8-channel",
            _compressed("int-quantized", _I8 | {"strategy": "channel"}, _TOKEN_I8),
            integers8(True, True),
            ("int8", 0),
        ),
        Format(
            "ct-int8-tensor",
            _compressed("int-quantized", _I8 | {"strategy": "tensor"}, _TOKEN_I8),
            integers8(True, False),
            ("int8", 0),
        ),
        Format(
            "ct-int8-zeros",
            _compressed("int-quantized", _I8 | {"strategy": "channel", "symmetric": False}, _TOKEN_I8),
            integers8(False, True),
            ("int8", 0),
        ),
        Format(
            "ct-int8-uneven-inputs",
            _compressed("int-quantized", _I8 | {"strategy": "channel"}, _TOKEN_I8 | {"symmetric": False}),
            integers8(True, True),
        ),
        Format("ct-int4", _compressed("pack-quantized", _I4), packed(4, GROUP, True)),
        Format("ct-int4-zeros", _compressed("pack-quantized", _I4 | {"symmetric": False}), packed(4, GROUP, False)),
        Format(
            "ct-int4-loose-zeros",
            _compressed("pack-quantized", _I4 | {"symmetric": False}),
            packed(4, GROUP, False, loose_zeros=True),
        ),
        Format(
            "ct-int4-channel",
            _compressed("pack-quantized", _I4 | {"strategy": "channel", "group_size": None}),
            packed(4, -1, True),
        ),
        Format(
            "ct-int4-sorted",
            _compressed("pack-quantized", _I4 | {"symmetric": False, "actorder": "group"}),
            packed(4, GROUP, False, order=True),
            plain=True,
        ),
        Format("ct-int8-packed", _compressed("pack-quantized", _I4 | {"num_bits": 8}), packed(8, GROUP, True)),
        Format(
            "ct-int8-packed-zeros",
            _compressed("pack-quantized", _I4 | {"num_bits": 8, "symmetric": False}),
            packed(8, GROUP, False),
        ),
        Format("gptq4", _GPTQ | {"bits": 4}, gptq(4, GROUP, True)),
        Format("gptq4-row", _GPTQ | {"bits": 4, "group_size": -1}, gptq(4, -1, True, index=False)),
        Format("gptq4-zeros", _GPTQ | {"bits": 4, "sym": False}, gptq(4, GROUP, False)),
        Format(
            "gptq4-zeros-v2",
            _GPTQ | {"bits": 4, "sym": False, "checkpoint_format": "gptq_v2"},
            gptq(4, GROUP, False, version=2),
        ),
        Format("gptq4-sorted", _GPTQ | {"bits": 4, "desc_act": True}, gptq(4, GROUP, True, order=True), plain=True),
        Format("gptq8", _GPTQ | {"bits": 8}, gptq(8, GROUP, True)),
        Format("gptq8-zeros", _GPTQ | {"bits": 8, "sym": False}, gptq(8, GROUP, False)),
        Format(
            "awq",
            {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "GEMM"},
            awq,
        ),
    )
}
