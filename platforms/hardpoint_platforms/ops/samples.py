"""What the samples of the contracts are made of: seeded tensors, tolerances, paged batches; and how to run a sample.

In a sample's arguments an `AttentionBatch` stands where the kernel takes a plan, because the plan is the provider's
own; `run` replaces it. A state stands as the tree of `DenseStateCache`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hardpoint_platforms.batch import AttentionBatch
from hardpoint_platforms.ops.contract import OpContract, Sample, Tolerance, Weight, WeightSpec
from hardpoint_platforms.ops.provider import OpProvider
from hardpoint_platforms.quant import Codes, Packing, QuantScheme, QuantTensor, Rounding, pack_uint4
from hardpoint_platforms.trees import mapped

#: One multiplication and one rounding apart.
POINTWISE = {
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.bfloat16: Tolerance(1e-2, 1.6e-2),
    torch.float16: Tolerance(1e-3, 2e-3),
}
#: Sums over hundreds of terms in another order.
SUMS = {
    torch.float32: Tolerance(2e-5, 1e-4),
    torch.bfloat16: Tolerance(3e-2, 2e-2),
    torch.float16: Tolerance(4e-3, 4e-3),
}


_VARIANT: ContextVar[int] = ContextVar("variant of the samples", default=0)


@contextmanager
def varied(variant: int) -> Iterator[None]:
    """Samples that are made inside have other numbers, of the same shapes: by their variant; 0 is as without.

    Their arguments stay of that variant wherever they are made.
    """
    token = _VARIANT.set(variant)
    try:
        yield
    finally:
        _VARIANT.reset(token)


class Source:
    """Seeded tensors on the CPU; two sources of one seed give the same sequence, within one variant."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed + 1_000_003 * _VARIANT.get())

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
        """Normal numbers times `scale`."""
        return (torch.randn(shape, generator=self._generator) * scale).to(dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        """Uniform float32 in [low, high)."""
        return torch.rand(shape, generator=self._generator) * (high - low) + low

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """int64 in [low, high)."""
        return torch.randint(low, high, shape, generator=self._generator)

    def matrix(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """A weight that keeps the size of what passes through it."""
        return self.normal(rows, columns, dtype=dtype, scale=columns**-0.5)


SCHEMES: Mapping[str, QuantScheme] = {
    scheme.name: scheme
    for scheme in (
        QuantScheme("q8_0", Packing.INT8, 8, 32),
        QuantScheme("q4_0", Packing.UINT4, 4, 32, offset=True),
        QuantScheme("q4_1", Packing.UINT4, 4, 32, offset=True),
        QuantScheme("q4_k", Packing.UINT4, 4, 32, super_group=8, offset=True),
        QuantScheme("q6_k", Packing.INT8, 6, 16, super_group=16),
        QuantScheme("nf4", Packing.UINT4, 4, 64, codebook=True),
        QuantScheme("gptq4", Packing.UINT4, 4, 128, offset=True),
        QuantScheme("fp8", Packing.FLOAT8, 8, 256, rounding=Rounding(Codes.FLOAT8)),
        QuantScheme("fp8_block", Packing.FLOAT8, 8, 128, group_rows=128, rounding=Rounding(Codes.FLOAT8, 128)),
        QuantScheme("int8", Packing.INT8, 8, 256, rounding=Rounding(Codes.INT8)),
    )
}


def quantized(source: Source, shape: Sequence[int], scheme: QuantScheme) -> QuantTensor:
    """A random weight in `scheme`, of about the size that `Source.matrix` gives."""
    *lead, columns = shape
    groups = columns // scheme.group
    highest = 1 << scheme.bits
    if scheme.packing is Packing.FLOAT8:
        # as many codes on either side, and as large, as integers have
        values = (source.normal(*shape) * highest / 4).clamp(-highest / 2, highest / 2).to(torch.float8_e4m3fn)
    elif scheme.packing is Packing.INT8:
        values = source.integers(-highest // 2, highest // 2, *shape).to(torch.int8)
    else:
        values = pack_uint4(source.integers(0, highest, *shape))
    unit = 4.0 / (highest * columns**0.5)
    codebook = source.normal(highest) * highest / 4 if scheme.codebook else None
    if not scheme.super_group:
        lead[-1] = -(-lead[-1] // scheme.group_rows)
        scales = source.uniform(*lead, groups, low=0.5 * unit, high=unit).half()
        offsets = scales * -(highest / 2) if scheme.offset else None
        return QuantTensor(scheme, tuple(shape), values, scales, offsets, codebook=codebook)
    outer = (*lead, groups // scheme.super_group)
    fine = source.integers(20, 64, *lead, groups).to(torch.uint8)
    coarse = source.uniform(*outer, low=unit / 80, high=unit / 63).half()
    return QuantTensor(
        scheme,
        tuple(shape),
        values,
        fine,
        fine.clone() if scheme.offset else None,
        coarse,
        coarse * -(highest / 2) if scheme.offset else None,
        codebook,
    )


def specs(weights: Mapping[str, Weight], dtype: torch.dtype) -> dict[str, WeightSpec]:
    """What is known of weights before loading, for `OpContract.instance`."""
    return {
        name: WeightSpec(weight.shape, dtype, weight.scheme)
        if isinstance(weight, QuantTensor)
        else WeightSpec(tuple(weight.shape), weight.dtype)
        for name, weight in weights.items()
    }


def sample(
    contract: OpContract,
    where: str,
    dtype: torch.dtype,
    make: Callable[[Source], tuple[Any, ...]],
    weights: Mapping[str, Weight] | None = None,
    seed: int = 1,
    **attrs: Any,
) -> Sample:
    """A sample whose arguments are made anew, and alike, at each call."""
    given, variant = weights or {}, _VARIANT.get()
    instance = contract.instance(where, dtype, specs(given, dtype), **attrs)

    def arguments() -> tuple[Any, ...]:
        with varied(variant):
            return make(Source(seed))

    return Sample(instance, given, arguments)


def run(provider: OpProvider, case: Sample, device: torch.device | None = None) -> Any:
    """Pack the weights, plan the batches, call the kernel on `device` (the CPU if None)."""
    where = device or torch.device("cpu")
    weights = {name: mapped(weight, lambda tensor: tensor.to(where)) for name, weight in case.weights.items()}
    packed = provider.pack(case.instance, weights)
    arguments = [_prepared(argument, provider, where) for argument in case.make()]
    if weights:
        arguments.append(packed)
    return provider.build(case.instance)(*arguments)


def _prepared(argument: Any, provider: OpProvider, device: torch.device) -> Any:
    if isinstance(argument, AttentionBatch):
        planner = provider.planner()
        if planner is None:
            raise TypeError(f"{provider.name} takes a plan for {provider.op} but has no planner")
        return planner.plan(argument)
    return mapped(argument, lambda tensor: tensor.to(device))


@dataclass(frozen=True)
class PagedRows:
    """Requests of a paged batch: (tokens cached before, new tokens) of each; then padding.

    `windows` has one entry per cache group: pages that slid out of it are 0.
    """

    rows: tuple[tuple[int, int], ...]
    page_tokens: int = 4
    extra_tokens: int = 0
    extra_requests: int = 0
    windows: tuple[int | None, ...] = (None,)

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch, padding included."""
        return sum(new for _, new in self.rows) + self.extra_tokens

    @property
    def num_pages(self) -> int:
        """Pages that the pool needs, page 0 included."""
        return 1 + len(self.windows) * sum(_pages(old + new, self.page_tokens) for old, new in self.rows)

    def batch(self, seed: int = 7) -> AttentionBatch:
        """The batch, its pages in random order."""
        free = list(1 + np.random.default_rng(seed).permutation(self.num_pages - 1))
        lengths = [old + new for old, new in self.rows] + [0] * self.extra_requests
        news = [new for _, new in self.rows] + [0] * self.extra_requests
        tables, slots = [], []
        for window in self.windows:
            table = np.zeros((len(lengths), max(1, _pages(max(lengths), self.page_tokens))), np.int32)
            slot: list[int] = []
            for row, (old, new) in enumerate(self.rows):
                for page in range(_pages(old + new, self.page_tokens)):
                    gone = window is not None and (page + 1) * self.page_tokens <= old - window + 1
                    table[row, page] = 0 if gone else free.pop()
                at = np.arange(old, old + new)
                slot += list(table[row, at // self.page_tokens] * self.page_tokens + at % self.page_tokens)
            slot += [i % self.page_tokens for i in range(self.extra_tokens)]
            tables.append(table)
            slots.append(np.array(slot, np.int32))
        return AttentionBatch(
            query_start=np.cumsum([0, *news]).astype(np.int32),
            sequence_lengths=np.array(lengths, np.int32),
            page_tables=tuple(tables),
            slot_mapping=tuple(slots),
            page_tokens=self.page_tokens,
            num_requests=len(self.rows),
            num_tokens=self.num_tokens - self.extra_tokens,
        )


def _pages(tokens: int, page_tokens: int) -> int:
    return -(-tokens // page_tokens)
