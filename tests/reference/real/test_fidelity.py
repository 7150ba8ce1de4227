"""Fast numerics beside transformers in float32: how far whole distributions move, over varied text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint.bench.transformers_peer import load_peer
from hardpoint.config.engine import DeviceConfig, EngineConfig, ModelConfig
from hardpoint.frontend.tokenizer import load_tokenizer
from hardpoint.weights.checkpoint import open_checkpoint
from hardpoint.worker.worker import bind_model
from hardpoint_platforms.discovery import discover
from hardpoint_platforms.ops.samples import PagedRows
from hardpoint_platforms.selection import open_device, select
from hardpoint_platforms.state_cache import CacheLayout

pytestmark = [pytest.mark.reference, pytest.mark.real_model]

#: English, a licence, Python, French, German, sums: a text of our own.
TEXT = Path(__file__).with_name("varied.txt")
PIECE = 250
#: Tokens compared; HARDPOINT_TEST_EVERY=1 takes more. Gemma's vocabulary is five times as wide: a minute for 2,000.
TOKENS = {"smollm2": 2000 if os.environ.get("HARDPOINT_TEST_EVERY") == "1" else 750, "gemma3": 750}
#: Mean Kullback-Leibler divergence in nats.
BOUND = 0.005


class Served:
    """The model as the device serves it, without an engine around it."""

    def __init__(self, path: Path) -> None:
        config = EngineConfig(ModelConfig(str(path), max_model_len=512), DeviceConfig("cpu"))
        self.device = open_device(select("cpu", discover()), {})
        if not any(provider.name.startswith("native") for provider in self.device.providers()):
            pytest.skip("hardpoint-cpu was installed without its kernels")
        self._bound = bind_model(config, open_checkpoint(config.model), self.device)
        self._weights = self._bound.book.load(self.device)
        model, dtype = self._bound.model, self.device.capabilities().kv_dtypes[0]
        self._state = self.device.state_cache().allocate(CacheLayout(model.cache_groups, model.pool, 16, dtype), 40)

    def logits(self, ids: list[int]) -> torch.Tensor:
        """float32 [T, V]."""
        model = self._bound.model
        windows = tuple(group.window for group in model.cache_groups)
        batch = PagedRows(((0, len(ids)),), page_tokens=16, windows=windows).batch()
        plans = tuple(planner.plan(batch) for planner in self._bound.ops.planners)
        hidden, self._state = model.forward(
            torch.tensor(ids), torch.arange(len(ids)), plans, self._state, self._weights
        )
        return model.logits(hidden, self._weights)


@pytest.mark.parametrize("which", ["smollm2", pytest.param("gemma3", marks=pytest.mark.long)])
def test_distributions_stay_close(which: str, request: Any) -> None:
    path = request.getfixturevalue(f"{which}_path")
    tokenizer = load_tokenizer(ModelConfig(str(path)))
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)
    start = [tokenizer.bos_token_id] if which == "gemma3" else []  # far from sense without its first token
    step = PIECE - len(start)
    pieces = [start + ids[at : at + step] for at in range(0, TOKENS[which], step)]
    served, peer = Served(path), load_peer(ModelConfig(str(path)))
    divergences, agreed = [], 0
    with torch.inference_mode():
        for piece in pieces:
            theirs = peer(torch.tensor([piece])).logits[0].log_softmax(-1)
            ours = served.logits(piece).log_softmax(-1)
            divergences.append((theirs.exp() * (theirs - ours)).sum(-1))
            agreed += int((theirs.argmax(-1) == ours.argmax(-1)).sum())
    served.device.close()
    divergence = torch.cat(divergences)
    assert len(divergence) >= TOKENS[which]
    mean, most, same = float(divergence.mean()), float(divergence.max()), agreed / len(divergence)
    print(f"{which}: mean KL {mean:.5f}, largest {most:.3f}, same best token {same:.3f}")
    assert 1e-6 < mean < BOUND  # more than nothing: the peer is another program, and activations are rounded
