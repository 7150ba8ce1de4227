"""Native mixers with a state: the reference's outputs and states, however a sequence was cut into steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hardpoint_cpu.native.abi import DTYPES, Code
from hardpoint_platforms.batch import AttentionBatch
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.samples import run, sample
from hardpoint_platforms.reference.providers import reference_providers

pytestmark = pytest.mark.reference

OPS = ("conv_state", "ssm_scan", "gated_delta")
REFERENCE = {p.op: p for p in reference_providers()}


@pytest.fixture(params=("best", "baseline"))
def stage(request, library, stages):
    """Two threads, with the best variant that runs here and with the one that runs anywhere."""
    library.use(None if request.param == "best" else request.param)
    yield stages(2)
    library.use()


def flat(x):
    return x.reshape(x.shape[0], -1)


def conv(stage, plan, attrs, weights, arguments):
    x, state, batch = arguments
    y = torch.full(x.shape, torch.nan)
    pool = state[attrs["pool_layer"]][attrs["part"]]
    shape = (attrs["channels"], attrs["kernel"], int(attrs["activation"] == "silu"), attrs["group"])
    strides = (x.stride(0), y.stride(0), pool.stride(0))
    pointers = (x, weights["weight"], weights.get("bias"), pool, y)
    stage.call(Code.CONV_STATE, x.shape[0], pointers, (*shape, DTYPES[pool.dtype], *strides), plan=plan(batch))
    return y, state


def ssm(stage, plan, attrs, weights, arguments):
    x, dt, b, c, state, batch = arguments
    y = torch.full(x.shape, torch.nan)
    pool = state[attrs["pool_layer"]][attrs["part"]]
    shape = tuple(attrs[name] for name in ("heads", "head_dim", "groups", "state_dim", "group"))
    strides = tuple(part.stride(0) for part in (x, dt, b, c, y))
    pointers = (x, dt, b, c, pool, weights["a"], weights.get("d"), weights.get("dt_bias"), y)
    integers = (*shape, DTYPES[pool.dtype], pool.stride(0), *strides, int(attrs["dt_softplus"]))
    limits = (attrs["dt_min"], attrs["dt_max"])
    stage.call(Code.SSM_SCAN, x.shape[0], pointers, integers, limits, plan=plan(batch))
    return y, state


def delta(stage, plan, attrs, weights, arguments):
    q, k, v, decay, beta, state, batch = arguments
    out = torch.full(v.shape, torch.nan)
    pool = state[attrs["pool_layer"]][attrs["part"]]
    shape = tuple(attrs[name] for name in ("heads", "k_heads", "k_dim", "v_dim", "group"))
    strides = tuple(part.stride(0) for part in (q, k, v, decay, beta, out))
    integers = (*shape, DTYPES[pool.dtype], pool.stride(0), *strides, int(attrs["l2norm"]))
    pointers = (q, k, v, decay, beta, pool, out)
    stage.call(Code.GATED_DELTA, v.shape[0], pointers, integers, (attrs["scale"],), plan=plan(batch))
    return out, state


CALLS = {"conv_state": conv, "ssm_scan": ssm, "gated_delta": delta}


def all_samples():
    for op in OPS:
        for case in CONTRACTS[op].samples(torch.float32):
            yield pytest.param(op, case, id=f"{op}-{case.instance.where}")


@pytest.mark.parametrize(("op", "case"), list(all_samples()))
def test_contract_samples(stage, plan, op, case):
    found, state = CALLS[op](stage, plan, case.instance.attrs, case.weights, case.make())
    wanted, kept = run(REFERENCE[op], case)
    tolerance = CONTRACTS[op].tolerance[torch.float32]
    torch.testing.assert_close(found, wanted, atol=tolerance.atol, rtol=tolerance.rtol)
    # page 0 belongs to nobody
    ours, theirs = state[0][1][1:], kept[0][1][1:]
    torch.testing.assert_close(ours, theirs, atol=tolerance.atol, rtol=tolerance.rtol)
    assert torch.equal(state[0][0], kept[0][0])


def case_of(op, size):
    """Attributes, weights, inputs of `size` tokens and the state's shape; widths that fill no vector."""
    torch.manual_seed(size)
    if op == "conv_state":
        attrs = {"channels": 75, "kernel": 4, "activation": "silu"}
        weights = {"weight": torch.randn(75, 4), "bias": torch.randn(75)}
        return attrs, weights, (torch.randn(size, 75),), (3, 75)
    if op == "ssm_scan":
        attrs = {"heads": 6, "head_dim": 21, "groups": 3, "state_dim": 19}
        attrs |= {"dt_softplus": True, "dt_min": 0.0, "dt_max": float("inf")}
        weights = {"a": -torch.rand(6) * 4 - 0.1, "d": torch.randn(6), "dt_bias": torch.randn(6)}
        inputs = (torch.randn(size, 6, 21), torch.randn(size, 6), torch.randn(size, 3, 19), torch.randn(size, 3, 19))
        return attrs, weights, inputs, (6, 21 * 19)
    attrs = {"heads": 4, "k_heads": 2, "k_dim": 19, "v_dim": 41, "scale": 0.2, "l2norm": True}
    qk = (torch.randn(size, 2, 19), torch.randn(size, 2, 19))
    inputs = (*qk, torch.randn(size, 4, 41), -torch.rand(size, 4), torch.rand(size, 4))
    return attrs, {}, inputs, (4, 19 * 41)


def batch_of(rows):
    """rows: (page, tokens before, new tokens) of each request; one page each."""
    news = [new for *_, new in rows]
    return AttentionBatch(
        query_start=np.cumsum([0, *news]).astype(np.int32),
        sequence_lengths=np.array([old + new for _, old, new in rows], np.int32),
        page_tables=(np.array([[page] for page, *_ in rows], np.int32),),
        slot_mapping=(np.zeros(sum(news), np.int32),),
        page_tokens=2,
        num_requests=len(rows),
        num_tokens=sum(news),
    )


def play(op, stage, plan, dtype, steps):
    """Two sequences of 40 and 23 tokens, as `steps` say; outputs and states."""
    attrs, weights, inputs, shape = case_of(op, 63)
    attrs = {**attrs, "pool_layer": 0, "part": 0, "group": 0}
    pool = torch.full((3, 2, *shape), 7.0).to(dtype)
    outs = [[], []]
    for step in steps:
        places = [torch.arange(start, stop) + (0, 40)[who] for who, start, stop in step]
        parts = tuple(part[torch.cat(places)] for part in inputs)
        batch = batch_of([(1 + who, start, stop - start) for who, start, stop in step])
        out, _ = CALLS[op](stage, plan, attrs, weights, (*parts, ((pool,),), batch))
        for (who, *_), piece in zip(step, out.split([len(place) for place in places]), strict=True):
            outs[who].append(piece)
    return torch.cat(outs[0]), torch.cat(outs[1]), pool[1:, 0]


WAYS = {
    "one by one": [[(0, t, t + 1)] for t in range(40)] + [[(1, t, t + 1)] for t in range(23)],
    "chunks": [[(0, 0, 13), (1, 0, 1)], [(1, 1, 20)], [(1, 20, 23), (0, 13, 14)], [(0, 14, 40)]],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", OPS)
def test_results_do_not_depend_on_steps_batch_and_threads(op, dtype, library, stages, plan):
    for variant in (None, "baseline"):
        library.use(variant)
        whole = play(op, stages(1), plan, dtype, [[(0, 0, 40), (1, 0, 23)]])
        assert all(part.isfinite().all() for part in whole)
        for threads in (1, 2, 3):
            for way in WAYS.values():
                for ours, theirs in zip(play(op, stages(threads), plan, dtype, way), whole, strict=True):
                    assert torch.equal(ours, theirs)
    library.use()


@pytest.mark.parametrize("op", OPS)
def test_against_the_reference_at_odd_widths(op, stage, plan):
    attrs, weights, inputs, shape = case_of(op, 63)
    contract = CONTRACTS[op]
    rows = [(1, 0, 40), (2, 6, 23)]

    def make(_):
        torch.manual_seed(9)
        return (*inputs, ((torch.randn(3, 2, *shape) * 0.5,),), batch_of(rows))

    case = sample(contract, "test", torch.float32, make, weights, **attrs)
    found, state = CALLS[op](stage, plan, case.instance.attrs, weights, case.make())
    wanted, kept = run(REFERENCE[op], case)
    torch.testing.assert_close(found, wanted, atol=5e-5, rtol=1e-4)
    torch.testing.assert_close(state[0][0], kept[0][0], atol=5e-5, rtol=1e-4)
