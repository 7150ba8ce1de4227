"""An engine on the host whose Triton kernels are noted, not run: which variants the compiler would have been asked for.

Triton compiles a kernel anew for other dtypes, constants and options, for pointers and integers that are multiples of
16 or not, and for integers that are 1, unless the kernel asks it not to look at them.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hardpoint_torch_gpu import compile_ahead
from hardpoint_torch_gpu.compile_ahead import _Zeroed
from hardpoint_torch_gpu.compiles import LateCompiles
from hardpoint_torch_gpu.graphs import GraphBuilder
from hardpoint_torch_gpu.providers import triton_providers
from host_graphs import HostRecorder
from triton.runtime.interpreter import InterpretedFunction

from hardpoint.config.engine import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from hardpoint.engine.build import _scheduler
from hardpoint.engine.loop import Engine
from hardpoint.executor.base import Executor, StepHandle
from hardpoint.executor.null import FinishedStep
from hardpoint.protocol.messages import EngineRequest
from hardpoint.request.sampling import SamplingParams
from hardpoint.scheduler.plan import StepPlan
from hardpoint.weights.checkpoint import open_checkpoint
from hardpoint.worker.model_runner import ModelRunner
from hardpoint.worker.worker import PlacedModel, Worker, bind_model
from hardpoint_platforms.program import SamplingShape
from hardpoint_platforms.reference.platform import ReferenceDevice

ALIGNED = 16
#: What an argument that receives whether a row is finite is called: rows that are not would end their requests.
FINITE = "finite_ptr"


@dataclass
class Variants(LateCompiles):
    """Variants in the order of their first launch: those before serving, and those from `watch` on."""

    ready: dict[str, None] = field(default_factory=dict)
    late: dict[str, None] = field(default_factory=dict)
    launches: int = 0
    serving: bool = False

    def watch(self) -> None:
        """Serving begins."""
        self.serving = True

    def note(self, kernel: InterpretedFunction[Any], args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """A launch; what it would have written stays zero."""
        signature = inspect.signature(kernel.fn)
        options = {name: value for name, value in named.items() if name not in signature.parameters}
        given = signature.bind(*args, **{name: named[name] for name in named if name not in options}).arguments
        exempt = {*(kernel.kwargs["do_not_specialize"] or ())}
        told = [
            f"{name}={_kind(value, 'constexpr' in str(signature.parameters[name].annotation), name in exempt)}"
            for name, value in given.items()
        ]
        variant = f"{kernel.__name__}({', '.join(told)}) {sorted(options.items())}"
        self.launches += 1
        if FINITE in given:
            given[FINITE].fill_(1)
        if not self.serving:
            self.ready[variant] = None
        elif variant not in self.ready:
            self.late[variant] = None


def _kind(value: Any, constant: bool, exempt: bool) -> str:
    """What Triton tells values of one argument apart by."""
    if constant or value is None:
        return repr(value)
    if isinstance(value, torch.Tensor):
        even = exempt or value.data_ptr() % ALIGNED == 0
        return f"*{str(value.dtype).removeprefix('torch.')}{'' if even else ' uneven'}"
    if isinstance(value, bool | float):
        return type(value).__name__
    width = "i32" if -(2**31) <= value < 2**31 else "i64"
    if exempt:
        return width
    return "1" if value == 1 else f"{width}:16" if value % ALIGNED == 0 else width


class InterpretedGpu(ReferenceDevice):
    """What every GPU with Triton offers, on the host, with steps op by op."""

    def __init__(self) -> None:
        super().__init__()
        self._providers = triton_providers(self)

    def providers(self) -> Any:
        return self._providers


class HostGpu(InterpretedGpu):
    """With graphs on the host."""

    def __init__(self, variants: Variants, record: str) -> None:
        super().__init__()
        self._variants, self._put_off = variants, record == "first"
        self.builder: GraphBuilder | None = None

    def programs(self) -> GraphBuilder:
        shapes = (SamplingShape.GREEDY, SamplingShape.DRAW)
        self.builder = GraphBuilder(self.torch_device, shapes, 512, self._variants, put_off=self._put_off)
        self.builder.recorder = HostRecorder()  # type: ignore[assignment]
        return self.builder

    def upload(self, tensors: Any) -> tuple[torch.Tensor, ...]:
        """Copies, aligned as a GPU's are."""
        return tuple(tensor.clone() for tensor in tensors)


class _Here(Executor):
    """Runs plans on the caller's thread, to which torch's modes belong."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def submit(self, plan: StepPlan) -> StepHandle:
        return FinishedStep(self._runner.execute(plan))

    def close(self) -> None:
        return None


@contextmanager
def noting(variants: Variants) -> Iterator[None]:
    """Kernels are noted, what is made without values is zero, and nothing is compiled ahead."""
    launch, threads = InterpretedFunction.run, compile_ahead.threads

    def note(self: InterpretedFunction[Any], *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        variants.note(self, args, named)

    InterpretedFunction.run, compile_ahead.threads = note, lambda: 1  # type: ignore[method-assign]
    try:
        with _Zeroed():  # type: ignore[no-untyped-call]
            yield
    finally:
        InterpretedFunction.run, compile_ahead.threads = launch, threads  # type: ignore[method-assign]


def start(model: Path, variants: Variants, record: str, most: int) -> tuple[Engine, HostGpu]:
    """An engine for up to `most` requests at once, within `noting`."""
    config = EngineConfig(
        ModelConfig(str(model), dtype="bfloat16"),
        DeviceConfig("reference"),
        CacheConfig(num_kv_pages=2500),
        SchedulerConfig(max_batch_tokens=2048, max_num_seqs=most),
    )
    device = HostGpu(variants, record)
    checkpoint = open_checkpoint(config.model)
    worker = Worker(config, [PlacedModel(bind_model(config, checkpoint, device), device)])
    return Engine(_scheduler(config, worker), _Here(worker.runner), overlap=False, seed=1), device


def crowd(
    engine: Engine, number: int, seed: int, draws: Callable[[random.Random], SamplingParams], common: int = 0
) -> int:
    """Serve `number` requests of 1 to 700 tokens that come in bursts, some of which go away. Returns how many ended.

    `common`: first tokens of two thirds of the prompts.
    """
    chance = random.Random(seed)
    start = [chance.randrange(2, 300) for _ in range(common)]
    come, ended, live = 0, 0, []
    while come < number or engine.has_work:
        if come < number and (not live or chance.random() < 0.3):
            for _ in range(min(chance.choice((1, 1, 2, 7, 40, 120)), number - come)):
                length = chance.choice((1, 2, chance.randint(3, 40), chance.randint(41, 700)))
                prompt = [chance.randrange(2, 300) for _ in range(length)]
                prompt = (start + prompt)[:700] if common and come % 3 else prompt
                engine.add(EngineRequest(request_id=f"r{come}", prompt=prompt, params=draws(chance)))
                live.append(f"r{come}")
                come += 1
        if live and chance.random() < 0.1:
            engine.abort(live.pop(chance.randrange(len(live))))
        for output in engine.step().outputs:
            assert output.error is None, output.error
            if output.finish_reason is not None:
                live.remove(output.request_id)
                ended += 1
    return ended
