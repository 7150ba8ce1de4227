"""Programs of the plugin compiled for TPUs by their own compiler, without a TPU: compile-only, nothing runs.

Needs libtpu. HARDPOINT_TPU_TARGETS="v5e:2x2 v6e:2x2 tpu7x:2x2x1" names the chips; without it one.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("jax")
if find_spec("libtpu") is None:
    pytest.skip("libtpu is not installed", allow_module_level=True)

import jax
import numpy as np
from hardpoint_tpu import device as plugin_device
from hardpoint_tpu.device import TpuDevice
from hardpoint_tpu.program import XlaProgram
from hardpoint_tpu.runtime import Runtime

from hardpoint.models.registry import build_model
from hardpoint.weights.dummy import DummySource
from hardpoint.weights.source import Checkpoint
from hardpoint.worker.model_runner import ModelRunner, RunnerParts
from hardpoint.worker.stage import StageParts
from hardpoint.worker.step import make_step
from hardpoint_platforms.device import DeviceInfo
from hardpoint_platforms.ops.table import op_table
from hardpoint_platforms.program import SamplingShape
from hardpoint_platforms.state_cache import CacheLayout

pytestmark = pytest.mark.reference

LAYERS, PAGES = 2, 33
CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
    "max_position_embeddings": 512,
}  # fmt: skip


class _Done(Exception):
    """Every program was compiled; none runs."""


@pytest.fixture(scope="module", autouse=True)
def _alone() -> Any:
    """No metadata server is asked, and the compiler is told which host it is on."""
    told = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost"}
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    yield
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


def runner_of(device: TpuDevice) -> ModelRunner:
    checkpoint = Checkpoint(Path(), dict(CONFIG), {}, DummySource(3), "dummy")
    ops, dtype = op_table(device), torch.bfloat16
    model, book = build_model(checkpoint, ops, dtype, 256)
    assert {bound.provider.name for bound in ops.bound if bound.instance.op == "attention"} == {"pallas"}
    sample = ops.bind(ops.contract("sample").instance("sampler", torch.float32))
    score = ops.bind(ops.contract("logprobs").instance("prompt scores", torch.float32))
    layout = CacheLayout(model.cache_groups, model.pool, 16, dtype)
    state = device.state_cache().allocate(layout, PAGES)
    step = make_step(model, sample.kernel)
    parts = StageParts(device, ops.planners, model, dtype, book.load(device), layout, state, step)
    return ModelRunner(RunnerParts((parts,), score.kernel, max_num_seqs=8, max_model_len=256, max_batch_tokens=64))


@pytest.mark.parametrize("target", os.environ.get("HARDPOINT_TPU_TARGETS", "v5e:2x2").split())
def test_a_small_models_programs_compile(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from jax.experimental import topologies
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

    # tensors lie on the host; what is traced is what a chip would get
    monkeypatch.setattr(plugin_device, "Runtime", _as_on_a_chip)
    device = TpuDevice(DeviceInfo("tpu", 0, "a chip that is not here"), jax.devices("cpu")[0], {"growth": 8})
    chip = topologies.get_topology_desc(target, "tpu").devices[0]
    mesh = Mesh(np.array([chip]), ("x",))
    kind = AbstractDevice(chip.device_kind, chip.num_cores, "tpu")
    abstract = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=kind)
    placed = NamedSharding(mesh, PartitionSpec())
    compiled: dict[str, Any] = {}

    def compile_only(self: XlaProgram, inputs: Any, state: Any, weights: Any) -> Any:
        with jax.sharding.use_abstract_mesh(abstract):
            lowered = self.lower(
                inputs, state, weights, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed)
            )
        compiled[self._name] = lowered.compile()
        if len(compiled) == len(wanted):
            raise _Done
        return state

    monkeypatch.setattr(XlaProgram, "begin", lambda *_: None)
    monkeypatch.setattr(XlaProgram, "prepare", compile_only)
    try:
        runner = runner_of(device)
        stage = runner._stages[0]
        # the smallest decode and prefill that only take the argmax; one that draws
        shapes = (SamplingShape.GREEDY, SamplingShape.DRAW)
        wanted = [b for b in stage._buckets if b.sampling in shapes][:1] + [
            b for b in stage._buckets if b.query == 0 and b.sampling in shapes
        ][:2]
        stage._buckets = tuple(wanted)
        with pytest.raises(_Done):
            runner.warm_up(1)
    finally:
        device.close()
    pools = LAYERS * 2 * PAGES * 16 * 2 * 128 * 2
    for name, program in compiled.items():
        assert program.memory_analysis().alias_size_in_bytes == pools, f"{name}: pools are not written in place"
        assert program.as_text().count('custom_call_target="tpu_custom_call"') == LAYERS, name


def _as_on_a_chip(*arguments: Any) -> Runtime:
    runtime = Runtime(*arguments)
    runtime.on_tpu = True
    return runtime
