"""Programs of the plugin compiled for TPUs by their own compiler, without a TPU: compile-only, nothing runs.

Needs libtpu. HARDPOINT_TPU_TARGETS="v5e-2x2 v6e-2x2 7x-2x2x1" names the chips, without it one. HARDPOINT_TPU_DEPTH is
how many layers the large shapes have: 2 without it, "all" for theirs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jax")
if find_spec("libtpu") is None:
    pytest.skip("libtpu is not installed", allow_module_level=True)

from hardpoint_tpu.platform import TpuPlatform

from hardpoint.cli.main import main
from hardpoint.config.engine import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from hardpoint.simulate.models import read_config
from hardpoint.weights.dummy import DummySource
from hardpoint.weights.source import Checkpoint
from hardpoint.worker.planning import PlannedModel, Planner
from hardpoint_platforms.communication import TENSOR_AXIS, Mesh
from hardpoint_platforms.errors import DeviceUnavailable
from hardpoint_platforms.program import Bucket, SamplingShape

pytestmark = pytest.mark.reference

TARGETS = os.environ.get("HARDPOINT_TPU_TARGETS", "v5e-2x2").split()
DEPTH = os.environ.get("HARDPOINT_TPU_DEPTH", "2")
EVERY = os.environ.get("HARDPOINT_TEST_EVERY") == "1"
PAGES, ROWS = 33, 8
SMALL: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """A target tells libtpu that it is alone; other tests ask it other things."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]


def planned(
    config: dict[str, Any],
    target: str,
    count: int,
    choose: Callable[[Sequence[Bucket]], Sequence[Bucket]],
    pages: int = PAGES - 1,
    **more: Any,
) -> PlannedModel:
    import torch

    device = TpuPlatform().target(target, Mesh((TENSOR_AXIS,), (count,)), {"growth": 8})
    checkpoint = Checkpoint(Path(), config, {}, DummySource(dtype=torch.bfloat16, empty=True), "dummy")
    engine = EngineConfig(
        ModelConfig("a shape", max_model_len=256),
        DeviceConfig(**more),
        CacheConfig(num_kv_pages=pages),
        SchedulerConfig(max_num_seqs=ROWS, max_batch_tokens=64),
    )
    try:
        return Planner(engine, checkpoint, device).plan(choose)
    finally:
        device.close()


def some_of_each(buckets: Sequence[Bucket]) -> list[Bucket]:
    """The smallest decode and prefill that only take the argmax; with every case wanted, a prefill that draws."""
    simple = [b for b in buckets if b.sampling in (SamplingShape.GREEDY, SamplingShape.DRAW)]
    return simple[:1] + [b for b in simple if b.query != 1][: 2 if EVERY else 1]


def one_of_each(buckets: Sequence[Bucket]) -> list[Bucket]:
    """The smallest decode and the smallest prefill."""
    return [simple := buckets[0], next(b for b in buckets if b.query != 1 and b.sampling == simple.sampling)]


@pytest.mark.parametrize("target", TARGETS)
def test_a_small_models_programs_compile(target: str) -> None:
    plan = planned(SMALL, target, 1, some_of_each)
    assert ("attention", "pallas") in plan.providers
    assert len(plan.programs) == (3 if EVERY else 2)
    pools = SMALL["num_hidden_layers"] * 2 * PAGES * 16 * 2 * 128 * 2
    for bucket, program in plan.programs:
        assert program.in_place == pools, f"{bucket}: pools are not written in place"
        assert program.kernels == SMALL["num_hidden_layers"], bucket
        assert not program.collectives, "one chip has nobody to talk to"


#: Shape -> (whole experts, key and value heads of a chip of four).
LARGE = {"llama-3.1-8b": (False, 2), "qwen3-30b-a3b": (False, 1), "qwen3-30b-a3b, whole experts": (True, 1)}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", LARGE)
def test_large_models_cut_over_four_chips_compile(name: str, target: str) -> None:
    whole_experts, heads = LARGE[name]
    config, _ = read_config(name.partition(",")[0])
    if DEPTH != "all":
        config["num_hidden_layers"] = int(DEPTH)
    layers, pages = config["num_hidden_layers"], 1023
    plan = planned(config, target, 4, one_of_each, pages, expert_parallel=whole_experts)
    pools = layers * 2 * (pages + 1) * 16 * heads * 128 * 2
    for bucket, program in plan.programs:
        assert program.in_place == pools, f"{bucket}: pools are not written in place"
        assert plan.weights + pools <= program.arguments < (plan.weights + pools) * 1.02, "all but the step's own input"
        assert program.temporaries < 1 << 30, bucket
        assert program.kernels >= layers, "one attention kernel per layer"
        # two sums per layer, one for the embedding; the logits are gathered, in whatever way the compiler likes best
        assert sum(program.collectives.values()) == 2 * layers + 2, bucket
        assert program.collectives["all-reduce"] >= 2 * layers + 1, bucket


def test_the_command_line_weighs_without_compiling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"torch_dtype": "bfloat16"}))
    command = ["plan", str(tmp_path), "--device", "tpu:v5e-2x2", "--tensor-parallel-size", "2", "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory"] == 16 << 30
    assert found["programs"] == []
    embedding, layer = 2 * 1024 * 512, 512 * 128 * (8 + 2 * 2) + 8 * 128 * 512 + 3 * 512 * 1024
    halves, ropes_and_norms = (embedding + 2 * layer) * 2 // 2, 600_000
    assert halves < found["weights"] < halves + ropes_and_norms
    assert main(command[:-1]) == 0
    assert "on each of 2 devices" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "ranks", "told"),
    [("v9-2x2", 1, "names no TPU"), ("v5e", 1, "names no TPU"), ("v5e-2x2", 8, "has 4 devices, 8 are wanted")],
)
def test_targets_that_are_none(name: str, ranks: int, told: str) -> None:
    with pytest.raises(DeviceUnavailable, match=told):
        TpuPlatform().target(name, Mesh((TENSOR_AXIS,), (ranks,)), {})


def test_an_arrangement_that_libtpu_does_not_know() -> None:
    with pytest.raises(DeviceUnavailable, match="libtpu knows no v5e-3x7"):
        TpuPlatform().target("v5e-3x7", Mesh((), ()), {})
