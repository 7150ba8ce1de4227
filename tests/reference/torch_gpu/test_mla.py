"""Latent attention in Triton beyond the contract's samples: rows cut into pieces, tiles of heads, slices, odd sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hardpoint_torch_gpu import mla
from hardpoint_torch_gpu.kernels import mla_decode as decode
from hardpoint_torch_gpu.kernels.latents import latent_shape
from hardpoint_torch_gpu.kernels.mla_expanded import expanded_shape
from hardpoint_torch_gpu.latent_plan import LatentPlan, LatentPlanner
from hardpoint_torch_gpu.limits import Limits
from hardpoint_torch_gpu.mla import TritonMla
from hardpoint_torch_gpu.plan import TILE as QUERIES
from hardpoint_torch_gpu.plan import GpuPlan, GpuPlanner
from hardpoint_torch_gpu.seams import Seam

from hardpoint_platforms.binding import ask
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Sample
from hardpoint_platforms.ops.samples import PagedRows, Source, run, sample
from hardpoint_platforms.reference.platform import ReferenceDevice
from hardpoint_platforms.reference.providers import reference_providers

pytestmark = [
    pytest.mark.reference,
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter, on the host"),
]

CONTRACT = CONTRACTS["mla_attention"]
REFERENCE = next(provider for provider in reference_providers() if provider.op == "mla_attention")


@dataclass(frozen=True)
class Model:
    """Sizes of a latent attention."""

    heads: int
    nope: int
    rope: int
    value: int
    latent: int


SMALL = Model(4, 24, 8, 16, 32)
ODD = Model(3, 7, 5, 9, 37)
MANY = Model(70, 12, 16, 12, 48)


def case(model: Model, rows: PagedRows, dtype: torch.dtype = torch.float32) -> Sample:
    """An op of these sizes over a random cache."""

    def make(s: Source) -> tuple[Any, ...]:
        tokens = rows.num_tokens
        layer = tuple(s.normal(rows.num_pages, rows.page_tokens, 1, n, dtype=dtype) for n in (model.latent, model.rope))
        return (
            s.normal(tokens, model.heads, model.nope, dtype=dtype),
            s.normal(tokens, model.heads, model.rope, dtype=dtype),
            s.normal(tokens, model.latent, dtype=dtype),
            s.normal(tokens, model.rope, dtype=dtype),
            (layer,),
            rows.batch(),
        )

    weight = Source(3).matrix(model.heads * (model.nope + model.value), model.latent, dtype)
    return sample(
        CONTRACT,
        "here",
        dtype,
        make,
        {"kv_b": weight},
        heads=model.heads,
        nope_dim=model.nope,
        rope_dim=model.rope,
        v_head_dim=model.value,
        latent_dim=model.latent,
        scale=(model.nope + model.rope) ** -0.5,
    )


PLANNER = GpuPlanner(ReferenceDevice().upload)


def provider() -> TritonMla:
    return TritonMla(PLANNER)


def agree(one: Sample, ours_is: TritonMla | None = None) -> None:
    """Result and cache are the reference's, but for page 0, where padding is kept."""
    with torch.inference_mode():
        (ours, state), (theirs, wanted) = run(ours_is or provider(), one), run(REFERENCE, one)
    close = CONTRACT.tolerance[one.instance.dtype]
    torch.testing.assert_close(ours, theirs, atol=close.atol, rtol=close.rtol)
    for part, expected in zip(state[0], wanted[0], strict=True):
        assert torch.equal(part[1:], expected[1:]), "what is stored"


@pytest.mark.parametrize("rows", [((400, 1), (3, 1)), ((399, 1), (150, 1), (0, 1))], ids=["two rows", "three rows"])
@pytest.mark.parametrize("processors", [1, 200], ids=["whole parts", "pieces of parts"])
def test_rows_in_pieces_are_joined(
    monkeypatch: pytest.MonkeyPatch, rows: tuple[tuple[int, int], ...], processors: int
) -> None:
    """A GPU with many multiprocessors has more pieces, and more programs join them."""
    monkeypatch.setattr(decode, "processors", lambda device: processors)
    assert decode._split(67, torch.device("cpu")) == (4 if processors == 200 else 1)
    agree(case(SMALL, PagedRows(rows, 16)))


def test_which_programs_join_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "processors", lambda device: 132)
    device = torch.device("cpu")
    assert decode._join_shape(66, 16, 512, device) == (1, 64)  # one row: each program has a part of one head
    assert decode._join_shape(128, 16, 512, device) == (1, 256)
    assert decode._join_shape(1088, 128, 512, device) == (128, 512)


@pytest.mark.parametrize("model", [ODD, MANY], ids=["odd sizes", "two tiles of heads"])
@pytest.mark.parametrize(
    "rows",
    [PagedRows(((6, 1), (40, 1)), 8), PagedRows(((0, 4), (37, 1), (5, 3)), 8, 1, 1)],
    ids=["decode", "mixed with padding"],
)
def test_other_sizes(model: Model, rows: PagedRows) -> None:
    agree(case(model, rows))


def test_a_prompt_of_several_tiles_after_what_is_cached() -> None:
    agree(case(Model(2, 8, 8, 8, 16), PagedRows(((19, 131),), 16)))


@pytest.mark.parametrize(
    "rows",
    [
        PagedRows(((0, 140), (0, 2)), 16),
        PagedRows(((0, 9), (12, 1), (5, 7), (0, 33), (0, 1)), 8, 1, 1),
        PagedRows(((0, 6),), 8, 2, 1),
    ],
    ids=["prompts alone", "among all kinds of rows", "padding alone beside"],
)
@pytest.mark.parametrize("model", [Model(2, 24, 8, 16, 32), ODD], ids=["small", "odd sizes"])
def test_prompts_with_nothing_before_them_are_expanded(
    monkeypatch: pytest.MonkeyPatch, rows: PagedRows, model: Model
) -> None:
    called: list[int] = []
    real = mla.mla_expanded
    monkeypatch.setattr(mla, "mla_expanded", lambda *given: called.append(len(given)) or real(*given))
    agree(case(model, rows), TritonMla(LatentPlanner(ReferenceDevice().upload)))
    assert called


def test_which_prompts_are_expanded() -> None:
    planner = LatentPlanner(ReferenceDevice().upload)

    def plan(*rows: tuple[int, int]) -> GpuPlan:
        return planner.plan(PagedRows(rows, 16).batch())

    for rows in (((7, 1), (0, 1)), ((7, 3), (0, 1))):
        assert not isinstance(plan(*rows), LatentPlan)
    mixed = plan((7, 3), (0, 300), (0, 1), (0, 2))
    assert isinstance(mixed, LatentPlan)
    fresh = list(zip(mixed.fresh.rows.tolist(), mixed.fresh.firsts.tolist(), strict=True))
    assert sorted(fresh) == [(1, 0), (1, QUERIES), (1, 2 * QUERIES), (3, 0)]
    assert mixed.rest is not None
    assert mixed.rest.tile_rows.tolist() == [0]
    assert torch.equal(mixed.rest.parts, mixed.parts)
    assert sorted(mixed.tile_rows.tolist()) == [0, 1, 1, 1, 3]
    alone = plan((0, 2), (0, 5))
    assert isinstance(alone, LatentPlan)
    assert alone.rest is None


@pytest.mark.parametrize("held", [65536, 101376, 166912, 232448])
def test_what_an_expanded_prompt_holds_fits_into_shared_memory(held: int) -> None:
    tile, block, _, stages = expanded_shape(Limits(held), 128 + 64, 128, torch.bfloat16)
    assert (tile * 192 + stages * block * 320) * 2 <= held
    assert QUERIES % tile == 0
    assert (tile, block) == ((64, 32) if held == 65536 else (128, 32) if held == 101376 else (128, 64))


def test_heads_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Absorbed queries of long prompts with many heads are made some heads at a time."""
    monkeypatch.setattr(mla, "_SCRATCH", 9 * 32 * 3)
    assert [list(range(4))[part] for part in mla._slices(9, 4, 32)] == [[0, 1, 2], [3]]
    agree(case(SMALL, PagedRows(((2, 8), (11, 1)))))


def test_rows_of_padding_in_a_decode_change_nothing() -> None:
    """As many tokens as requests: a graph's batch, whose last row is nobody's."""
    one = case(SMALL, PagedRows(((6, 1), (9, 1)), extra_tokens=1, extra_requests=1))
    before = one.make()[4][0]
    with torch.inference_mode():
        out, state = run(provider(), one)
    assert not out[2].any()
    for part, old in zip(state[0], before, strict=True):
        assert torch.equal(part[0], old[0])
    agree(one)


def test_a_cache_of_another_dtype() -> None:
    one = case(SMALL, PagedRows(((6, 1), (0, 5))), torch.float16)

    def wide(make: Any = one.make) -> tuple[Any, ...]:
        *given, state, batch = make()
        return *given, tuple(tuple(part.float() for part in layer) for layer in state), batch

    agree(replace(one, make=wide))


def test_at_a_seam_it_is_made_with_the_plan_of_the_run() -> None:
    """A step recorded in pieces brings a plan only when it runs."""
    one = case(SMALL, PagedRows(((6, 1), (0, 5)), extra_tokens=1, extra_requests=1))

    class Run(Seam):
        calls = 0

        def cut(self, call: Callable[[Any], None]) -> None:
            self.calls += 1
            call(PLANNER.plan(one.make()[-1]))

    seam = Run()
    ours = provider()
    with torch.inference_mode():
        *given, state, _ = one.make()
        out, _ = ours.build(one.instance)(*given, state, seam, ours.pack(one.instance, one.weights))
        wanted, _ = run(ours, one)
    assert seam.calls == 1
    assert torch.equal(out, wanted)


def test_too_wide_latents_are_refused() -> None:
    instance = case(SMALL, PagedRows(((6, 1),))).instance
    wide = replace(instance, attrs={**instance.attrs, "latent_dim": 1024})
    assert "1024" in ask(CONTRACT, provider(), wide).reason


def test_a_quantized_weight_is_dequantized_and_this_is_said() -> None:
    packed = next(one for one in CONTRACT.samples(torch.float32) if one.instance.where == "q8_0")
    assert "q8_0, dequantized at load" in ask(CONTRACT, provider(), packed.instance).reason
    keys, values = provider().pack(packed.instance, packed.weights)
    attrs = packed.instance.attrs
    assert keys.shape == (attrs["heads"], attrs["nope_dim"], attrs["latent_dim"])
    assert values.shape == (attrs["heads"], attrs["v_head_dim"], attrs["latent_dim"])


@pytest.mark.parametrize("held", [65536, 101376, 166912, 232448])
@pytest.mark.parametrize("rows", [16, 32, 128])
def test_what_a_program_holds_fits_into_shared_memory(held: int, rows: int) -> None:
    shape = latent_shape(Limits(held), rows, 576, torch.bfloat16)
    loaded = 2 if shape.stages > 1 else 1
    assert (shape.tile + loaded * shape.block) * 576 * 2 <= held
    assert shape.tile >= 16
    assert shape.block >= 16
    if held == 232448:
        assert (shape.tile, shape.block) == (min(rows, 64), 32)
        assert shape.stages > 1
