"""Recurrent mixers in Triton beyond the contracts' samples: several tiles and blocks, odd sizes, narrow states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from hardpoint_torch_gpu.kernels.ssm_scan import _step
from hardpoint_torch_gpu.plan import GpuPlanner
from hardpoint_torch_gpu.seams import Seam
from hardpoint_torch_gpu.state_space import TritonConvState, TritonGatedDelta, TritonSsmScan

from hardpoint_platforms.binding import ask
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Sample
from hardpoint_platforms.ops.provider import OpProvider
from hardpoint_platforms.ops.samples import PagedRows, Source, run, sample
from hardpoint_platforms.reference.platform import ReferenceDevice
from hardpoint_platforms.reference.providers import reference_providers

pytestmark = [
    pytest.mark.reference,
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter, on the host"),
]

PLANNER = GpuPlanner(ReferenceDevice().upload)
PROVIDERS: dict[str, OpProvider] = {
    provider.op: provider for provider in (TritonConvState(PLANNER), TritonSsmScan(PLANNER), TritonGatedDelta(PLANNER))
}
REFERENCE = {provider.op: provider for provider in reference_providers()}
#: More than one tile of a prompt, with a state before it and without; a row of one token between them.
LONG = PagedRows(((3, 150), (9, 1), (0, 131)), 16, extra_tokens=1, extra_requests=1)
DECODE = PagedRows(((6, 1), (0, 1)), 16, extra_tokens=1, extra_requests=1)


def conv(rows: PagedRows, taps: int = 4, channels: int = 300) -> Sample:
    weights = {"weight": Source(15).normal(channels, taps), "bias": Source(16).normal(channels)}

    def make(s: Source) -> tuple[Any, ...]:
        state = s.normal(rows.num_pages, rows.page_tokens, taps - 1, channels)
        return s.normal(rows.num_tokens, channels), ((state,),), rows.batch()

    attrs = {"channels": channels, "kernel": taps, "activation": "silu"}
    return sample(CONTRACTS["conv_state"], "here", torch.float32, make, weights, **attrs)


def ssm(rows: PagedRows) -> Sample:
    heads, groups, width, size = 2, 1, 40, 20
    source = Source(17)
    weights = {
        "a": -source.uniform(heads, low=0.1, high=2.0),
        "d": source.normal(heads),
        "dt_bias": source.normal(heads),
    }

    def make(s: Source) -> tuple[Any, ...]:
        tokens = rows.num_tokens
        return (
            s.normal(tokens, heads, width),
            s.normal(tokens, heads),
            s.normal(tokens, groups, size),
            s.normal(tokens, groups, size),
            ((s.normal(rows.num_pages, rows.page_tokens, heads, width * size, scale=0.5),),),
            rows.batch(),
        )

    attrs = {"heads": heads, "head_dim": width, "groups": groups, "state_dim": size}
    return sample(CONTRACTS["ssm_scan"], "here", torch.float32, make, weights, **attrs)


def delta(rows: PagedRows) -> Sample:
    heads, k_heads, size, width = 2, 1, 20, 40

    def make(s: Source) -> tuple[Any, ...]:
        tokens = rows.num_tokens
        return (
            s.normal(tokens, k_heads, size),
            s.normal(tokens, k_heads, size),
            s.normal(tokens, heads, width),
            -s.uniform(tokens, heads, high=0.2),
            s.uniform(tokens, heads),
            ((s.normal(rows.num_pages, rows.page_tokens, heads, size * width, scale=0.5),),),
            rows.batch(),
        )

    attrs = {"heads": heads, "k_heads": k_heads, "k_dim": size, "v_dim": width, "scale": size**-0.5}
    return sample(CONTRACTS["gated_delta"], "here", torch.float32, make, **attrs)


MAKERS: dict[str, Callable[[PagedRows], Sample]] = {"conv_state": conv, "ssm_scan": ssm, "gated_delta": delta}


def agree(one: Sample, atol: float, rtol: float) -> None:
    """Results and states are the reference's, but for page 0."""
    op = one.instance.op
    with torch.inference_mode():
        (ours, state), (theirs, wanted) = run(PROVIDERS[op], one), run(REFERENCE[op], one)
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=rtol)
    torch.testing.assert_close(state[0][0][1:], wanted[0][0][1:], atol=atol, rtol=rtol)


@pytest.mark.parametrize("rows", [LONG, DECODE], ids=["prompts", "decode"])
@pytest.mark.parametrize("op", MAKERS)
def test_agrees_with_the_reference(op: str, rows: PagedRows) -> None:
    agree(MAKERS[op](rows), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", [PagedRows(((5, 1), (0, 3), (2, 4))), PagedRows(((5, 1), (1, 1)))])
def test_a_state_of_16_bits(rows: PagedRows) -> None:
    """What a pool of the model's dtype holds."""
    for make in MAKERS.values():
        one = make(rows)

        def narrow(make: Any = one.make) -> tuple[Any, ...]:
            *given, ((state,),), batch = make()
            return *given, ((state.half(),),), batch

        agree(replace(one, make=narrow), atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("taps", [2, 7])
def test_other_numbers_of_taps(taps: int) -> None:
    """Prompts shorter than the state keep what is left of it."""
    agree(conv(PagedRows(((4, 2), (0, 3), (9, 1), (6, 8))), taps, 20), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("op", MAKERS)
def test_rows_of_padding_in_a_decode_change_nothing(op: str) -> None:
    one = MAKERS[op](DECODE)
    before = one.make()[-2][0][0]
    with torch.inference_mode():
        out, state = run(PROVIDERS[op], one)
    assert not out[2].any()
    assert torch.equal(state[0][0][0], before[0])


@pytest.mark.parametrize("op", MAKERS)
def test_at_a_seam_it_is_made_with_the_plan_of_the_run(op: str) -> None:
    """A step recorded in pieces brings a plan only when it runs."""
    one = MAKERS[op](PagedRows(((6, 1), (0, 5)), 16, extra_tokens=1, extra_requests=1))

    class Run(Seam):
        calls: ClassVar[list[Callable[[Any], None]]] = []

        def cut(self, call: Callable[[Any], None]) -> None:
            self.calls.append(call)

    provider = PROVIDERS[op]
    more = (provider.pack(one.instance, one.weights),) if one.weights else ()
    with torch.inference_mode():
        *given, state, batch = one.make()
        out, _ = provider.build(one.instance)(*given, state, Run(), *more)
        (call,) = Run.calls
        call(PLANNER.plan(batch))
        wanted, expected = run(provider, one)
    assert torch.equal(out, wanted)
    assert torch.equal(state[0][0], expected[0][0])


def test_too_wide_states_are_refused() -> None:
    for op, name in (("ssm_scan", "state_dim"), ("gated_delta", "k_dim")):
        instance = MAKERS[op](DECODE).instance
        wide = replace(instance, attrs={**instance.attrs, name: 512})
        assert "512" in ask(CONTRACTS[op], PROVIDERS[op], wide).reason


def test_softplus_of_very_small_and_very_large_numbers() -> None:
    """Steps of 1e-7 are no zero: a state that forgets slowly would never forget."""
    import triton
    import triton.language as tl

    @triton.jit
    def softplus(x_ptr, y_ptr, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        tl.store(y_ptr + at, _step(tl.load(x_ptr + at), 0.0, 0.0, float("inf"), True))

    x = torch.tensor([-16.0, -9.0, -1.0, 0.0, 2.0, 15.0, 30.0, 80.0])
    y = torch.empty_like(x)
    softplus[(1,)](x, y, SIZE=8)
    wanted = torch.nn.functional.softplus(x.double()).float()
    torch.testing.assert_close(y, wanted, rtol=1e-3, atol=0.0)
