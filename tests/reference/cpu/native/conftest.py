"""The native kernels for tests: the library that HARDPOINT_CPU_LIBRARY names, else the installed one."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hardpoint.models.registry import build_model
from hardpoint.weights.dummy import DummySource
from hardpoint.weights.source import Checkpoint
from hardpoint.worker.step import make_step
from hardpoint_cpu.native.attention_plan import NativePlan, NativePlanner
from hardpoint_cpu.native.library import LibraryUnavailable, NativeLibrary, Pool, find_library
from hardpoint_cpu.native.provider import Setting
from hardpoint_cpu.native.providers import native_providers
from hardpoint_cpu.native.stage import Stage
from hardpoint_cpu.ops.providers import cpu_providers
from hardpoint_platforms.batch import AttentionBatch
from hardpoint_platforms.binding import OpTable
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Weight, WeightSpec
from hardpoint_platforms.ops.provider import OpProvider
from hardpoint_platforms.ops.samples import SCHEMES, Source, quantized
from hardpoint_platforms.ops.sampling import sampling_inputs
from hardpoint_platforms.program import StepInputs, StepOutputs
from hardpoint_platforms.reference.platform import ReferenceDevice
from hardpoint_platforms.reference.providers import reference_providers
from hardpoint_platforms.state_cache import CacheLayout


@pytest.fixture(scope="session")
def library() -> NativeLibrary:
    """Skips, with the reason, where nothing was built."""
    try:
        found = find_library()
    except LibraryUnavailable as error:
        pytest.skip(f"no native kernels: {error}")
    found.use()
    return found


@pytest.fixture(scope="session")
def stages(library: NativeLibrary) -> Iterator[Callable[[int], Stage]]:
    """stages(threads) -> a stage on that many threads, kept for the whole run."""
    made: dict[int, Stage] = {}

    def with_threads(threads: int) -> Stage:
        if threads not in made:
            made[threads] = Stage(library, Pool(library, threads))
        return made[threads]

    yield with_threads
    for stage in made.values():
        stage.pool.close()


@pytest.fixture(scope="session")
def stage(stages: Callable[[int], Stage]) -> Stage:
    """Two threads, so that work is shared out."""
    return stages(2)


@pytest.fixture(params=["best", "baseline"])
def any_stage(
    request: pytest.FixtureRequest, library: NativeLibrary, stages: Callable[[int], Stage]
) -> Iterator[Stage]:
    """As `stage`, with the best kernels for this processor and with those for any processor."""
    library.use(None if request.param == "best" else "baseline")
    yield stages(2)
    library.use()


@pytest.fixture(scope="session")
def plan() -> Callable[[AttentionBatch], NativePlan]:
    """plan(batch) -> what native kernels read of a batch."""
    return NativePlanner().plan


@pytest.fixture(params=["fast", "exact"])
def setting(stage: Stage, request: pytest.FixtureRequest) -> Setting:
    """Both numerics."""
    return Setting(stage, exact=request.param == "exact")


TINY: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
WINDOWS = ["full_attention", "sliding_attention", "full_attention"]
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 24, "use_sliding_window": True, "sliding_window": 8, "layer_types": WINDOWS},
    "gemma3_text": {"head_dim": 24, "sliding_window": 8, "num_hidden_layers": 6},
    "qwen3_moe": {"head_dim": 24, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
PAGE_TOKENS, NUM_PAGES = 4, 160


class QuantizedSource(DummySource):
    """Made-up weights whose matrices are q4_1."""

    def require(self, name: str, shape: tuple[int, ...]) -> WeightSpec:
        return self._quantized(super().require(name, shape))

    def spec(self, name: str) -> WeightSpec:
        return self._quantized(super().spec(name))

    def load(self, name: str) -> Weight:
        spec = self.spec(name)
        if spec.scheme is None:
            return super().load(name)
        return quantized(Source(zlib.crc32(name.encode())), spec.shape, spec.scheme)

    def _quantized(self, spec: WeightSpec) -> WeightSpec:
        return replace(spec, scheme=SCHEMES["q4_1"]) if len(spec.shape) == 2 else spec


@dataclass
class Sequence:
    """Tokens, how many are computed, and pages per group."""

    tokens: torch.Tensor
    computed: int = 0
    pages: list[list[int]] = field(default_factory=list)


class Tiny:
    """A tiny random model with its weights and state, driven by `StepInputs` as the runner does it."""

    def __init__(
        self,
        providers: Iterable[OpProvider],
        config: str = "llama",
        packed: bool = True,
        kv: torch.dtype = torch.float16,
    ) -> None:
        self.ops = OpTable(CONTRACTS, tuple(providers), reference_providers())
        checkpoint = Checkpoint(
            Path(), {"model_type": config, **TINY, **CONFIGS[config]}, {},
            QuantizedSource(1) if packed else DummySource(1), "safetensors",
        )  # fmt: skip
        self.model, book = build_model(checkpoint, self.ops, torch.float32, None)
        self.weights = book.load(ReferenceDevice())
        sample = self.ops.bind(self.ops.contract("sample").instance("sampler", torch.float32))
        self.step = make_step(self.model, sample.kernel)
        layout = CacheLayout(self.model.cache_groups, self.model.pool, PAGE_TOKENS, kv)
        self.state = ReferenceDevice().state_cache().allocate(layout, NUM_PAGES)
        self._free = list(range(1, NUM_PAGES))

    def sequence(self, seed: int, length: int) -> Sequence:
        """A new sequence of random tokens."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, TINY["vocab_size"], (length,), generator=generator)
        return Sequence(tokens, 0, [[] for _ in self.model.cache_groups])

    def inputs(
        self, plan: list[tuple[Sequence, int]], padding: int = 0, draws: bool = True, **options: Any
    ) -> StepInputs:
        """n new tokens of each sequence, then `padding` tokens that belong to nobody."""
        new = [n for _, n in plan]
        starts = np.cumsum([0, *new]).astype(np.int32)
        total, groups = int(starts[-1]), range(len(self.model.cache_groups))
        tables = [np.zeros((len(plan), 40), np.int32) for _ in groups]
        slots = [np.arange(total + padding, dtype=np.int32) % PAGE_TOKENS for _ in groups]
        ids, positions = (torch.zeros(total + padding, dtype=torch.int64) for _ in range(2))
        for row, (sequence, n) in enumerate(plan):
            first, here = sequence.computed, slice(int(starts[row]), int(starts[row + 1]))
            at = np.arange(first, first + n)
            ids[here], positions[here] = sequence.tokens[first : first + n], torch.from_numpy(at)
            for group, held in enumerate(sequence.pages):
                while len(held) * PAGE_TOKENS < first + n:
                    held.append(self._free.pop())
                tables[group][row, : len(held)] = held
                slots[group][here] = np.array(held)[at // PAGE_TOKENS] * PAGE_TOKENS + at % PAGE_TOKENS
            sequence.computed += n
        lengths = np.array([sequence.computed for sequence, _ in plan], np.int32)
        batch = AttentionBatch(starts, lengths, tuple(tables), tuple(slots), PAGE_TOKENS, len(plan), total)
        rows = len(plan) if draws else 0
        return StepInputs(
            ids, positions, tuple(planner.plan(batch) for planner in self.ops.planners),
            torch.from_numpy(starts[1:].astype(np.int64) - 1)[:rows],
            sampling_inputs(rows, **({"temperature": 0.0, "all_greedy": True, "num_logprobs": 9} | options)),
        )  # fmt: skip

    def run(self, inputs: StepInputs) -> StepOutputs:
        """The step function itself."""
        with torch.inference_mode():
            outputs, self.state = self.step(inputs, self.state, self.weights)
        return outputs


@pytest.fixture
def tiny(stage: Stage) -> Callable[..., Tiny]:
    """tiny(config, packed=True, ...) -> a model on native kernels alone, except those of `without`."""

    def make(config: str = "llama", *, without: Iterable[str] = (), exact: bool = False, **options: Any) -> Tiny:
        own = [p for p in native_providers(Setting(stage, exact)) if p.op not in set(without)]
        return Tiny([*own, *cpu_providers()], config, **options)

    return make
