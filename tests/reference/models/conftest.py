"""Tiny random models of every family, saved by transformers and served by our decoder over a paged state.

The oracle is transformers, eager attention, one sequence at a time without a cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hardpoint.layers.shard import Shard
from hardpoint.models.base import CausalModel
from hardpoint.models.registry import build_model
from hardpoint.weights.safetensors import SafetensorsSource
from hardpoint.weights.source import Checkpoint
from hardpoint_platforms.batch import AttentionBatch
from hardpoint_platforms.binding import OpTable
from hardpoint_platforms.choices import KernelChoice
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.provider import OpProvider
from hardpoint_platforms.reference.platform import ReferenceDevice
from hardpoint_platforms.reference.providers import reference_providers
from hardpoint_platforms.state_cache import CacheLayout

VOCAB = 131  # no multiple of anything
PAGE_TOKENS = 4
NUM_PAGES = 200

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = ["full_attention", "sliding_attention", "full_attention"]
FAMILY: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "layer_types": MIXED},
    "qwen3": {"head_dim": 24, "use_sliding_window": True, "sliding_window": 8, "layer_types": MIXED},
    "gemma2": {"head_dim": 24, "sliding_window": 8, "num_hidden_layers": 4, "query_pre_attn_scalar": 20},
    "gemma3_text": {"head_dim": 24, "sliding_window": 8, "num_hidden_layers": 6, "query_pre_attn_scalar": 20},
    "phi3": {},
    "qwen3_moe": {
        "head_dim": 24,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [1],
    },
    "deepseek_v2": {
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
    },
}


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Weights large enough that a wrong norm, mask or rotation shows in the logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(0.2 * noise)
            elif "embed" in name:
                parameter.copy_(0.7 * noise)
            else:
                parameter.copy_(1.3 * noise * parameter.shape[-1] ** -0.5)


def oracle(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """float32 [T, V] of one sequence."""
    with torch.no_grad():
        return model(input_ids=tokens[None], use_cache=False).logits[0].float()


@dataclass
class Running:
    """A sequence on its way through the paged state: its tokens, how many are computed, its pages per group."""

    tokens: torch.Tensor
    computed: int = 0
    pages: list[list[int]] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


class Served:
    """Our decoder with its weights and state, driven step by step as the worker does it."""

    def __init__(
        self,
        folder: Path,
        max_model_len: int | None = None,
        dtype: torch.dtype = torch.float32,
        config: dict[str, Any] | None = None,
        source: Any = None,
        own: Sequence[OpProvider] = (),
        shard: Shard | None = None,
        choices: Sequence[KernelChoice] = (),
    ) -> None:
        config = config or json.loads((folder / "config.json").read_text())
        self.source = source or SafetensorsSource(folder)
        checkpoint = Checkpoint(folder, config, {}, self.source, "safetensors")
        self.device = ReferenceDevice()
        self.ops = OpTable(CONTRACTS, own, reference_providers(), choices)
        self.model: CausalModel
        self.model, self.book = build_model(checkpoint, self.ops, dtype, max_model_len, shard=shard)
        self.weights = self.book.load(self.device)
        layout = CacheLayout(self.model.cache_groups, self.model.pool, PAGE_TOKENS, dtype)
        self.state = self.device.state_cache().allocate(layout, NUM_PAGES)
        order = torch.randperm(NUM_PAGES - 1, generator=torch.Generator().manual_seed(3)) + 1
        self._free = order.tolist()

    def sequence(self, tokens: torch.Tensor, parent: Running | None = None, shared: int = 0) -> Running:
        """A new sequence; with a parent, its first `shared` tokens (whole pages) are already in the cache."""
        assert shared % PAGE_TOKENS == 0
        pages: list[list[int]] = [[] for _ in self.model.cache_groups]
        if parent is not None:
            pages = [held[: shared // PAGE_TOKENS] for held in parent.pages]
        return Running(tokens, shared, pages)

    def step(
        self, plan: Sequence[tuple[Running, int]], pad_tokens: int = 0, pad_requests: int = 0
    ) -> list[torch.Tensor]:
        """Run n new tokens of each sequence; returns and keeps their logits."""
        rows, total = len(plan) + pad_requests, sum(n for _, n in plan) + pad_tokens
        starts = np.zeros(rows + 1, np.int32)
        starts[1 : len(plan) + 1] = np.cumsum([n for _, n in plan])
        starts[len(plan) + 1 :] = starts[len(plan)]
        lengths = np.zeros(rows, np.int32)
        token_ids = torch.zeros(total, dtype=torch.int64)
        positions = torch.zeros(total, dtype=torch.int64)
        groups = self.model.cache_groups
        tables = [np.zeros((rows, 20), np.int32) for _ in groups]
        slots = [np.zeros(total, np.int32) for _ in groups]
        for row, (sequence, n) in enumerate(plan):
            end = sequence.computed + n
            lengths[row] = end
            here = slice(int(starts[row]), int(starts[row + 1]))
            token_ids[here] = sequence.tokens[sequence.computed : end]
            positions[here] = torch.arange(sequence.computed, end)
            at = np.arange(sequence.computed, end)
            for group, held in enumerate(sequence.pages):
                while len(held) * PAGE_TOKENS < end:
                    held.append(self._free.pop())
                self._slide(held, groups[group].window, sequence.computed)
                tables[group][row, : len(held)] = held
                slots[group][here] = np.array(held)[at // PAGE_TOKENS] * PAGE_TOKENS + at % PAGE_TOKENS
        batch = AttentionBatch(starts, lengths, tuple(tables), tuple(slots), PAGE_TOKENS, len(plan), total - pad_tokens)
        with torch.inference_mode():
            plans = tuple(planner.plan(batch) for planner in self.ops.planners)
            hidden, self.state = self.model.forward(token_ids, positions, plans, self.state, self.weights)
            logits = self.model.logits(hidden, self.weights)
        assert torch.isfinite(logits).all()
        parts = []
        for row, (sequence, n) in enumerate(plan):
            parts.append(logits[int(starts[row]) : int(starts[row + 1])])
            sequence.logits.append(parts[-1])
            sequence.computed += n
        return parts

    def _slide(self, held: list[int], window: int | None, computed: int) -> None:
        """Give back pages that no later query looks at, as the pager does."""
        if window is None:
            return
        for place in range(max(0, (computed - window + 1) // PAGE_TOKENS)):
            if held[place]:
                self._free.insert(0, held[place])
                held[place] = 0


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[torch.nn.Module, Path]]:
    """make(model_type, **overrides) -> (transformers model, folder it was saved to)."""
    torch.set_num_threads(1)
    from transformers import AutoConfig, AutoModelForCausalLM

    def make(
        model_type: str, *, shard: str = "5GB", dtype: torch.dtype = torch.float32, **overrides: Any
    ) -> tuple[torch.nn.Module, Path]:
        config = AutoConfig.for_model(model_type, **{**SMALL, **FAMILY[model_type], **overrides})
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        randomize(model, seed=7)
        folder = tmp_path_factory.mktemp(model_type)
        for parameter in model.parameters():  # parameters alone: rope frequencies stay exact
            parameter.data = parameter.data.to(dtype)
        model.save_pretrained(folder, max_shard_size=shard)
        return model, folder

    return make


@pytest.fixture(scope="session")
def serve() -> type[Served]:
    """Our side of the comparison."""
    return Served


@pytest.fixture(scope="session")
def reference_logits() -> Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]:
    """The oracle."""
    return oracle


@pytest.fixture
def prompts() -> list[torch.Tensor]:
    """Three sequences of unlike lengths, all longer than the small windows."""
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(3, VOCAB, (length,), generator=generator) for length in (23, 17, 31)]
