"""Quantized checkpoints that are damaged, incomplete or of a kind that is not read: an error says what and where."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from formats import FORMATS
from writers import Tensors

from hardpoint.config.engine import ModelConfig
from hardpoint.errors import ConfigError, ModelError, WeightsError
from hardpoint.weights.checkpoint import open_checkpoint
from hardpoint.weights.quantized.registry import METHODS

pytestmark = pytest.mark.reference

DOWN = "model.layers.1.mlp.down_proj"  # [64, 96]
Change = Callable[[Tensors, dict[str, Any]], None]


def _without(*names: str) -> Change:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        for name in names:
            del tensors[f"{DOWN}.{name}"]

    return change


def _with(name: str, tensor: torch.Tensor) -> Change:
    return lambda tensors, config: tensors.update({f"{DOWN}.{name}": tensor})


def _says(**changes: Any) -> Change:
    return lambda tensors, config: config["quantization_config"].update(changes)


def _group_says(**changes: Any) -> Change:
    return lambda tensors, config: config["quantization_config"]["config_groups"]["group_0"].update(changes)


def _weights_say(**changes: Any) -> Change:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        config["quantization_config"]["config_groups"]["group_0"]["weights"].update(changes)

    return change


_F8 = torch.float8_e4m3fn
#: format, damage, what the error says; every one names file and tensor
DAMAGED: list[tuple[str, Change, str]] = [
    ("fp8-block", _without("weight_scale_inv"), "float8_e4m3fn, but its scales are missing"),
    ("fp8-block", _without("weight"), "values are missing; there is only .*weight_scale_inv"),
    ("fp8-block", _with("weight_scale_inv", torch.ones(2, 2)), r"shape \[2, 2\], must have \[2, 3\]"),
    ("fp8-block", _with("weight_scale_inv", torch.ones(0, 3)), r"shape \[0, 3\], must have \[2, 3\]"),
    ("fp8-block", _with("weight_scale_inv", torch.ones(2, 3, dtype=torch.int32)), "scales are int32, must be float32"),
    ("fp8-block", _with("weight", torch.ones(64, 96)), "values are float32, must be float8_e4m3fn"),
    ("fp8-block", _with("weight", torch.ones(64, 96).to(torch.float8_e5m2)), "float8_e5m2, must be float8_e4m3fn"),
    ("fp8-block", _with("weight", torch.ones(96, 64).to(_F8)), "must have"),
    ("fp8-block", _with("weight", torch.ones(96).to(_F8)), r"shape \[96\], must have 2 or 3 axes"),
    ("fp8-block", _says(weight_block_size=[32, 40]), "columns do not divide into groups of 40"),
    ("fp8-static", _with("weight_scale", torch.ones(0)), r"scales have shape \[0\]"),
    ("fp8-static", _with("weight_scale", torch.ones(3)), r"scales have shape \[3\]"),
    ("ct-int8-channel", _without("weight_scale"), "int8, but its scales are missing"),
    ("ct-int8-channel", _with("weight", torch.ones(64, 96)), "values are float32, must be int8"),
    ("ct-int8-zeros", _without("weight_zero_point"), "zeros are missing"),
    ("ct-int8-zeros", _with("weight_zero_point", torch.zeros(63, 1, dtype=torch.int8)), r"zeros have shape \[63, 1\]"),
    ("ct-int4", _without("weight_packed"), "values are missing; there is only"),
    ("ct-int4", _without("weight_shape"), "sides are missing"),
    ("ct-int4", _with("weight_shape", torch.tensor([64, 97])), r"shape is \[64, 97\], which \[64, 12\] words"),
    ("ct-int4", _with("weight_shape", torch.tensor([64])), r"sides have shape \[1\]"),
    ("ct-int4", _with("weight", torch.ones(64, 96)), "is there plain, and quantized as"),
    ("ct-int4", _with("weight_packed", torch.ones(64, 12)), "packed are float32, must be int32"),
    ("ct-int4", _weights_say(num_bits=3), "integers of 3 bits are not read"),
    ("ct-int4", _weights_say(group_size=40), "64 columns do not divide into groups of 40"),
    ("ct-int4", _group_says(targets=["re:.*q_proj"]), "no group of 'quantization_config' has it as a target"),
    ("ct-int4-zeros", _with("weight_zero_point", torch.zeros(9, 3, dtype=torch.int32)), r"zeros have shape \[9, 3\]"),
    ("ct-int4-sorted", _with("weight_g_idx", torch.full((96,), 3, dtype=torch.int32)), r"groups outside 0\.\.2"),
    ("gptq4", _without("scales"), "scales are missing; there is only .*qweight"),
    ("gptq4", _without("qweight"), "values are missing"),
    ("gptq4", _with("scales", torch.ones(2, 64)), r"shape \[2, 64\], must have \[3, 64\]"),
    ("gptq4", _with("qweight", torch.ones(12, 64)), "values are float32, must be int32"),
    ("gptq4", _with("g_idx", torch.arange(95)), r"order have shape \[95\], must have \[96\]"),
    ("gptq4", _with("g_idx", torch.full((96,), 3, dtype=torch.int32)), r"groups outside 0\.\.2"),
    ("gptq4", _says(group_size=40), "64 columns do not divide into groups of 40"),
    ("gptq4-zeros", _without("qzeros"), "zeros are missing"),
    ("gptq4-zeros", _with("qzeros", torch.zeros(3, 7, dtype=torch.int32)), r"zeros have shape \[3, 7\]"),
    ("awq", _without("qzeros"), "zeros are missing"),
    ("awq", _with("qzeros", torch.zeros(3, 7, dtype=torch.int32)), r"must have \[3, 8\]"),
    ("awq", _with("qweight", torch.zeros(95, 8, dtype=torch.int32)), "95 columns do not divide into groups of 32"),
    ("awq", _with("weight", torch.ones(64, 96)), "is there plain, and quantized as"),
]


@pytest.mark.parametrize("number", range(len(DAMAGED)))
def test_damage_is_told_before_anything_is_loaded(number: int, write: Any, copy: Any, opened: Any, serve: Any) -> None:
    form, change, wanted = DAMAGED[number]
    folder = copy(write("llama", FORMATS[form]).folder, change)
    with pytest.raises(WeightsError, match=wanted) as caught:
        _start(folder, opened, serve)
    assert "model.safetensors" in str(caught.value)
    assert "proj" in str(caught.value)
    assert caught.value.hint


def _start(folder: Path, opened: Any, serve: Any) -> None:
    checkpoint = opened(folder)
    serve(folder, config=checkpoint.config, source=checkpoint.weights)


#: format, change of the config, what the error says
UNREAD: list[tuple[str, Change, str]] = [
    ("gptq4", _says(quant_method="mystery"), "'mystery'; read are fp8, fbgemm_fp8, compressed-tensors, gptq, awq"),
    ("gptq4", _says(quant_method=None), "quant_method is None"),
    ("gptq4", lambda tensors, config: config.update(quantization_config=[1]), "quant_method is None"),
    ("gptq4", _says(bits=3), "bits is 3; read are 4 and 8"),
    ("gptq4", _says(bits="4"), "'bits' is '4', must be an integer"),
    ("gptq4", _says(checkpoint_format="marlin"), "checkpoint_format is 'marlin'"),
    ("awq", _says(version="gemv"), "version 'gemv'"),
    ("awq", _says(bits=8), "of 8 bits"),
    ("fp8-block", _says(weight_block_size=[128]), "must be two positive integers"),
    ("fp8-block", _says(activation_scheme="magic"), "activation_scheme is 'magic'"),
    ("fp8-block", _says(fmt="e5m2"), "only e4m3 is"),
    ("modelopt-fp8", _says(quant_algo="NVFP4"), "quant_algo 'NVFP4'"),
    ("ct-int4", _says(config_groups={}), "no 'config_groups'"),
    ("ct-int4", _says(format="nvfp4-pack-quantized"), "nvfp4-pack-quantized, which is not read"),
    ("ct-int4", _says(sparsity_config={"format": "sparse-24-bitmask"}), "sparse sparse-24-bitmask"),
    ("ct-int4", _says(transform_config={"config_groups": {"R1": {}}}), "rotations"),
    ("ct-int4", _group_says(weights=None), "no 'weights'"),
    ("ct-int4", _weights_say(type="float"), "'float' and 4 bits"),
    ("ct-int4", _weights_say(strategy="tensor_group"), "'tensor_group'"),
]


@pytest.mark.parametrize("number", range(len(UNREAD)))
def test_what_is_not_read_is_told_at_once(number: int, write: Any, copy: Any, opened: Any) -> None:
    form, change, wanted = UNREAD[number]
    with pytest.raises(ModelError, match=wanted):
        opened(copy(write("llama", FORMATS[form]).folder, change))


def test_every_method_is_named(write: Any, copy: Any, opened: Any) -> None:
    folder = copy(write("llama", FORMATS["awq"]).folder, _says(quant_method="mystery"))
    with pytest.raises(ModelError) as caught:
        opened(folder)
    assert all(method in str(caught.value) for method in METHODS)


def test_integers_without_a_config_are_no_weights(write: Any, copy: Any, opened: Any, serve: Any) -> None:
    """The key taken out: what is left of an int8 checkpoint must not be taken for weights."""
    folder = copy(
        write("llama", FORMATS["ct-int8-channel"]).folder, lambda t, config: config.pop("quantization_config")
    )
    with pytest.raises(WeightsError, match=r"int8 cannot hold plain weights\n.*quantization_config"):
        _start(folder, opened, serve)


def test_modelopt_keeps_its_config_in_a_file_of_its_own(write: Any, copy: Any, opened: Any) -> None:
    pair = write("llama", FORMATS["modelopt-fp8"])
    folder = copy(pair.folder, lambda tensors, config: config.pop("quantization_config"))
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(own))
    source = opened(folder).weights
    assert torch.equal(source.load(f"{DOWN}.weight").dequantize(), pair.weights[f"{DOWN}.weight"])


def test_older_and_nested_keys(write: Any, copy: Any, opened: Any) -> None:
    def older(tensors: Tensors, config: dict[str, Any]) -> None:
        config["compression_config"] = config.pop("quantization_config")

    pair = write("llama", FORMATS["ct-int4"])
    source = opened(copy(pair.folder, older)).weights
    assert torch.equal(source.load(f"{DOWN}.weight").dequantize(), pair.weights[f"{DOWN}.weight"])


def test_dummy_weights_do_not_pass_for_quantized_ones(write: Any) -> None:
    folder: Path = write("llama", FORMATS["gptq4"]).folder
    with pytest.raises(ConfigError, match="dummy"):
        open_checkpoint(ModelConfig(str(folder), load_format="dummy"))
    plain = open_checkpoint(ModelConfig(str(folder), load_format="dummy", overrides={"quantization_config": None}))
    assert plain.format == "dummy"
