"""Checkpoints of every format: each weight equals what was written, and the model's logits are transformers' own.

The oracle runs on the plain weights that the format stands for; where a format rounds the inputs of its products, so
does the oracle.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from formats import FORMATS, Pair, write_fused
from writers import GROUP

from hardpoint_platforms.quant import Codes, Packing, QuantTensor

pytestmark = pytest.mark.reference


def _logits(pair: Pair, opened: Any, serve: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Of the whole sequence: all but the last eight tokens in one step, then one by one."""
    checkpoint = opened(pair.folder)
    served = serve(pair.folder, config=checkpoint.config, source=checkpoint.weights)
    assert served.book.unused() == []
    sequence = served.sequence(tokens)
    served.step([(sequence, len(tokens) - 8)])
    for _ in range(8):
        served.step([(sequence, 1)])
    return torch.cat(sequence.logits)


def _check(found: torch.Tensor, wanted: torch.Tensor, unrounded: torch.Tensor | None) -> None:
    """Equal to the oracle; where inputs are rounded, much nearer to it than to the oracle that does not round."""
    error = float((found - wanted).norm() / wanted.norm())
    if unrounded is None:
        assert error < 1e-5
        return
    # a sum that ends in another bit may round one number the other way
    effect = float((unrounded - wanted).norm() / wanted.norm())
    assert effect > 2e-3
    assert error < effect / 4


@pytest.mark.parametrize("name", FORMATS)
def test_weights_equal_what_was_written(name: str, write: Any, opened: Any) -> None:
    pair = write("llama", FORMATS[name])
    source = opened(pair.folder).weights
    assert set(source.names()) == set(pair.weights)
    for weight, wanted in pair.weights.items():
        assert weight in source
        spec, loaded = source.spec(weight), source.load(weight)
        assert spec.shape == wanted.shape
        assert source.require(weight, tuple(wanted.shape)) == spec
        plain = weight not in pair.taken or pair.form.plain
        assert isinstance(loaded, QuantTensor) is not plain
        assert (spec.scheme is None) is plain
        if isinstance(loaded, QuantTensor):
            assert loaded.scheme == spec.scheme
            assert loaded.shape == spec.shape
            assert loaded.nbytes < wanted.numel() * (1 if spec.scheme.packing is Packing.UINT4 else 2)
            loaded = loaded.dequantize()
        assert torch.equal(loaded, wanted), weight


@pytest.mark.parametrize("name", FORMATS)
def test_logits_equal_transformers(
    name: str, write: Any, opened: Any, serve: Any, oracle: Any, prompts: list[torch.Tensor]
) -> None:
    pair, tokens = write("llama", FORMATS[name]), prompts[0]
    found, wanted = _logits(pair, opened, serve, tokens), oracle(pair, tokens)
    rounds = pair.form.rounding is not None
    _check(found, wanted, oracle(pair, tokens, round_inputs=False) if rounds else None)
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))


#: Models that keep q, k, v, gate and up as one; experts one by one; projections whose rows end within a block.
OTHERS: dict[str, tuple[str, ...]] = {
    "phi3": ("fp8-block", "gptq4-zeros", "fp8-static"),
    "qwen3": ("fp8-block", "ct-fp8-block", "awq"),
    "qwen3_moe": ("gptq4", "awq", "ct-int4-zeros", "fp8-block", "ct-int8-channel", "fp8-static", "gptq4-sorted"),
    "deepseek_v2": ("fp8-block",),
    "gemma3_text": ("ct-int4",),
}


@pytest.mark.parametrize(("model", "name"), [(model, name) for model, names in OTHERS.items() for name in names])
def test_other_families(
    model: str, name: str, write: Any, opened: Any, serve: Any, oracle: Any, prompts: list[torch.Tensor]
) -> None:
    sizes = {"v_head_dim": 16} if model == "deepseek_v2" else {}  # groups divide what heads give
    pair, tokens = write(model, FORMATS[name], **sizes), prompts[1]
    found, wanted = _logits(pair, opened, serve, tokens), oracle(pair, tokens)
    rounds = pair.form.rounding is not None
    _check(found, wanted, oracle(pair, tokens, round_inputs=False) if rounds else None)


@pytest.mark.parametrize("name", ["fp8-block", "gptq4", "ct-int4-zeros"])
def test_shards_and_tied_embeddings(
    name: str, write: Any, opened: Any, serve: Any, oracle: Any, prompts: list[torch.Tensor]
) -> None:
    """Tensors of one weight lie in several files."""
    pair, tokens = write("llama", FORMATS[name], shard="three", tie_word_embeddings=True), prompts[0]
    assert len(list(pair.folder.glob("*.safetensors"))) == 3
    found, wanted = _logits(pair, opened, serve, tokens), oracle(pair, tokens)
    _check(found, wanted, oracle(pair, tokens, round_inputs=False) if pair.form.rounding else None)


def test_experts_in_one_tensor_of_mxfp4(make_model: Any, tmp_path: Any, opened: Any, serve: Any, prompts: Any) -> None:
    """Codes and scales of all experts of a layer, as gpt-oss keeps them; the rest of the model is plain."""
    pair = write_fused(make_model("qwen3_moe")[1], tmp_path)
    source = opened(pair.folder).weights
    assert set(source.names()) == set(pair.weights)
    for name in pair.taken:
        loaded = source.load(name)
        assert loaded.scheme == source.spec(name).scheme
        assert (loaded.scheme.group, loaded.scheme.codebook) == (32, True)
        assert torch.equal(loaded.dequantize(), pair.weights[name])
    tokens = prompts[0]
    found = _logits(pair, opened, serve, tokens)
    plain = serve(pair.plain)
    sequence = plain.sequence(tokens)
    (wanted,) = plain.step([(sequence, len(tokens))])
    _check(found, wanted, None)


def test_mxfp4_equals_what_transformers_makes_of_it(make_model: Any, tmp_path: Any, opened: Any) -> None:
    from safetensors.torch import load_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    pair = write_fused(make_model("qwen3_moe")[1], tmp_path)
    tensors, source = load_file(pair.folder / "model.safetensors"), opened(pair.folder).weights
    for name in pair.taken:
        theirs = convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"], dtype=torch.float32)
        assert torch.equal(source.load(name).dequantize(), theirs.transpose(1, 2))


def test_scales_of_mxfp4_at_both_ends(opened: Any, make_model: Any, tmp_path: Any, copy: Any) -> None:
    pair = write_fused(make_model("qwen3_moe")[1], tmp_path)
    name = pair.taken[0]

    def extreme(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        tensors[f"{name}_blocks"] = torch.full_like(tensors[f"{name}_blocks"], 0x22)  # 1.0
        scales = torch.full_like(tensors[f"{name}_scales"], 127)
        scales[0, 0, 0], scales[0, 1, 0] = 0, 254
        tensors[f"{name}_scales"] = scales

    found = opened(copy(pair.folder, extreme)).weights.load(name).dequantize()
    assert found[0, 0, 0] == 2.0**-127
    assert found[0, 1, 0] == 2.0**127
    assert found[0, 2, 0] == 1.0


def test_schemes_say_what_the_files_hold(write: Any, opened: Any) -> None:
    name = "model.layers.0.mlp.down_proj.weight"  # [64, 96]
    schemes = {form: opened(write("llama", FORMATS[form]).folder).weights.spec(name).scheme for form in FORMATS}
    block = schemes["fp8-block"]
    assert (block.packing, block.group, block.group_rows) == (Packing.FLOAT8, GROUP, GROUP)
    assert (block.rounding.codes, block.rounding.group) == (Codes.FLOAT8, GROUP)
    assert schemes["ct-fp8-block"] == block
    assert (schemes["fp8-static"].group, schemes["fp8-static"].group_rows) == (96, 1)
    assert schemes["fp8-static"].rounding.group == 0
    assert schemes["ct-fp8-weights"].rounding is None
    assert schemes["ct-int8-channel"].rounding.codes is Codes.INT8
    assert schemes["ct-int8-uneven-inputs"].rounding is None
    assert (schemes["gptq4"].packing, schemes["gptq4"].group, schemes["gptq4"].offset) == (Packing.UINT4, GROUP, True)
    assert (schemes["gptq8"].packing, schemes["gptq8"].offset) == (Packing.INT8, False)
    assert schemes["gptq4-row"].group == 96


def test_scales_that_are_not_used_are_told(write: Any, opened: Any, caplog: Any) -> None:
    with caplog.at_level("INFO"):
        opened(write("llama", FORMATS["ct-fp8-tensor"]).folder)
    assert "input_scale" in caplog.text or "k_scale" in caplog.text
    assert "kv_cache_scheme" in caplog.text


@pytest.mark.parametrize("order", [torch.zeros(96, dtype=torch.int32), torch.full((96,), -1), torch.zeros(0)])
def test_an_order_that_was_never_filled_in_is_none(order: torch.Tensor, write: Any, opened: Any, copy: Any) -> None:
    pair, name = write("llama", FORMATS["gptq4"]), "model.layers.0.mlp.down_proj"
    folder = copy(pair.folder, lambda tensors, config: tensors.update({f"{name}.g_idx": order.to(torch.int32)}))
    assert torch.equal(opened(folder).weights.load(f"{name}.weight").dequantize(), pair.weights[f"{name}.weight"])


def test_dynamic_rules_of_gptq(write: Any, opened: Any, copy: Any) -> None:
    """One module is of 8 bits, another one plain; the config says so by patterns."""
    pair, eight = write("llama", FORMATS["gptq4"]), write("llama", FORMATS["gptq8"])
    wide, bare = "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"

    def mix(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        from safetensors.torch import load_file

        for end in ("qweight", "qzeros", "scales", "g_idx"):
            tensors[f"{wide}.{end}"] = load_file(eight.folder / "model.safetensors")[f"{wide}.{end}"]
            del tensors[f"{bare}.{end}"]
        tensors[f"{bare}.weight"] = torch.ones(64, 96)
        rules = {r"+:.*\.0\.mlp\.down_proj": {"bits": 8}, r"-:.*\.1\.mlp\.down_proj": {}}
        config["quantization_config"]["dynamic"] = rules

    source = opened(copy(pair.folder, mix)).weights
    assert torch.equal(source.load(f"{wide}.weight").dequantize(), eight.weights[f"{wide}.weight"])
    assert source.spec(f"{bare}.weight").scheme is None
