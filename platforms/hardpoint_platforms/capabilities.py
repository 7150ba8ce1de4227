"""What a device declares about itself. Denied by default: what is not declared is absent.

The core's scheduler obeys `BatchLimits` as data, so that no vendor needs a scheduler of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch


class ExecutionMode(Enum):
    """How a device runs a step."""

    EAGER = "eager"  # ops are called one by one
    CAPTURE = "capture"  # a step is recorded once per bucket and replayed on the same buffers
    COMPILE = "compile"  # a step is traced and compiled as a whole


@dataclass(frozen=True)
class BatchLimits:
    """What one step may hold. None means no limit of the device's own.

    Attributes:
        max_tokens: tokens of all requests together.
        max_requests: requests in one step.
        mixed: whether prefill and decode may share a step.
        max_prefill_requests: requests with more than one token in one step.
        prefill_chunk_multiple: a chunk that does not end its prompt is a multiple of this.
        token_buckets: the only token counts a step may be padded to, ascending; empty for any count.
        request_buckets: likewise for requests.
    """

    max_tokens: int | None = None
    max_requests: int | None = None
    mixed: bool = True
    max_prefill_requests: int | None = None
    prefill_chunk_multiple: int = 1
    token_buckets: tuple[int, ...] = ()
    request_buckets: tuple[int, ...] = ()


@dataclass(frozen=True)
class TuningChoice:
    """One thing that the device chose for this machine, shown at start-up and by `doctor`."""

    name: str  # "threads", "compute dtype", "NUMA"
    value: str
    reason: str  # "fp32 GEMM 31 GFLOP/s, bf16 7 GFLOP/s (measured, 40 ms)"


@dataclass(frozen=True)
class Capabilities:
    """Facts that the core plans with.

    Attributes:
        compute_dtypes: best first. "auto" takes the first one, or the model's own where that is listed and as wide.
        step_tokens: tokens of a step that keep the device busy: the default of --max-batch-tokens.
        kv_dtypes: dtypes of cached keys and values, best first.
        kv_as_computed: "auto" caches in the dtype that the model computes in, where that is listed.
        page_tokens: page sizes (tokens) that the attention kernels read, best first.
        mode: how steps run.
        functional_state: True where a step returns a new state and the old one must not be touched.
        unified_memory: device memory is host memory, so that pinned copies make no sense.
        max_context: longest sequence the kernels address, or None.
        limits: what one step may hold.
        tuning: choices made for this machine, for people to read.
        verified: whether this plugin was run on real hardware of this kind by its authors.
        computes: False where results mean nothing (a simulator).
        host_tensors: tensors of the device are plain host tensors, and hold what a call wrote when it returns: the core
            reads and writes its own in place.
    """

    compute_dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    step_tokens: int = 2048
    kv_dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    kv_as_computed: bool = False
    page_tokens: tuple[int, ...] = (16,)
    mode: ExecutionMode = ExecutionMode.EAGER
    functional_state: bool = False
    unified_memory: bool = False
    max_context: int | None = None
    limits: BatchLimits = field(default_factory=BatchLimits)
    tuning: tuple[TuningChoice, ...] = ()
    verified: bool = False
    computes: bool = True
    host_tensors: bool = False
