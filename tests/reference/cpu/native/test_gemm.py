"""Linear layers and experts of the kernel library: every packing, every tail, and a row's bits in any company.

Fast mode rounds activations to int8 per 16 columns. The tests round the same way and multiply in float64, so that what
is left is the error of float32 sums.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hardpoint.weights.gguf.ggml_types import GGML_TYPES, GgmlType
from hardpoint.weights.gguf.quants import convert, scheme_of
from hardpoint_cpu.native.abi import Code
from hardpoint_cpu.native.dense import NativeLinear
from hardpoint_cpu.native.moe import NativeExperts
from hardpoint_cpu.native.provider import Setting
from hardpoint_cpu.native.stage import Stage
from hardpoint_cpu.native.weights import is_laid_out, matrix_of
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Weight
from hardpoint_platforms.ops.samples import SCHEMES, Source, quantized, run
from hardpoint_platforms.quant import Packing, QuantScheme, QuantTensor
from hardpoint_platforms.reference.providers import reference_providers

pytestmark = pytest.mark.reference

REFERENCE = {provider.op: provider for provider in reference_providers()}
BATCHES = (1, 2, 3, 4, 5, 7, 8, 31, 64, 65, 300)
BLOCK = 16  # activations that share a scale
QUANTIZED = [kind for kind in GGML_TYPES.values() if kind.usable and scheme_of(kind) is not None]
#: Schemes beyond those of the samples: groups of half a block, of several blocks, of a whole row, and of no block.
OTHERS = (
    QuantScheme("int4 by 16", Packing.UINT4, 4, 16, offset=True),
    QuantScheme("int4 by 64", Packing.UINT4, 4, 64, offset=True),
    QuantScheme("int4 by 128", Packing.UINT4, 4, 128, offset=True),
    QuantScheme("int8 by 32, offsets", Packing.INT8, 8, 32, offset=True),
    QuantScheme("int5 by 16, two levels, offsets", Packing.INT8, 5, 16, super_group=2, offset=True),
    QuantScheme("int5 by 32", Packing.INT8, 5, 32),
    QuantScheme("int8 by row", Packing.INT8, 8, 1 << 20),
    QuantScheme("int8 codebook", Packing.INT8, 8, 32, codebook=True),
    QuantScheme("int4 by 48", Packing.UINT4, 4, 48),
)
BY_NAME = {**SCHEMES, **{scheme.name: scheme for scheme in OTHERS}}


class Packed:
    """One hp_weight, freed with the object."""

    def __init__(self, stage: Stage, weight: Weight, exact: bool = False) -> None:
        self.stage, self.weight = stage, weight
        matrix, self._kept = matrix_of(weight)
        self.handle = stage.library.c.hp_weight_new(stage.pool.handle, ctypes.addressof(matrix), int(exact))
        assert self.handle
        self.layout: str = stage.library.c.hp_weight_layout(self.handle).decode()
        self.bytes: int = stage.library.c.hp_weight_bytes(self.handle)

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.stage.library.c.hp_weight_free(self.handle)

    def __call__(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        stage: Stage | None = None,
    ) -> torch.Tensor:
        rows, (outputs, inputs) = x.shape[0], self.weight.shape
        out = torch.full((rows, outputs + 3), 7.0)
        if residual is not None:
            out[:, :outputs] = residual  # in place
        integers = (inputs, outputs, x.stride(0), outputs + 3)
        pointers = (x, self.handle, bias, out, None if residual is None else out)
        (stage or self.stage).call(Code.LINEAR, rows, pointers, integers)
        assert (out[:, outputs:] == 7.0).all(), "nothing behind a row is written"
        return out[:, :outputs].contiguous()


def normal(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes, with NaN between them."""
    source = Source(seed)
    whole = torch.full((rows, columns + 5), float("nan"))
    whole[:, :columns] = source.normal(rows, columns) * source.uniform(rows, 1, low=0.01, high=10.0)
    return whole[:, :columns]


def rounded(x: torch.Tensor) -> torch.Tensor:
    """What the kernels make of activations, in float64."""
    rows, columns = x.shape
    blocks = torch.nn.functional.pad(x, (0, -columns % BLOCK)).reshape(rows, -1, BLOCK)
    most = blocks.abs().amax(-1, keepdim=True)
    inverse = torch.where(most > 0, 127 / most, torch.zeros(()))
    codes = (blocks * inverse).round()
    return (codes.double() * (most * torch.tensor(1 / 127)).double()).reshape(rows, -1)[:, :columns]


def parts(weight: Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight in float64, and the size of what is added up for it: offsets apart from codes."""
    if not isinstance(weight, QuantTensor):
        return weight.double(), weight.double().abs()
    plain = weight.dequantize().double()
    if weight.offsets is None:
        return plain, plain.abs()
    codes = replace(weight, offsets=None, super_offsets=None).dequantize().double()
    return plain, codes.abs() + (plain - codes).abs()


def check(ours: torch.Tensor, weight: Weight, x: torch.Tensor, added: torch.Tensor | float = 0.0) -> None:
    """Against float64, each number within the rounding of its own terms."""
    plain, size = parts(weight)
    wanted = x.double() @ plain.T + added
    terms = weight.shape[-1] ** 0.5 + 8
    bound = (x.double().abs() @ size.T + torch.as_tensor(added).abs() + 1e-30) * terms * 2.0**-24
    worst = ((ours.double() - wanted).abs() / bound).max().item()
    assert worst < 1.0, f"{worst:.2f} times what rounding explains"


def make(scheme: QuantScheme, rows: int, columns: int, seed: int = 3) -> QuantTensor:
    """A random weight; a group larger than the row covers the row."""
    fitted = replace(scheme, group=min(scheme.group, columns))
    weight = quantized(Source(seed), (rows, columns), fitted)
    book = weight.codebook
    # What the kernels round to int8 is integers here, so that there is nothing to round.
    return weight if book is None else replace(weight, codebook=(book * 100 / book.abs().max()).round())


@pytest.fixture(params=("best", "baseline"))
def variant(request: pytest.FixtureRequest, stages: Callable[[int], Stage]) -> Iterator[Stage]:
    """One thread, in each variant that runs here."""
    stage = stages(1)
    stage.library.use(None if request.param == "best" else "baseline")
    yield stage
    stage.library.use()


@pytest.mark.parametrize("op", ["linear", "experts"])
def test_samples_agree_with_the_reference_in_exact_mode(op: str, stage: Stage) -> None:
    provider = {"linear": NativeLinear, "experts": NativeExperts}[op](Setting(stage, exact=True))
    tolerance, checked = CONTRACTS[op].tolerance[torch.float32], 0
    for case in CONTRACTS[op].samples(torch.float32):
        if not provider.supports(case.instance):
            continue  # see test_eight_bits.py
        ours, theirs = run(provider, case), run(REFERENCE[op], case)
        torch.testing.assert_close(ours, theirs, atol=tolerance.atol, rtol=tolerance.rtol, msg=case.instance.where)
        checked += 1
    assert checked >= 8


@pytest.mark.parametrize("name", [name for name, scheme in BY_NAME.items() if is_laid_out(scheme)])
def test_every_scheme_at_odd_numbers_of_rows(name: str, variant: Stage) -> None:
    scheme = BY_NAME[name]
    for rows, columns in ((1, 768), (7, 256), (16, 512), (33, 768), (90, 256)):
        if scheme.group < columns and columns % scheme.group:
            continue
        weight = make(scheme, rows, columns)
        fast, exact = Packed(variant, weight), Packed(variant, weight, exact=True)
        integer = scheme.group != 48
        assert fast.layout.startswith(("u4", "table4", "u5", "u6", "i8")) == integer
        assert exact.layout == "f32 x16"
        for batch in (1, 6, 30):
            x = normal(batch, columns, batch)
            check(fast(x), weight, rounded(x) if integer else x)
            check(exact(x), weight, x)


def file_weight(kind: GgmlType, rows: int, columns: int) -> QuantTensor:
    """Random blocks of a file, without those that are no numbers or enormous."""
    rng = np.random.default_rng(5)
    data = rng.integers(0, 256, (rows * columns // kind.block, kind.bytes), dtype=np.uint8)
    if kind.name == "MXFP4":
        data[:, 0] = rng.integers(110, 140, len(data))
    weight = convert(kind, (rows, columns), data.reshape(-1))
    assert isinstance(weight, QuantTensor)
    wild = ~(weight.dequantize().abs().reshape(len(data), -1).amax(-1) < 1e4).numpy()
    data[wild] = data[np.flatnonzero(~wild)[0]]
    weight = convert(kind, (rows, columns), data.reshape(-1))
    assert isinstance(weight, QuantTensor)
    return weight


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_blocks_of_files(kind: GgmlType, variant: Stage) -> None:
    """Random bytes reach every code, scale and sign."""
    rows, columns = 35, 512
    weight = file_weight(kind, rows, columns)
    for batch in (1, 13):
        x = normal(batch, columns)
        check(Packed(variant, weight)(x), weight, rounded(x))
        check(Packed(variant, weight, exact=True)(x), weight, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_plain_weights_of_every_width(dtype: torch.dtype, variant: Stage) -> None:
    for rows, columns in ((1, 1), (5, 3), (16, 33), (17, 100), (40, 576)):
        weight = Source(4).matrix(rows, columns, dtype)
        packed = Packed(variant, weight)
        assert packed.layout == f"{ {torch.float32: 'f32', torch.float16: 'f16', torch.bfloat16: 'bf16'}[dtype] } x16"
        for batch in (1, 4, 13):
            x = normal(batch, columns, batch)
            check(packed(x), weight, x)


@pytest.mark.parametrize("name", ["q4_1", "q8_0", "q6_k", "int8 by row", "int4 by 16"])
def test_columns_that_end_inside_a_block(name: str, variant: Stage) -> None:
    scheme = replace(BY_NAME[name], super_group=0)
    for columns in (16, 48, 112) if scheme.group == 16 else (2, 30, 34, 96):
        if scheme.group < columns and columns % scheme.group:
            continue
        weight = make(scheme, 20, columns)
        x = normal(5, columns)
        check(Packed(variant, weight)(x), weight, rounded(x))


@pytest.mark.parametrize("name", ["q4_0", "q6_k", "plain"])
def test_bias_and_residual(name: str, variant: Stage) -> None:
    rows, columns = 35, 256
    weight: Weight = (
        Source(2).matrix(rows, columns, torch.float32) if name == "plain" else make(BY_NAME[name], rows, columns)
    )
    source, x, packed = Source(6), normal(6, columns), Packed(variant, weight)
    bias, residual = source.normal(rows), source.normal(6, rows)
    seen = x if name == "plain" else rounded(x)
    check(packed(x, bias), weight, seen, bias.double())
    check(packed(x, None, residual), weight, seen, residual.double())
    both = packed(x, bias, residual)
    check(both, weight, seen, bias.double() + residual.double())
    assert torch.equal(both, (packed(x) + bias) + residual)


def families() -> dict[str, Weight]:
    """A weight of every inner loop."""
    names = ["q8_0", "q4_0", "q4_1", "q4_k", "q6_k", "nf4", "int4 by 16", "int8 by 32, offsets", "int8 by row"]
    names += ["int5 by 32", "int5 by 16, two levels, offsets"]
    made: dict[str, Weight] = {name: make(BY_NAME[name], 53, 512) for name in names}
    made["small codebook"] = replace(make(BY_NAME["nf4"], 53, 512), codebook=torch.linspace(-32, 32, 16).round())
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        made[str(dtype)] = Source(8).matrix(53, 512, dtype)
    return made


FAMILIES = families()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_has_the_same_bits_in_any_company(name: str, variant: Stage, stages: Callable[[int], Stage]) -> None:
    packed, x = Packed(variant, FAMILIES[name]), normal(max(BATCHES), 512)
    alone = torch.cat([packed(x[row : row + 1]) for row in range(max(BATCHES))])
    for batch in BATCHES:
        for threads in (1, 2, 3):
            assert torch.equal(packed(x[-batch:], stage=stages(threads)), alone[-batch:]), (batch, threads)


@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_picked_at_random_keep_their_bits(data: st.DataObject, stages: Callable[[int], Stage]) -> None:
    weight = FAMILIES[data.draw(st.sampled_from(sorted(FAMILIES)))]
    packed = Packed(stages(data.draw(st.integers(1, 3))), weight)
    x = normal(80, 512, 9)
    picked = data.draw(st.lists(st.integers(0, 79), min_size=1, max_size=80))
    assert torch.equal(packed(x[picked].contiguous()), packed(x)[picked])


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_no_number_stays_in_its_row(name: str, variant: Stage) -> None:
    packed, x = Packed(variant, FAMILIES[name]), normal(9, 512)
    clean = packed(x)
    for bad in (float("nan"), float("inf"), float("-inf")):
        spoilt = x.clone()
        spoilt[4, 100] = bad
        ours = packed(spoilt)
        assert not ours[4].isfinite().any()
        assert torch.equal(ours[[0, 1, 2, 3, 5, 6, 7, 8]], clean[[0, 1, 2, 3, 5, 6, 7, 8]])
    zeros = torch.zeros(2, 512)
    assert (packed(zeros) == 0).all()
    tiny = packed(torch.full((1, 512), 1e-38))
    assert tiny.isfinite().all()


def test_weights_take_the_memory_of_their_file(stages: Callable[[int], Stage]) -> None:
    """Bits per weight, at most, of 1,024 x 1,024."""
    limits = {"Q4_0": 4.5, "Q4_1": 5.0, "Q5_0": 5.5, "Q5_1": 6.0, "Q8_0": 8.5, "Q4_K": 4.63, "Q5_K": 5.63}
    limits |= {"Q6_K": 6.57, "Q2_K": 5.13, "Q3_K": 4.6, "IQ4_NL": 4.5, "IQ4_XS": 4.32, "MXFP4": 4.5, "TQ2_0": 4.07}
    kinds = {kind.name: kind for kind in QUANTIZED}
    for name, limit in limits.items():
        packed = Packed(stages(1), file_weight(kinds[name], 1024, 1024))
        assert packed.bytes * 8 / 2**20 <= limit, (name, packed.layout, packed.bytes * 8 / 2**20)


def test_a_codebook_of_fractions_is_rounded_to_one_part_in_254(variant: Stage) -> None:
    weight = quantized(Source(3), (20, 256), SCHEMES["nf4"])
    book = weight.codebook
    assert book is not None
    unit = book.abs().max() / 127
    near, x = replace(weight, codebook=(book / unit).round() * unit), normal(3, 256)
    check(Packed(variant, weight)(x), near, rounded(x))
    check(Packed(variant, weight, exact=True)(x), weight, x)


def test_what_cannot_be_read_is_refused(stages: Callable[[int], Stage]) -> None:
    stage = stages(2)
    good, kept = matrix_of(make(SCHEMES["q4_k"], 16, 256))
    wrong: dict[str, int | None] = {"rows": 0, "columns": -3, "values": None, "scales": None, "packing": 5}
    wrong |= {"super_group": 0, "scales_dtype": 9}
    for name, value in wrong.items():
        matrix = type(good).from_buffer_copy(good)
        setattr(matrix, name, value)
        assert not stage.library.c.hp_weight_new(stage.pool.handle, ctypes.addressof(matrix), 0), name
    integers, _ = matrix_of(torch.zeros(4, 4, dtype=torch.int8))
    assert not stage.library.c.hp_weight_new(stage.pool.handle, ctypes.addressof(integers), 0)
    stage.library.c.hp_weight_free(None)
    del kept


class Experts:
    """A layer of 6 experts in one scheme, and what it gives."""

    hidden, inner, count = 256, 64, 6

    def __init__(self, stage: Stage, scheme: str, gated: bool = True, on_input: bool = False) -> None:
        self.stage, self.gated, self.on_input = stage, gated, on_input
        up = 2 * self.inner if gated else self.inner

        def weight(rows: int, columns: int, seed: int) -> Packed:
            if scheme == "plain":
                return Packed(stage, Source(seed).matrix(rows, columns, torch.bfloat16))
            return Packed(stage, make(replace(BY_NAME[scheme], super_group=0), rows, columns, seed))

        self.up = [weight(up, self.hidden, seed) for seed in range(self.count)]
        self.down = [weight(self.hidden, self.inner, 50 + seed) for seed in range(self.count)]
        self.bias = (Source(1).normal(self.count, up), Source(2).normal(self.count, self.hidden))

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, threads: Stage) -> torch.Tensor:
        out = torch.full((x.shape[0], self.hidden), 7.0)
        handles = [torch.tensor([packed.handle for packed in part]) for part in (self.up, self.down)]
        pointers = (x, weights, ids, *handles, out, *self.bias)
        shape = (self.hidden, self.inner, self.count, ids.shape[1], 0, int(self.gated), int(self.on_input))
        threads.call(Code.EXPERTS, x.shape[0], pointers, shape)
        return out

    def expected(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """One assignment at a time, of the same linear layers."""
        out = torch.zeros(x.shape[0], self.hidden)
        for row, slot in np.ndindex(*ids.shape):
            expert = int(ids[row, slot])
            if not 0 <= expert < self.count:
                continue
            factor = weights[row, slot]
            h = self.up[expert](
                (x[row : row + 1] * (factor if self.on_input else 1.0)).contiguous(), self.bias[0][expert]
            )
            h = torch.nn.functional.silu(h[:, : self.inner]) * (h[:, self.inner :] if self.gated else 1.0)
            y = self.down[expert](h.contiguous(), self.bias[1][expert])[0]
            out[row] += y if self.on_input else y * factor
        return out


@pytest.mark.parametrize(
    ("scheme", "gated", "on_input"),
    [
        ("q4_1", True, False),
        ("q8_0", False, False),
        ("nf4", True, True),
        ("int4 by 16", True, False),
        ("int5 by 32", True, False),
        ("q6_k", True, True),
        ("plain", True, True),
    ],
)
def test_experts_are_their_linear_layers(
    scheme: str, gated: bool, on_input: bool, variant: Stage, stages: Callable[[int], Stage]
) -> None:
    layer, source = Experts(variant, scheme, gated, on_input), Source(3)
    x, weights = source.normal(40, 256), source.uniform(40, 3)
    ids = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(k))[:3] for k in range(40)])
    ids[7] = torch.tensor([2, -1, 6])  # experts of other ranks
    whole = layer(x, weights, ids, stages(2))
    torch.testing.assert_close(whole, layer.expected(x, weights, ids), atol=2e-5, rtol=1e-4)
    for threads in (1, 3):
        assert torch.equal(layer(x, weights, ids, stages(threads)), whole)
    for row in (0, 7, 39):
        assert torch.equal(
            layer(x[row : row + 1], weights[row : row + 1], ids[row : row + 1], stages(2)), whole[row : row + 1]
        )


def test_experts_of_many_tokens_go_in_rounds(stages: Callable[[int], Stage]) -> None:
    layer, source = Experts(stages(2), "q4_0"), Source(3)
    x, weights, ids = source.normal(1400, 256), source.uniform(1400, 3), source.integers(0, 6, 1400, 3)
    whole = layer(x, weights, ids, stages(2))
    assert torch.equal(layer(x[1350:], weights[1350:], ids[1350:], stages(3)), whole[1350:])
    assert (layer(x[:2], weights[:2], torch.full((2, 3), -1), stages(2)) == 0).all()
