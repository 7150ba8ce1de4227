"""Recorded decode steps whose rows share pages: a graph of their own, the plain one until it is there."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hardpoint_torch_gpu import plan as plans
from hardpoint_torch_gpu.attention import TritonAttention
from hardpoint_torch_gpu.backlog import WANTED
from hardpoint_torch_gpu.graphs import GraphBuilder, GraphProgram
from hardpoint_torch_gpu.plan import GpuPlan, GpuPlanner
from hardpoint_torch_gpu.recording import RecordedStep
from hardpoint_torch_gpu.shared_steps import alone, rehearsed, saved, shares
from host_graphs import WIDTH, Ops, host_builder, inputs_of, layers
from served import _Here
from shared_rows import SharedRows
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hardpoint.config.engine import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from hardpoint.engine.build import _scheduler
from hardpoint.engine.loop import Engine
from hardpoint.protocol.messages import EngineRequest
from hardpoint.request.sampling import SamplingParams
from hardpoint.weights.checkpoint import open_checkpoint
from hardpoint.worker.worker import PlacedModel, Worker, bind_model
from hardpoint_platforms.batch import AttentionBatch, SampleResult
from hardpoint_platforms.program import Bucket, SamplingShape, StepInputs, StepOutputs
from hardpoint_platforms.reference.platform import ReferenceDevice
from hardpoint_platforms.reference.providers import reference_providers

sys.path.append(str(Path(__file__).parents[1] / "cases"))

from tiny_models import llama_config, random_weights, save_llama

pytestmark = pytest.mark.reference
BUCKET = Bucket(8, 8, 1, SamplingShape.GREEDY)
#: Both of eight rows, padding included, of tables as wide.
FIRST = SharedRows(((3, (1, 2, 9)), (0, (7,))), extra=4, width=12)
SECOND = SharedRows(((5, (1, 2)), (2, (3, 3, 1)), (1, (1, 1))), extra=1, width=12)
ALONE = SharedRows(((0, (1, 2, 9, 4)),), extra=4, width=12)


class Clock:
    """Goes on by what is added to it."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Steps:
    """What calls itself a step, with the calls that were not recorded."""

    def __init__(self) -> None:
        self.shared: list[bool] = []
        self.padded: list[bool] = []

    def __call__(self, inputs: StepInputs, state: Any, weights: Any) -> tuple[StepOutputs, Any]:
        """Adds up what its plan holds: everything that attention would read there."""
        plan = inputs.plans[0]
        if not any(isinstance(mode, Ops) for mode in _get_current_dispatch_mode_stack()):
            self.shared.append(bool(plan.sharing))
            self.padded.append(plan.padded)
        x = torch.nn.functional.embedding(inputs.token_ids, weights[0][0]) + plan.lengths[:, None]
        x = x + plan.parts.sum() + plan.tables[0].sum(-1, keepdim=True)
        for one in plan.sharing:
            assert one is not None
            x = x + one.own.sum(-1, keepdim=True) + 3 * one.parts.sum() + one.units.sum() + one.members[:, None]
        return StepOutputs(SampleResult(x.argmax(-1)), x.isfinite().all(-1), x), state


def planner() -> GpuPlanner:
    made = GpuPlanner(lambda tensors: tuple(tensor.clone() for tensor in tensors))
    made.share(0, 4, 256)
    return made


def given(rows: SharedRows, seed: int = 1) -> StepInputs:
    return replace(inputs_of(8, 8, 0, seed), plans=(planner().plan(rows.batch(seed)),))


class Server:
    """One program of eight decodes, as the core drives it."""

    def __init__(self) -> None:
        self.builder, self.steps, self.clock, self.weights = host_builder(), Steps(), Clock(), layers()
        self.builder.backlog._clock = self.clock
        self.state = ((torch.zeros(WIDTH),),)
        program = self.builder.build(self.steps, BUCKET)
        assert isinstance(program, GraphProgram)
        self.program = program
        self.program.prepare(given(SharedRows(((0, (1,)),), extra=7, width=12)), self.state, self.weights)
        self.prepared = [*self.steps.shared]
        self.builder.seal()

    def serve(self, rows: SharedRows, seed: int = 1) -> None:
        """Run a step and compare."""
        inputs = given(rows, seed)
        found = self.program.run(inputs, self.state, self.weights)[0].hidden
        way = inputs if self.builder.captured["shared"] else alone(inputs)
        assert torch.equal(found, Steps()(way, self.state, self.weights)[0].hidden)


@pytest.fixture(autouse=True)
def worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "WORTH", 0)


def test_steps_are_told_apart() -> None:
    inputs = given(FIRST)
    assert shares(inputs)
    assert saved(inputs) == 2 * 3 * 4
    assert not shares(alone(inputs))
    assert not shares(given(ALONE))
    assert saved(given(ALONE)) == 0
    assert not shares(inputs_of(8, 8, 0, 1))


def test_what_is_rehearsed_launches_what_shared_steps_launch() -> None:
    in_graphs, beside_prompts = rehearsed(given(ALONE))
    assert shares(in_graphs)
    assert shares(beside_prompts)
    assert not in_graphs.plans[0].padded
    assert beside_prompts.plans[0].padded
    nobody = replace(given(ALONE), plans=(GpuPlanner(lambda tensors: tuple(tensors)).plan(ALONE.batch()),))
    assert [*rehearsed(nobody)] == [*rehearsed(inputs_of(8, 8, 0, 1))] == []


def test_a_graph_of_their_own_is_recorded_when_they_come() -> None:
    server = Server()
    assert server.prepared == [False, True, True]
    assert server.steps.padded == [False, False, True]
    server.serve(ALONE)
    assert server.builder.captured == {"decode": 1}
    server.serve(FIRST)
    assert server.builder.captured == {"decode": 1, "shared": 1}
    assert server.steps.shared == [*server.prepared, True, True], "blank ones, for what a thread sets up"
    for seed in range(3):
        server.serve(SECOND, seed)
        server.serve(FIRST, seed)
        found = server.program.run(inputs := given(ALONE, seed), server.state, server.weights)[0].hidden
        assert torch.equal(found, Steps()(inputs, server.state, server.weights)[0].hidden)
    assert server.builder.captured == {"decode": 1, "shared": 1}
    assert len(server.steps.shared) == 5
    assert "1 for decodes that share pages" in server.program.describe()


def test_both_graphs_have_one_page_table() -> None:
    server = Server()
    server.serve(FIRST)
    plain, shared = server.program._recorded, server.program._shared
    assert plain is not None
    assert shared is not None
    assert plain.static.inputs.plans[0].tables[0] is shared.static.inputs.plans[0].tables[0]
    assert plain.static.inputs.token_ids is shared.static.inputs.token_ids


def test_recording_has_its_share_of_the_time() -> None:
    server = Server()
    server.builder.backlog.done(BUCKET, 0.5)
    server.clock.now += 0.5 / WANTED - 0.5 - 0.01
    server.serve(FIRST)
    assert not server.builder.captured["shared"]
    server.clock.now += 0.02
    server.serve(FIRST)
    assert server.builder.captured["shared"] == 1


def test_where_it_cannot_be_recorded_each_row_reads_for_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server()

    def refuse() -> None:
        raise RuntimeError("no memory\nand more")

    monkeypatch.setattr(server.builder.recorder, "graph", refuse)
    for _ in range(3):
        server.clock.now += 1e3
        server.serve(FIRST)
    assert [record.message.count("no memory") for record in caplog.records] == [1]
    assert server.program.describe() == "1 graphs of up to 64 decodes, longer prompts op by op"


class Plain(ReferenceDevice):
    """The reference, with attention by Triton's kernels, in its interpreter, op by op."""

    def __init__(self) -> None:
        super().__init__()
        self.planned: list[GpuPlan] = []
        device = self

        class Noting(GpuPlanner):
            def plan(self, batch: AttentionBatch) -> GpuPlan:
                device.planned.append(super().plan(batch))
                return device.planned[-1]

        self._mine = (TritonAttention(Noting(self.upload)), *reference_providers())

    def providers(self) -> Any:
        return self._mine


def texts(device: ReferenceDevice, folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens. The first and the third request are a step ahead, so that others find their pages."""
    config = EngineConfig(
        ModelConfig(str(folder), dtype="float32"), DeviceConfig("reference"), CacheConfig(num_kv_pages=64),
        SchedulerConfig(max_batch_tokens=64, max_num_seqs=len(prompts)),
    )  # fmt: skip
    worker = Worker(config, [PlacedModel(bind_model(config, open_checkpoint(config.model), device), device)])
    engine = Engine(_scheduler(config, worker), _Here(worker.runner), overlap=False, seed=1)
    found: dict[str, list[int]] = {f"r{n}": [] for n in range(len(prompts))}
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=4 + number % 2, temperature=0.0, ignore_eos=True)
        engine.add(EngineRequest(request_id=f"r{number}", prompt=prompt, params=params))
        if number in (0, 2):
            engine.step()
    while engine.has_work:
        for output in engine.step().outputs:
            assert output.error is None
            found[output.request_id] += output.token_ids
    return [found[f"r{number}"] for number in range(len(prompts))]


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter, on the host")
def test_an_engine_gives_the_same_tokens(tmp_path: Path) -> None:
    """Requests with one system prompt, some with another, one with none."""
    random = np.random.default_rng(3)
    first, second = (random.integers(2, 290, 36).tolist() for _ in "ab")
    prompts = [[*first, 5], [*first, 7, 9], [*second, 5], [*first, 40], [*second, 8, 3], [11, 12]]
    ours, made = Plain(), llama_config()
    folder = save_llama(tmp_path, made, random_weights(made))
    with torch.inference_mode():
        assert texts(ours, folder, prompts) == texts(ReferenceDevice(), folder, prompts)
    shared = [plan.sharing[0] for plan in ours.planned if plan.sharing]
    assert len(shared) > 2
    assert any(one is not None and len({*one.own[:, 1].tolist()}) > 2 for one in shared)
    assert any(len(plan.tile_rows) for plan in ours.planned if plan.sharing), "some beside prompts"


def test_no_memory_for_it_is_no_reason_not_to_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()

    def full(recorded: Any, inputs: StepInputs) -> Any:
        raise torch.OutOfMemoryError("no room\nfor it")

    monkeypatch.setattr(RecordedStep, "beside", full)
    server.serve(FIRST)
    assert server.builder.refusals == {"shared": "no room"}


def test_a_builder_that_shares_nothing_rehearses_nothing() -> None:
    builder: GraphBuilder = host_builder()
    program = builder.build(Steps(), BUCKET)
    blank = replace(inputs_of(8, 8, 0, 1), plans=(GpuPlanner(lambda tensors: tuple(tensors)).plan(ALONE.batch()),))
    program.prepare(blank, ((torch.zeros(WIDTH),),), layers())
    assert builder.blanks == ()
