"""Programs that are traced before they run, run on one form of arguments alone, and watch every run."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hardpoint_platforms.capabilities import BatchLimits
from hardpoint_platforms.program import (
    Bucket,
    Program,
    ProgramBuilder,
    SamplingShape,
    StepFunction,
    StepInputs,
    StepOutputs,
    Weights,
)
from hardpoint_platforms.state_cache import State
from hardpoint_platforms.strict.errors import StrictViolation, UnplannedProgram
from hardpoint_platforms.strict.journal import Journal
from hardpoint_platforms.strict.ledger import Ledger
from hardpoint_platforms.strict.signature import (
    Signature,
    leaves,
    require_bucket,
    require_same,
    signature_of,
)
from hardpoint_platforms.strict.state import StateHandle, Tree, handle_of
from hardpoint_platforms.strict.static.buckets import SAMPLING_SHAPES, name_of, static_buckets
from hardpoint_platforms.strict.watch import Watch
from hardpoint_platforms.trees import mapped

#: How much larger each next size is, of prefills and of decodes.
STEP = 4
#: Where tensors seem to lie while a step is traced: a type that no build has, so that nothing of it runs by accident.
TRACED = torch.device("lazy", 0)


class StrictProgram(Program):
    """A step for one bucket."""

    def __init__(
        self,
        step: StepFunction,
        bucket: Bucket,
        journal: Journal,
        ledger: Ledger,
        traced: set[tuple[int, bool, int]] | None,
    ) -> None:
        """`traced`: which kinds of step were traced already (sizes alone do not make another); None to trace none."""
        self._step, self._bucket, self._traced = step, bucket, traced
        self._journal, self._ledger = journal, ledger
        self._signature: Signature | None = None
        self._name = f"the program of {name_of(bucket)}"

    def prepare(self, inputs: StepInputs, state: State, weights: Weights) -> State:
        """Trace the step on tensors without data, then run it once. Raises StrictViolation where that fails."""
        handle = handle_of(state, self._name)
        if self._signature is not None:
            raise UnplannedProgram(f"{self._name} was prepared already: prepare() is called once")
        require_bucket(self._bucket, inputs)
        tree = handle.tree(self._name)
        kind = (self._bucket.query, self._bucket.requests > 1, int(self._bucket.sampling))
        if self._traced is not None and kind not in self._traced:
            self._trace(inputs, tree, weights)
            self._traced.add(kind)
        self._signature = signature_of(inputs=inputs, state=tree, weights=weights)
        return self._run(inputs, handle, weights)[1]

    def run(self, inputs: StepInputs, state: State, weights: Weights) -> tuple[StepOutputs, State]:
        handle = handle_of(state, self._name)
        tree = handle.tree(self._name)
        if self._signature is None:
            raise UnplannedProgram(f"{self._name} is run before it was prepared: call prepare() at start")
        require_same(signature_of(inputs=inputs, state=tree, weights=weights), self._signature, self._name)
        return self._run(inputs, handle, weights)

    def describe(self) -> str:
        return "traced once, static shapes, watched"

    def _run(self, inputs: StepInputs, handle: StateHandle, weights: Weights) -> tuple[StepOutputs, StateHandle]:
        tree = handle.take(self._name)
        with torch.inference_mode():
            outputs, after = self._watched(inputs, tree, weights)
        for parts in after:
            for part in parts:
                self._ledger.hold(part)
        return outputs, handle.next(after)

    def _trace(self, inputs: StepInputs, tree: Tree, weights: Weights) -> None:
        with torch.inference_mode(), FakeTensorMode():

            def put(x: torch.Tensor) -> torch.Tensor:
                return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=TRACED)

            try:
                self._watched(*(mapped(part, put) for part in (inputs, tree, weights)))
            except StrictViolation:
                raise
            except Exception as error:
                # what torch itself says of a step that cannot be traced: .numpy(), shapes that do not fit ...
                told = str(error).strip().partition("\n")[0]
                where = self._journal.where(error)
                raise StrictViolation(
                    f"cannot be traced: {type(error).__name__} at {where}: {told}: "
                    "a step is made of tensor ops whose shapes follow from shapes"
                ) from error

    def _watched(self, inputs: StepInputs, tree: Tree, weights: Weights) -> tuple[StepOutputs, Tree]:
        self._journal.fresh()
        given: dict[str, Any] = {"inputs": inputs, "weights": weights, "state": tree}
        protected = {
            leaf.untyped_storage()._cdata: place
            for name, value in given.items()
            for place, leaf in leaves(value, name)
            if isinstance(leaf, torch.Tensor)
        }
        with Watch(self._journal, protected):
            outputs, after = self._step(inputs, StateHandle(tree), weights)
        return outputs, handle_of(after, "the end of the step").take("the end of the step")


class StrictBuilder(ProgramBuilder):
    """Prefill buckets of one request and decode buckets of one token each, in every shape of sampling."""

    def __init__(
        self,
        limits: BatchLimits,
        journal: Journal,
        ledger: Ledger,
        trace: bool = True,
        shapes: tuple[SamplingShape, ...] = SAMPLING_SHAPES,
    ) -> None:
        self._limits, self._journal, self._ledger, self._shapes = limits, journal, ledger, shapes
        self._sealed = False
        self._traced: set[tuple[int, bool, int]] | None = set() if trace else None

    def buckets(self, max_tokens: int, max_requests: int) -> tuple[Bucket, ...]:
        return static_buckets(self._limits, max_tokens, max_requests, _sizes, self._shapes)

    def build(self, step: StepFunction, bucket: Bucket) -> Program:
        if self._sealed:
            told = "build every program at start, before seal()"
            raise UnplannedProgram(f"a program of {name_of(bucket)} is built after serving began: {told}")
        return StrictProgram(step, bucket, self._journal, self._ledger, self._traced)

    def seal(self) -> None:
        self._sealed = True

    def fingerprint(self) -> str:
        return f"strict, torch {torch.__version__}"


def _sizes(start: int, last: int) -> list[int]:
    """start, start * STEP ... below `last`, then `last`."""
    sizes, size = [], start
    while size < last:
        sizes.append(size)
        size *= STEP
    return [*sizes, last]
