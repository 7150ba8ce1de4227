"""A stage: the layers of a model that run on one device, with their weights, their state and their programs.

Most models are one stage. Cut over several devices, the stages run one after another, each on batches padded to its
own device's buckets; what one hands to the next crosses through the host.

    stage 0 (embedding, layers 0-14)  --carried-->  stage 1 (layers 15-29, norm, logits, draw)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hardpoint.models.base import CausalModel
from hardpoint.worker.sampling_batch import no_draws
from hardpoint_platforms.batch import AttentionBatch, SamplingInputs
from hardpoint_platforms.device import Device
from hardpoint_platforms.ops.provider import AttentionPlanner
from hardpoint_platforms.program import (
    ANY_SIZE,
    Bucket,
    Footprint,
    Program,
    SamplingShape,
    StepFunction,
    StepInputs,
    StepOutputs,
    Weights,
)
from hardpoint_platforms.state_cache import CacheLayout, State


@dataclass(frozen=True)
class StageParts:
    """What a stage is made of. `planners` are those of its op table; `dtype` is that of its activations."""

    device: Device
    planners: tuple[AttentionPlanner, ...]
    model: CausalModel
    dtype: torch.dtype
    weights: Weights
    layout: CacheLayout
    state: State
    step: StepFunction


class Stage:
    """Owns the weights and the state of its layers. Used by one thread at a time."""

    def __init__(
        self, parts: StageParts, max_tokens: int, max_requests: int, draws: bool, progress: Callable[[str, float], None]
    ) -> None:
        """`draws`: whether it is the last one, which samples; `progress` gets (phase, share done)."""
        self.device = parts.device
        self.model = parts.model
        self.weights = parts.weights
        self.dtype = parts.dtype
        self._parts = parts
        self._state = parts.state
        self._builder = parts.device.programs()
        self._buckets = self._builder.buckets(max_tokens, max_requests) or (ANY_SIZE,)
        #: The sampling inputs of a stage that draws nothing.
        self.no_draws: SamplingInputs = no_draws(parts.device)
        if not draws:
            self._buckets = _one_sampling_shape(self._buckets)
        self._shaped = any(bucket.sampling is not SamplingShape.ANY for bucket in self._buckets)
        self._programs: dict[Bucket, Program] = {}
        for bucket in self._buckets:
            progress("programs", 0.0)
            self._programs[bucket] = self._builder.build(parts.step, bucket)

    @property
    def shaped(self) -> bool:
        """Whether any of its programs has sampling inputs of fixed shape."""
        return self._shaped

    @property
    def fixed_shapes(self) -> bool:
        """Whether all of its programs have sampling inputs of fixed shape."""
        return all(bucket.sampling is not SamplingShape.ANY for bucket in self._buckets)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Sizes of its programs, smallest first."""
        return self._buckets

    def footprint(self, bucket: Bucket, inputs: StepInputs) -> Footprint | None:
        """What the program of a bucket takes; compiles it, runs nothing."""
        return self._programs[bucket].footprint(inputs, self._state, self.weights)

    def bucket(self, tokens: int, requests: int, query: int, sampling: SamplingShape) -> Bucket:
        """The first bucket that a step fits. `query`: tokens of the request that brings most.

        Raises RuntimeError where none does: the device's batch limits promised more than its programs take.
        """
        for bucket in self._buckets:
            if bucket.fits(tokens, requests, query, sampling):
                return bucket
        raise RuntimeError(
            f"{self.device.info} has no program for {tokens} tokens of {requests} requests (at most {query} tokens of "
            f"one, {sampling.name} sampling), though its batch limits allow them"
        )

    def plans(self, batch: AttentionBatch) -> tuple[Any, ...]:
        """One plan per planner."""
        return tuple(planner.plan(batch) for planner in self._parts.planners)

    def run(self, bucket: Bucket, inputs: StepInputs) -> StepOutputs:
        """Run a step without waiting for the device."""
        outputs, self._state = self._programs[bucket].run(inputs, self._state, self.weights)
        return outputs

    def prepare(self, inputs_of: Callable[[Bucket], StepInputs], progress: Callable[[str, float], None]) -> None:
        """Make every program ready. Programs of any size are ready as they are."""
        sized = [(bucket, inputs_of(bucket)) for bucket in self._buckets if bucket != ANY_SIZE]
        for bucket, inputs in sized:
            self._programs[bucket].begin(inputs, self._state, self.weights)
        for done, (bucket, inputs) in enumerate(sized):
            progress("programs", done / len(sized))
            self._state = self._programs[bucket].prepare(inputs, self._state, self.weights)

    def seal(self) -> None:
        """Let no more programs be built: requests wait from now on."""
        self._builder.seal()

    def catch_up(self) -> bool:
        """Do a piece of what the device put off; whether any is left."""
        return self._builder.catch_up()

    def receive(self, carried: tuple[torch.Tensor, ...], bucket: Bucket, num_tokens: int) -> tuple[torch.Tensor, ...]:
        """What the stage before handed on, from its host copies: real tokens, then zeros up to the bucket."""
        moved = []
        for tensor in carried:
            rows = bucket.tokens or num_tokens
            padded = torch.zeros((rows, *tensor.shape[1:]), dtype=self._parts.dtype)
            padded[:num_tokens] = tensor[:num_tokens]
            moved.append(self.device.to_device(padded))
        return tuple(moved)

    def blank(self, tokens: int) -> tuple[torch.Tensor, ...]:
        """Stand-ins for what the stage before would hand on."""
        zeros = torch.zeros((tokens, self.model.hidden_size), dtype=self._parts.dtype)
        return tuple(self.device.to_device(zeros) for _ in range(self.model.takes))

    def describe(self) -> list[str]:
        """How steps run here, in the words of the device's programs."""
        return list(dict.fromkeys(filter(None, (program.describe() for program in self._programs.values()))))


def _one_sampling_shape(buckets: tuple[Bucket, ...]) -> tuple[Bucket, ...]:
    """The first of those that differ in their sampling shape alone."""
    first: dict[tuple[int, int, int], Bucket] = {}
    for bucket in buckets:
        first.setdefault((bucket.tokens, bucket.requests, bucket.query), bucket)
    return tuple(first.values())
