"""No kernel is compiled while requests wait: whatever a crowd launches was launched before serving began."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hardpoint_torch_gpu import graphs, plan
from served import Variants, crowd, noting, start

from hardpoint.request.sampling import SamplingParams

sys.path.extend(str(Path(__file__).parents[1] / place) for place in ("models/quantized", "cases"))

from formats import FORMATS, write_pair
from tiny_gguf import add_sizes, finish, gguf_name
from tiny_models import llama_config, random_weights, save_llama

pytestmark = [
    pytest.mark.reference,
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter, on the host"),
]

CONTEXT = 768


@triton.jit(do_not_specialize=["rows"])
def _sum(x_ptr, size, rows, BLOCK: tl.constexpr):
    """Never run."""


def config(**changes: Any) -> dict[str, Any]:
    """Numbers of heads and of rows that are odd: pointers behind a row of them are uneven."""
    return llama_config(
        max_position_embeddings=CONTEXT, num_attention_heads=9, num_key_value_heads=3, head_dim=32, hidden_size=96,
        vocab_size=2501, **changes,
    )  # fmt: skip


def plain(folder: Path) -> Path:
    made = config()
    return save_llama(folder, made, random_weights(made))


def gptq(folder: Path) -> Path:
    """Layers of 4 bits, a plain vocabulary."""
    return write_pair(plain(folder / "saved"), folder, FORMATS["gptq4"]).folder


def fp8(folder: Path) -> Path:
    """Layers of 8-bit floats, whose norms and activations round for the next product."""
    return write_pair(plain(folder / "saved"), folder, FORMATS["fp8-block"]).folder


def q4_1(folder: Path) -> Path:
    """All of 4 bits with offsets, one quantized table for embedding and logits, as in small models' GGUF files."""
    made = config(tie_word_embeddings=True)
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama")
    add_sizes(writer, made)
    writer.add_key_length(made["head_dim"])
    writer.add_value_length(made["head_dim"])
    for name, weight in random_weights(made).items():
        target = gguf_name(name)
        if weight.ndim == 1:
            writer.add_tensor(target, weight.numpy())
        else:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(target, gguf.quants.quantize(np.ascontiguousarray(weight.numpy()), kind), raw_dtype=kind)
    finish(writer)
    return folder / "m.gguf"


def experts(folder: Path) -> Path:
    """So many experts that steps of 513, 1024 and 2048 tokens have tiles of their own; products of 4 bits."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    made = Qwen3MoeConfig(
        vocab_size=2501, hidden_size=96, intermediate_size=96, num_hidden_layers=2, num_attention_heads=9,
        num_key_value_heads=3, head_dim=32, max_position_embeddings=CONTEXT, moe_intermediate_size=32, num_experts=128,
        num_experts_per_tok=8,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(made).save_pretrained(folder / "saved")
    return write_pair(folder / "saved", folder, FORMATS["gptq4"]).folder


def asked(chance: random.Random, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=chance.randint(1, 24), ignore_eos=True, **more)


def greedy(chance: random.Random) -> SamplingParams:
    return asked(chance, temperature=0.0)


def drawn(chance: random.Random) -> SamplingParams:
    """Some greedily, some with filters."""
    top_k, top_p = chance.choice(((0, 1.0), (40, 1.0), (0, 0.9), (20, 0.95)))
    return asked(chance, temperature=chance.choice((0.0, 0.8)), top_k=top_k, top_p=top_p)


def of_all_kinds(chance: random.Random) -> SamplingParams:
    """Some with what no recorded step draws."""
    others: tuple[dict[str, Any], ...] = (
        {}, {}, {}, {"logprobs": chance.randint(0, 20)}, {"prompt_logprobs": chance.randint(0, 20)},
        {"presence_penalty": 0.5}, {"repetition_penalty": 1.2, "logprobs": 2}, {"logit_bias": {5: 1.0}},
        {"allowed_token_ids": (3, 4, 5)}, {"min_tokens": 1, "stop_token_ids": (7,)},
    )  # fmt: skip
    return asked(chance, temperature=chance.choice((0.0, 0.8)), **chance.choice(others))


@pytest.mark.parametrize("record", ["first", "all"])
@pytest.mark.parametrize("model", [q4_1, plain, gptq, experts, fp8])
def test_a_crowd_launches_nothing_new(model: Callable[[Path], Path], record: str, tmp_path: Path) -> None:
    variants = Variants()
    with noting(variants):
        engine, device = start(model(tmp_path), variants, record, 200)
        assert variants.serving
        before = variants.launches
        crowds = [crowd(engine, 120, seed, draws) for seed, draws in enumerate((greedy, drawn, of_all_kinds))]
    assert all(ended > 80 for ended in crowds)
    assert variants.launches > before
    assert device.builder is not None
    assert device.builder.captured["decode"] > 2
    assert not variants.late, "\n".join(variants.late)


@pytest.mark.parametrize("record", ["first", "all"])
def test_a_crowd_with_one_system_prompt_launches_nothing_new(
    record: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its decodes share pages, in graphs of their own and beside prompts."""
    monkeypatch.setattr(plan, "WORTH", 0)
    monkeypatch.setattr(graphs, "WANTED", 1.0)  # however slow the machine: recording need not rest
    variants = Variants()
    with noting(variants):
        engine, device = start(plain(tmp_path), variants, record, 40)
        ready = "".join(variants.ready)
        crowds = [crowd(engine, 60, seed, draws, 300) for seed, draws in enumerate((greedy, drawn, of_all_kinds))]
    assert "_shared(" in ready
    assert all(ended > 40 for ended in crowds)
    assert device.builder is not None
    assert device.builder.captured["shared"] > 0
    assert not variants.late, "\n".join(variants.late)


def test_what_the_compiler_tells_apart_is_noted(tmp_path: Path) -> None:
    """Else nothing above would be found: pointers and integers by alignment, 1 by itself, constants, options."""
    variants = Variants()
    x = torch.zeros(64)
    with noting(variants):
        for size, block, warps in ((32, 16, 1), (48, 16, 1), (33, 16, 1), (1, 16, 1), (33, 32, 1), (33, 32, 2)):
            _sum[(1,)](x, size, size, BLOCK=block, num_warps=warps)
        variants.watch()
        _sum[(1,)](x, 64, 35, BLOCK=16, num_warps=1)
        _sum[(1,)](x[1:], 64, 35, BLOCK=16, num_warps=1)
        _sum[(1,)](x.double(), 64, 35, BLOCK=16, num_warps=1)
    assert len(variants.ready) == 5
    assert [variant.partition(",")[0] for variant in variants.late] == [
        "_sum(x_ptr=*float32 uneven", "_sum(x_ptr=*float64",
    ]  # fmt: skip
