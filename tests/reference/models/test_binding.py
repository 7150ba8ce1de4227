"""How a model's ops are bound: fused where weights are alike, blocks claimed or decomposed, quantized weights kept."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hardpoint.layers.op import Part, join_rows, stack
from hardpoint.models.pieces import Pieces
from hardpoint.weights.dummy import DummySource
from hardpoint.weights.safetensors import SafetensorsSource
from hardpoint.weights.source import WeightSource
from hardpoint_platforms.binding import DECOMPOSED
from hardpoint_platforms.choices import KernelChoice
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Weight, WeightSpec
from hardpoint_platforms.ops.provider import OpProvider
from hardpoint_platforms.quant import Packing, QuantScheme, QuantTensor, pack_uint4
from hardpoint_platforms.reference.providers import ReferenceProvider, reference_blocks

pytestmark = pytest.mark.reference

INT8 = QuantScheme("int8", Packing.INT8, bits=8, group=8)
UINT4 = QuantScheme("uint4", Packing.UINT4, bits=4, group=8, offset=True)


def quantize(weight: torch.Tensor, scheme: QuantScheme) -> QuantTensor:
    """Round to the nearest code, group by group."""
    groups = weight.unflatten(-1, (-1, scheme.group))
    if scheme is INT8:
        scales = groups.abs().amax(-1) / 127
        codes = (groups / scales[..., None]).round().clamp(-127, 127).to(torch.int8)
        return QuantTensor(scheme, tuple(weight.shape), codes.flatten(-2), scales)
    low, high = groups.amin(-1), groups.amax(-1)
    scales = (high - low) / 15
    codes = ((groups - low[..., None]) / scales[..., None]).round().clamp(0, 15)
    return QuantTensor(scheme, tuple(weight.shape), pack_uint4(codes.flatten(-2)), scales, low)


class Quantized(WeightSource):
    """A checkpoint whose projections are quantized: `scheme_of` a name, None to leave it plain."""

    def __init__(self, inner: WeightSource, scheme_of: Any, keep: bool) -> None:
        self._inner, self._scheme_of, self._keep = inner, scheme_of, keep

    def names(self) -> Any:
        return self._inner.names()

    def _scheme(self, name: str) -> QuantScheme | None:
        return self._scheme_of(name) if name.endswith("_proj.weight") else None

    def spec(self, name: str) -> WeightSpec:
        return replace(self._inner.spec(name), scheme=self._scheme(name) if self._keep else None)

    def load(self, name: str) -> Any:
        weight, scheme = self._inner.load(name), self._scheme(name)
        if scheme is None:
            return weight
        quantized = quantize(weight, scheme)
        return quantized if self._keep else quantized.dequantize()

    def describe(self, name: str) -> str:
        return self._inner.describe(name)


def _logits(served: Any, tokens: torch.Tensor) -> torch.Tensor:
    sequence = served.sequence(tokens)
    served.step([(sequence, len(tokens) - 2)])
    served.step([(sequence, 2)])
    return torch.cat(sequence.logits)


def _wheres(served: Any, op: str) -> list[str]:
    return [binding.instance.where for binding in served.ops.bindings if binding.instance.op == op]


@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3_moe", "deepseek_v2"])
@pytest.mark.parametrize("mixed", [False, True])
def test_quantized_weights_stay_quantized(family: str, mixed: bool, make_model: Any, serve: Any, prompts: Any) -> None:
    """With one scheme q, k, v and gate, up are one tensor; with several each projection stands alone."""

    def scheme_of(name: str) -> QuantScheme:
        return UINT4 if mixed and ("v_proj" in name or "up_proj" in name or "kv_a" in name) else INT8

    _, folder = make_model(family)
    kept = serve(folder, source=Quantized(SafetensorsSource(folder), scheme_of, keep=True))
    plain = serve(folder, source=Quantized(SafetensorsSource(folder), scheme_of, keep=False))
    schemes = {w.scheme for b in kept.ops.bindings if b.instance.op == "linear" for w in b.instance.weights.values()}
    assert schemes - {None} == ({INT8, UINT4} if mixed else {INT8})
    got, wanted = _logits(kept, prompts[0]), _logits(plain, prompts[0])
    assert (got - wanted).abs().max() < 1e-4 * max(1.0, wanted.abs().max().item())


def test_alike_projections_are_one_linear(make_model: Any, serve: Any) -> None:
    _, folder = make_model("llama")
    wheres = _wheres(serve(folder), "linear")
    names = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert wheres[:4] == [f"layers.0.{name}" for name in names]
    assert len(wheres) == 4 * 3


def test_a_bias_on_some_projections_keeps_them_apart(make_model: Any, serve: Any, prompts: Any) -> None:
    model, folder = make_model("llama")
    path = folder / "model.safetensors"
    bias = {f"model.layers.{i}.self_attn.q_proj.bias": torch.zeros(64) for i in range(3)}
    save_file({**load_file(path), **bias}, path)
    config = json.loads((folder / "config.json").read_text())
    del config["attention_bias"]
    served = serve(folder, config=config)
    assert "layers.0.self_attn.k_proj" in _wheres(served, "linear")
    with torch.no_grad():
        wanted = model(input_ids=prompts[0][None], use_cache=False).logits[0]
    assert (_logits(served, prompts[0]) - wanted).abs().max() < 1e-3


@pytest.mark.parametrize("bias", [False, True])
def test_a_claimed_block_gives_the_same_logits(bias: bool, make_model: Any, serve: Any, prompts: Any) -> None:
    _, folder = make_model("llama", mlp_bias=bias)
    block = ReferenceProvider(CONTRACTS["gated_mlp"])
    claimed, decomposed = serve(folder, own=[block]), serve(folder)
    assert "layers.0.mlp.down_proj" not in _wheres(claimed, "linear")
    assert "layers.0.mlp.down_proj" in _wheres(decomposed, "linear")
    assert (_logits(claimed, prompts[0]) - _logits(decomposed, prompts[0])).abs().max() < 1e-4


def _rotary() -> OpProvider:
    return next(block for block in reference_blocks() if block.op == "rotary_attention")


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_a_claimed_attention_block_gives_the_same_logits(
    family: str, make_model: Any, serve: Any, prompts: Any
) -> None:
    """The parts are bound where nobody claims it, in the order in which they run."""
    _, folder = make_model(family)
    claimed, decomposed = serve(folder, own=[_rotary()]), serve(folder)
    layer = "layers.0.self_attn"
    ops = [b.instance.op for b in decomposed.ops.bindings if b.instance.where.startswith((layer, "rotary"))]
    parts = ["rope", "attention"] if family == "llama" else ["norm", "norm", "rope", "attention"]
    first = ops.index("rotary_attention") + 1
    assert ops[first : first + len(parts)] == parts
    assert not {"rope", "attention"} & {b.instance.op for b in claimed.ops.bindings}
    assert f"{layer}.q_norm" not in _wheres(claimed, "norm")
    assert claimed.book.unused() == decomposed.book.unused() == []
    assert torch.equal(_logits(claimed, prompts[0]), _logits(decomposed, prompts[0]))


def test_a_block_has_one_table_for_layers_alike(make_model: Any, serve: Any) -> None:
    _, folder = make_model("qwen3")
    claimed, decomposed = serve(folder, own=[_rotary()]), serve(folder)
    assert claimed.book.weight_bytes(claimed.weights) == decomposed.book.weight_bytes(decomposed.weights)


@pytest.mark.parametrize(
    ("choice", "layers"),
    [
        (KernelChoice("attention", "*", "reference"), []),
        (KernelChoice("attention", "layers.1.*", "reference"), [0, 2]),
        (KernelChoice("rope", "*", "reference"), []),
        (KernelChoice("norm", "layers.2.self_attn.k_norm", "reference"), [0, 1]),
        (KernelChoice("norm", "layers.*.input_layernorm", "reference"), [0, 1, 2]),
        (KernelChoice("attention", "*", "whole"), [0, 1, 2]),
        (KernelChoice("rotary_attention", "layers.0.*", "nobody"), [1, 2]),
    ],
    ids=str,
)
def test_a_choice_for_a_part_holds_for_the_block(
    choice: KernelChoice, layers: list[int], make_model: Any, serve: Any
) -> None:
    """A block is claimed by providers of the chosen name alone; else the part is bound, and the choice followed."""
    _, folder = make_model("qwen3")
    block = _rotary()
    block.name = "the whole in one"
    served = serve(folder, own=[block], choices=[choice])
    claimed = [b for b in served.ops.bindings if b.provider == block.name]
    assert [b.instance.where for b in claimed] == [f"layers.{number}.self_attn" for number in layers]
    assert choice in served.ops.followed
    against = {r.reason for b in served.ops.bindings if b.instance.op == "rotary_attention" for r in b.refused}
    assert against == ({f"--kernel {choice}"} if len(layers) < 3 else set())


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "phi3", "qwen3_moe", "deepseek_v2"])
def test_a_norm_and_what_follows_as_one_op_give_the_same_logits(
    family: str, make_model: Any, serve: Any, prompts: Any
) -> None:
    _, folder = make_model(family)
    blocks = [ReferenceProvider(CONTRACTS[name]) for name in ("norm_linear", "norm_gated_mlp")]
    claimed, apart = serve(folder, own=blocks), serve(folder)
    assert (_logits(claimed, prompts[0]) - _logits(apart, prompts[0])).abs().max() < 1e-4

    def bound(served: Any, op: str) -> list[str]:
        return [b.instance.where for b in served.ops.bindings if b.instance.op == op and b.provider != DECOMPOSED]

    projections, blocks_of_mlps = bound(claimed, "norm_linear"), bound(claimed, "norm_gated_mlp")
    layers = len(apart.model._layers)
    fused = "q_kv_a_proj" if family == "deepseek_v2" else "qkv_proj"
    assert projections == [f"layers.{layer}.self_attn.{fused}" for layer in range(1, layers)]
    dense = {"qwen3_moe": [1], "deepseek_v2": [0]}.get(family, range(layers))
    assert blocks_of_mlps == [f"layers.{layer}.mlp" for layer in dense]
    # what is left to the norm alone: the last one, and those before experts
    assert len(bound(claimed, "add_norm")) == 1 + layers - len(dense)
    assert not {*projections} & {*bound(claimed, "linear")}


def test_without_such_a_device_ops_are_bound_as_ever(make_model: Any, serve: Any) -> None:
    _, folder = make_model("llama")
    bindings = [b for b in serve(folder).ops.bindings if ".1." in b.instance.where]
    assert [(b.instance.op, b.instance.where.removeprefix("layers.1.")) for b in bindings] == [
        ("norm_linear", "self_attn.qkv_proj"),
        ("add_norm", "input_layernorm"),
        ("linear", "self_attn.qkv_proj"),
        ("rotary_attention", "self_attn"),
        ("attention", "self_attn"),
        ("linear", "self_attn.o_proj"),
        ("norm_gated_mlp", "mlp"),
        ("add_norm", "post_attention_layernorm"),
        ("gated_mlp", "mlp"),
        ("gated_activation", "mlp.act_fn"),
        ("linear", "mlp.gate_up_proj"),
        ("linear", "mlp.down_proj"),
    ]
    decomposed = {b.instance.op: b.reason for b in bindings if b.provider == DECOMPOSED}
    assert decomposed["norm_linear"] == "into add_norm, linear"
    assert decomposed["norm_gated_mlp"] == "into add_norm, gated_mlp"


@pytest.mark.parametrize(
    ("op", "where", "claimed"),
    [
        ("linear", "*.qkv_proj", {"norm_gated_mlp"}),
        ("linear", "*.down_proj", {"norm_linear"}),
        ("gated_activation", "*", {"norm_linear"}),
        ("add_norm", "*.input_layernorm", {"norm_gated_mlp"}),
        ("add_norm", "*", {"gated_mlp"}),
        ("gated_mlp", "*", {"norm_linear"}),
    ],
)
def test_blocks_are_not_claimed_around_a_choice(
    op: str, where: str, claimed: set[str], make_model: Any, serve: Any
) -> None:
    _, folder = make_model("llama")
    blocks = [ReferenceProvider(CONTRACTS[name]) for name in ("gated_mlp", "norm_linear", "norm_gated_mlp")]
    for block in blocks:
        block.name = "the whole in one"
    served = serve(folder, own=blocks, choices=[KernelChoice(op, where, "reference")])
    assert {b.instance.op for b in served.ops.bindings if b.provider == "the whole in one"} == claimed


def test_each_distinct_rope_is_bound_once_and_its_table_is_float32(serve: Any) -> None:
    config = {
        "model_type": "gemma3_text",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 96,
    }
    served = serve(Path(), 32, torch.bfloat16, config=config, source=DummySource())
    assert _wheres(served, "rope") == ["rotary_emb", "rotary_emb.1"]
    tables = [slot[0] for slot in served.weights if slot[0].shape == (32, 16) and slot[0].dtype == torch.float32]
    assert len(tables) == 2


def _noted(moved: Counter[tuple[int, ...]], piece: Weight) -> Weight:
    moved[tuple(piece.shape)] += 1
    return piece


def test_rows_join_and_experts_stack_like_plain_tensors() -> None:
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(rows, 16, generator=generator) for rows in (4, 6)]
    for scheme in (INT8, UINT4):
        parts = [Part(WeightSpec(tuple(w.shape), torch.float32, scheme), partial(quantize, w, scheme)) for w in weights]
        joined = join_rows(parts)
        assert joined.spec == WeightSpec((10, 16), torch.float32, scheme)
        pair = stack([joined, joined])
        read = pair.load()
        assert isinstance(read, Pieces)
        moved = Counter[tuple[int, ...]]()
        loaded = read.join(partial(_noted, moved))
        assert moved == {(4, 16): 2, (6, 16): 2}  # each of the checkpoint's own, before any are joined
        assert isinstance(loaded, QuantTensor)
        assert loaded.shape == pair.spec.shape == (2, 10, 16)
        wanted = torch.cat([quantize(w, scheme).dequantize() for w in weights])
        assert torch.equal(loaded.dequantize(), torch.stack((wanted, wanted)))


def test_unlike_schemes_become_plain_where_they_must_lie_together() -> None:
    weight = torch.randn(4, 16, generator=torch.Generator().manual_seed(6))
    parts = [
        Part(WeightSpec((4, 16), torch.float32, scheme), partial(quantize, weight, scheme)) for scheme in (INT8, UINT4)
    ]
    joined = join_rows(parts)
    assert joined.spec.scheme is None
    read = joined.load()
    assert isinstance(read, Pieces)
    loaded = read.join()
    assert isinstance(loaded, torch.Tensor)
    assert torch.equal(loaded[:4], quantize(weight, INT8).dequantize())
