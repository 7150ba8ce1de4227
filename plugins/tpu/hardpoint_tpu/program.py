"""Steps compiled as a whole: one XLA program per bucket, the paged state donated and returned.

begin      trace the step's PyTorch into JAX, lower, let a thread compile it (or take it from the cache on disk)
prepare    wait for that, run it once
run        collect the step's arrays, call the executable, wrap what it returns
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import jax

from hardpoint_platforms.capabilities import BatchLimits
from hardpoint_platforms.errors import PlatformError
from hardpoint_platforms.program import (
    Bucket,
    Footprint,
    Program,
    ProgramBuilder,
    SamplingShape,
    StepFunction,
    StepInputs,
    StepOutputs,
    Weights,
)
from hardpoint_platforms.state_cache import State
from hardpoint_platforms.strict.static.buckets import name_of, static_buckets
from hardpoint_tpu.mesh import APART, SAME, spec_of
from hardpoint_tpu.runtime import Runtime
from hardpoint_tpu.state import Pools, StateHandle, handle_of
from hardpoint_tpu.trees import Form, flatten, gather, rebuild

#: In the text of a compiled program: collectives, of which some begin in one place and end in another; own kernels.
_COLLECTIVE = re.compile(r" = [^=]*? (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
_KERNEL = 'custom_call_target="tpu_custom_call"'


class UnplannedProgram(PlatformError):
    """A program was built after serving began, or run before it was prepared."""


class XlaProgram(Program):
    """A step for one bucket."""

    def __init__(self, step: StepFunction, bucket: Bucket, runtime: Runtime) -> None:
        self._step, self._runtime = step, runtime
        self._name = f"the program of {name_of(bucket)}"
        self._compiled: Any = None
        self._coming: Future[Any] | None = None
        self._told: list[Form] = []
        self._weights: tuple[Weights, list[Any]] | None = None

    def begin(self, inputs: StepInputs, state: State, weights: Weights) -> None:
        """Trace it here, and have it compiled in another thread."""
        self._coming = self._runtime.compiling.submit(self.lower(inputs, state, weights).compile)

    def prepare(self, inputs: StepInputs, state: State, weights: Weights) -> State:
        """Compile it, where that has not begun, and run it once. Raises OutOfDeviceMemory where it does not fit."""
        if self._compiled is not None:
            raise UnplannedProgram(f"{self._name} was prepared already: prepare() is called once")
        if self._coming is None:
            self.begin(inputs, state, weights)
        assert self._coming is not None
        with self._runtime.memory_errors(self._name):
            self._compiled = self._coming.result()
        self._coming = None
        return self.run(inputs, state, weights)[1]

    def footprint(self, inputs: StepInputs, state: State, weights: Weights) -> Footprint:
        lowered, started = self.lower(inputs, state, weights), time.perf_counter()
        with self._runtime.memory_errors(self._name):
            compiled = lowered.compile()
        found, text = compiled.memory_analysis(), compiled.as_text()
        counts = Counter(match[1] for match in _COLLECTIVE.finditer(text))
        return Footprint(
            arguments=found.argument_size_in_bytes,
            in_place=found.alias_size_in_bytes,
            temporaries=found.temp_size_in_bytes,
            collectives=dict(sorted(counts.items())),
            kernels=text.count(_KERNEL),
            seconds=time.perf_counter() - started,
        )

    def lower(self, inputs: StepInputs, state: State, weights: Weights) -> Any:
        """The traced program, ready to be compiled."""
        held = handle_of(state, self._name).tree(self._name)
        arrays: list[Any] = []
        state_form = flatten(held, arrays)
        donated = tuple(range(len(arrays)))
        form = (tuple, state_form, flatten(inputs, arrays), flatten(weights, arrays))
        whole = self._runtime.traced(lambda tree, given, loaded: self._step(given, tree, loaded), form, self._told)
        held_arrays = len(donated)

        def step(*arrays: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
            """(outputs, state): the one the same on each chip, the other apart."""
            out = whole(*arrays)
            return out[:-held_arrays], out[-held_arrays:]

        lie = (tuple(spec_of(array) or SAME for array in arrays), (SAME, APART))
        return self._runtime.lowered(self._runtime.jit(step, donated, lie), arrays)

    def run(self, inputs: StepInputs, state: State, weights: Weights) -> tuple[StepOutputs, State]:
        if self._compiled is None:
            raise UnplannedProgram(f"{self._name} is run before it was prepared: call prepare() at start")
        if self._weights is None or self._weights[0] is not weights:
            flat: list[Any] = []
            gather(weights, flat)
            self._weights = (weights, flat)
        arrays: list[Any] = []
        gather(handle_of(state, self._name).take(self._name), arrays)
        gather(inputs, arrays)
        with self._runtime.memory_errors(self._name):
            out, held = self._compiled(*arrays, *self._weights[1])
        outputs, after = rebuild(self._told[-1], iter((*out, *held)), self._runtime.wrap)
        pools: Pools = after
        return outputs, StateHandle(pools)

    def describe(self) -> str:
        count = self._runtime.chips.count
        where = self._runtime.name if count == 1 else f"{count} chips at once, {self._runtime.name} the first"
        return f"one XLA program per step size on {where}, the state donated"


class XlaBuilder(ProgramBuilder):
    """Programs for prompts of one request, and for decodes of one token each, in every sampling shape."""

    def __init__(self, limits: BatchLimits, runtime: Runtime, growth: int, shapes: Sequence[SamplingShape]) -> None:
        """growth: how much larger each size is than the one before; shapes: of sampling, each a program per size."""
        self._limits, self._runtime, self._growth, self._shapes = limits, runtime, growth, tuple(shapes)
        self._sealed = False
        runtime.compiles.unseal()

    def buckets(self, max_tokens: int, max_requests: int) -> tuple[Bucket, ...]:
        return static_buckets(self._limits, max_tokens, max_requests, self._sizes, self._shapes)

    def build(self, step: StepFunction, bucket: Bucket) -> Program:
        if self._sealed:
            told = "build every program at start, before seal()"
            raise UnplannedProgram(f"a program of {name_of(bucket)} is built after serving began: {told}")
        return XlaProgram(step, bucket, self._runtime)

    def seal(self) -> None:
        self._sealed = True
        self._runtime.compiles.seal()

    def fingerprint(self) -> str:
        version = self._runtime.device.client.platform_version
        return f"tpu plugin, jax {jax.__version__}, {self._runtime.device.device_kind}, {version}"

    def _sizes(self, start: int, last: int) -> list[int]:
        """start, start * growth ... up to half of `last`, then `last`: one that is hardly larger serves as well."""
        sizes, size = [], start
        while 2 * size <= last:
            sizes.append(size)
            size *= self._growth
        return [*sizes, last]
