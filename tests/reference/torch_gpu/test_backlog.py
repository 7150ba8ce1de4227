"""Sizes that are recorded while serving: which are first, who serves meanwhile, and when there is time."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hardpoint_torch_gpu import graphs
from hardpoint_torch_gpu.backlog import OTHERS, PATIENCE, WANTED, Backlog, LateBucket, halving
from hardpoint_torch_gpu.graphs import GraphBuilder, decode_sizes
from hardpoint_torch_gpu.rehearsal import RehearsalBucket
from host_graphs import HostRecorder, Ops, host_builder, inputs_of, layers
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hardpoint.worker.stage import Stage, StageParts
from hardpoint_platforms.batch import SampleResult
from hardpoint_platforms.program import ANY_SIZE, Bucket, SamplingShape, StepInputs, StepOutputs
from hardpoint_platforms.reference.platform import ReferenceDevice

pytestmark = pytest.mark.reference
GREEDY, DRAW = SamplingShape.GREEDY, SamplingShape.DRAW


class Clock:
    """Goes on by what is added to it."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Device(ReferenceDevice):
    """The reference with recorded steps."""

    def __init__(self, builder: GraphBuilder) -> None:
        super().__init__()
        self.builder = builder

    def programs(self) -> GraphBuilder:
        return self.builder


def step(inputs: StepInputs, state: Any, weights: Any) -> tuple[StepOutputs, Any]:
    """Rows that know nothing of each other."""
    x = torch.nn.functional.embedding(inputs.token_ids, weights[0][0]) @ weights[1][0]
    picked = x.index_select(0, inputs.logits_index)
    return StepOutputs(SampleResult(picked.argmax(-1)), picked.isfinite().all(-1), picked), state


class Server:
    """A stage as the core drives it. `serve` runs a step and compares."""

    def __init__(self, builder: GraphBuilder, step: Any = step, tokens: int = 64) -> None:
        self.builder, self.clock, self.weights = builder, Clock(), layers()
        builder.backlog._clock = self.clock
        parts = StageParts(
            Device(builder), (), SimpleNamespace(hidden_size=8), torch.float32, self.weights, None, ((),), step
        )
        self.stage = Stage(parts, tokens, 64, True, lambda phase, done: None)
        self.stage.prepare(lambda bucket: inputs_of(bucket.tokens, bucket.requests, 0, 0), lambda phase, done: None)
        self.prepared = self.recorded
        self.stage.seal()

    @property
    def recorded(self) -> int:
        return self.builder.captured.total()

    @property
    def sizes(self) -> int:
        """Those that are recorded, sooner or later."""
        return sum(bucket != ANY_SIZE and not isinstance(bucket, RehearsalBucket) for bucket in self.stage._buckets)

    def bucket(self, rows: int, query: int = 1, sampling: SamplingShape = GREEDY) -> Bucket:
        return self.stage.bucket(rows * query, rows, query, sampling)

    def serve(self, rows: int, query: int = 1, seed: int = 1) -> Bucket:
        bucket = self.bucket(rows, query)
        inputs = inputs_of(bucket.tokens or rows * query, bucket.requests or rows, 0, seed)
        outputs, wanted = self.stage.run(bucket, inputs), step(inputs, None, self.weights)[0]
        assert torch.equal(outputs.hidden, wanted.hidden)
        return bucket


@pytest.fixture
def server() -> Server:
    return Server(host_builder(put_off=True))


def test_gaps_are_halved() -> None:
    assert halving([1, 2, 3, 4, 8, 12, 16]) == [4, 2, 8, 3, 12]
    assert halving([1, 2]) == halving([1]) == []
    assert sorted(halving(list(decode_sizes(512)))) == list(decode_sizes(512))[1:-1]


def test_the_most_needed_are_recorded_before_serving(server: Server) -> None:
    waiting = {bucket for bucket in server.stage._buckets if isinstance(bucket, LateBucket)}
    others = [(b.tokens, b.query) for b in server.stage._buckets if b not in waiting]
    assert others == [(1, 1), (64, 1), (64, 0), (8, 0), (0, 0)]
    assert server.prepared == 3
    assert len(server.builder.backlog) == len(waiting) == 14
    said = server.builder.describe()
    assert "2 of 15 graphs of up to 64 decodes, 1 of 2 in pieces" in said
    assert "the others recorded while serving" in said


def test_all_are_recorded_where_none_is_put_off() -> None:
    server = Server(host_builder())
    assert not any(isinstance(bucket, LateBucket) for bucket in server.stage._buckets)
    assert server.recorded == server.sizes
    assert not server.builder.backlog
    assert "of" not in server.builder.describe().partition("graphs")[0]


def test_a_larger_size_serves_until_the_wanted_one_is_recorded(server: Server) -> None:
    assert server.serve(8).requests == 64
    assert server.recorded == server.prepared + 1
    assert server.serve(8).requests == 8
    assert server.serve(7).requests == 8
    assert server.serve(6, seed=3).requests == 8
    assert server.serve(1).requests == 1


def test_a_size_of_the_other_draw_serves(server: Server) -> None:
    two = Server(host_builder(GREEDY, DRAW, put_off=True))
    assert two.bucket(8, sampling=DRAW) == Bucket(64, 64, 1, DRAW)
    assert two.bucket(8) == Bucket(64, 64, 1, GREEDY)
    assert two.bucket(65, sampling=SamplingShape.FULL) == ANY_SIZE


def test_all_are_recorded_in_time(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for _ in range(20):
        server.clock.now += 1e3
        server.serve(1)
    assert not server.builder.backlog
    assert server.recorded == server.sizes
    assert [server.serve(rows).requests for rows in (2, 3, 5, 64)] == [2, 3, 8, 64]
    assert server.serve(1, query=20).tokens == 32
    assert "14 recorded while serving" in caplog.text
    assert "while serving" not in server.builder.describe()


def test_an_idle_server_records_all(server: Server) -> None:
    assert server.serve(8).requests == 64
    waiting = len(server.builder.backlog)
    assert waiting > 5
    for left in range(waiting - 1, -1, -1):  # no time goes by
        assert server.stage.catch_up() == (left > 0)
        assert len(server.builder.backlog) == left
    assert not server.stage.catch_up()
    assert server.recorded == server.sizes
    assert [server.serve(rows).requests for rows in (2, 3, 5, 8)] == [2, 3, 8, 8]


def test_nothing_is_recorded_before_serving_begins() -> None:
    builder = host_builder(put_off=True)
    builder.backlog.add(Bucket(2, 2, 1, GREEDY))
    assert builder.catch_up()
    assert builder.captured.total() == 0


def test_prompts_do_not_wait_for_a_recording_but_in_the_end(server: Server) -> None:
    for _ in range(PATIENCE - 1):
        server.clock.now += 1e3
        assert server.serve(1, query=20).tokens == 64
    assert server.recorded == server.prepared
    server.serve(1, query=20)
    assert server.recorded == server.prepared + 1
    assert server.serve(1, query=20).tokens == 32


def test_a_decode_between_prompts_starts_the_count_anew(server: Server) -> None:
    backlog, clock = server.builder.backlog, server.clock
    backlog.done(Bucket(2, 2, 1, GREEDY), 1.0)
    for _ in range(PATIENCE - 1):
        assert backlog.turn(prompts=True) is None
    assert backlog.turn(prompts=False) is None  # it rests
    clock.now += 1e3
    assert backlog.turn(prompts=True) is None


@pytest.mark.parametrize(("wanted", "share"), [(True, WANTED), (False, OTHERS)])
def test_recording_takes_a_share_of_the_time(wanted: bool, share: float) -> None:
    clock = Clock()
    backlog = Backlog(clock)
    buckets = [LateBucket(n, n, 1, GREEDY, backlog) for n in (2, 3, 4)]
    for bucket in buckets:
        backlog.add(bucket)
    backlog.in_order([buckets[1], buckets[0], buckets[2]])
    assert backlog.turn(prompts=False) == buckets[1]
    backlog.done(buckets[1], 0.5)

    def asked() -> Bucket | None:
        if wanted:
            assert not buckets[2].fits(4, 4, 1, GREEDY)
        return backlog.turn(prompts=False)

    clock.now += 0.5 / share - 0.5 - 0.01
    assert asked() is None
    clock.now += 0.02
    assert asked() == (buckets[2] if wanted else buckets[0])


def test_a_size_that_cannot_be_recorded_late_leaves_it_to_larger_ones(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise RuntimeError("no memory\nand more")

    monkeypatch.setattr(server.builder.recorder, "graph", refuse)
    monkeypatch.setattr(graphs.time, "monotonic", iter(range(9)).__next__)  # it takes a second
    assert [server.serve(8).requests for _ in range(3)] == [64, 64, 64]
    assert "no memory" in caplog.text
    assert len(caplog.records) == 1
    monkeypatch.undo()
    server.clock.now += 1e3
    server.serve(8)
    assert server.serve(8).requests == 64
    assert server.recorded == server.prepared + 1  # the other kind goes on
    assert server.builder.describe().startswith("2 graphs of up to 64 decodes")


def test_steps_that_cannot_be_recorded_at_all_are_called_op_by_op() -> None:
    def asking(inputs: StepInputs, state: Any, weights: Any) -> tuple[StepOutputs, Any]:
        if any(isinstance(mode, Ops) for mode in _get_current_dispatch_mode_stack()):
            raise RuntimeError("asks the device")
        return step(inputs, state, weights)

    server = Server(host_builder(put_off=True), asking)
    assert server.recorded == 0
    assert not server.builder.backlog
    assert server.serve(8).requests == 8
    assert "op by op, as one cannot be recorded: asks the device" in server.builder.describe()


def test_a_size_that_another_builder_offered_is_recorded_at_once() -> None:
    """As the conformance kit does it."""
    offered = next(b for b in host_builder(put_off=True).buckets(64, 64) if isinstance(b, LateBucket))
    builder = host_builder(put_off=True)
    builder.build(step, offered).prepare(inputs_of(offered.tokens, offered.requests, 0, 0), ((),), layers())
    assert builder.captured.total() == 1
    assert offered.fits(offered.tokens, offered.requests, 1, GREEDY)


def test_kernels_of_sizes_that_wait_are_compiled_before_serving() -> None:
    """A step of each size runs before, and one of each kind of size for other draws; all where one was not on disk."""
    seen: list[int] = []

    def counted(inputs: StepInputs, state: Any, weights: Any) -> tuple[StepOutputs, Any]:
        seen.append(len(inputs.token_ids))
        return step(inputs, state, weights)

    sizes = set(decode_sizes(64)) - {1, 64} | {32}
    Server(host_builder(put_off=True), counted)
    assert sizes <= set(seen)
    before = Counter(seen)

    seen.clear()
    Server(host_builder(GREEDY, DRAW, put_off=True), counted)
    after = Counter(seen)
    assert after[8] > before[8]
    assert after[56] == before[56], "it is like 40"

    seen.clear()
    builder = host_builder(GREEDY, DRAW, put_off=True)
    builder.ahead.missing = 1
    Server(builder, counted)
    assert Counter(seen)[56] > before[56]


def test_the_recorder_is_the_hosts(server: Server) -> None:
    """Each recorded size is a graph of its own: what is counted above is what was recorded."""
    assert isinstance(server.builder.recorder, HostRecorder)
    assert len(server.builder.recorder.graphs) == server.recorded
