"""Recurrent mixers against their step recurrence in float64; blocks, continuation and fresh starts."""

from __future__ import annotations

import pytest
import torch

from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Tolerance
from hardpoint_platforms.ops.samples import run
from hardpoint_platforms.reference.plan import ReferencePlanner

pytestmark = pytest.mark.reference

DTYPES = (torch.float32, torch.bfloat16)


def _conv(inputs, before, weights, attrs):
    rows = torch.cat((before, inputs[0]))
    kernel = attrs["kernel"]
    y = torch.stack([(rows[t : t + kernel] * weights["weight"].T).sum(0) for t in range(inputs[0].shape[0])])
    y = y + weights.get("bias", 0)
    return (y * torch.sigmoid(y) if attrs["activation"] == "silu" else y), rows[-(kernel - 1) :]


def _ssm(inputs, before, weights, attrs):
    x, dt, b, c = inputs
    repeat = attrs["heads"] // attrs["groups"]
    state = before.unflatten(-1, (attrs["head_dim"], attrs["state_dim"])).clone()
    dt = dt + weights.get("dt_bias", 0)
    if attrs["dt_softplus"]:
        dt = torch.log1p(dt.exp())
    dt = dt.clamp(attrs["dt_min"], attrs["dt_max"])
    ys = []
    for t in range(x.shape[0]):
        y = torch.zeros_like(x[t])
        for h in range(attrs["heads"]):
            state[h] = state[h] * torch.exp(dt[t, h] * weights["a"][h])
            state[h] += dt[t, h] * torch.outer(x[t, h], b[t, h // repeat])
            y[h] = state[h] @ c[t, h // repeat]
            if "d" in weights:
                y[h] += weights["d"][h] * x[t, h]
        ys.append(y)
    return torch.stack(ys), state.flatten(-2)


def _delta(inputs, before, weights, attrs):
    q, k, v, decay, beta = inputs
    repeat = attrs["heads"] // attrs["k_heads"]
    if attrs["l2norm"]:
        q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    state = before.unflatten(-1, (attrs["k_dim"], attrs["v_dim"])).clone()
    outs = []
    for t in range(v.shape[0]):
        out = torch.zeros_like(v[t])
        for h in range(attrs["heads"]):
            kt, qt = k[t, h // repeat], q[t, h // repeat] * attrs["scale"]
            state[h] = state[h] * torch.exp(decay[t, h])
            state[h] += torch.outer(kt, beta[t, h] * (v[t, h] - state[h].T @ kt))
            out[h] = state[h].T @ qt
        outs.append(out)
    return torch.stack(outs), state.flatten(-2)


ORACLES = {"conv_state": _conv, "ssm_scan": _ssm, "gated_delta": _delta}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ORACLES)
def test_against_the_recurrence(name, dtype, providers, close):
    contract = CONTRACTS[name]
    for case in contract.samples(dtype):
        *inputs, state, batch = case.make()
        out, after = run(providers[name], case)
        weights = {key: weight.double() for key, weight in case.weights.items()}
        old, new, touched = state[0][1], after[0][1], {0}
        for row in range(batch.num_requests):
            start, stop = batch.query_start[row : row + 2]
            page = int(batch.page_tables[0][row, 0])
            before = old[page, 0].double()
            if batch.sequence_lengths[row] == stop - start:
                before = torch.zeros_like(before)
            mine = [x[start:stop].double() for x in inputs]
            y, left = ORACLES[name](mine, before, weights, case.instance.attrs)
            close(out[start:stop], y, contract.tolerance[dtype], case.instance.where)
            close(new[page, 0], left, Tolerance(1e-4, 1e-4), case.instance.where)
            assert torch.equal(new[page, 1:], old[page, 1:])
            touched.add(page)
        others = [p for p in range(old.shape[0]) if p not in touched]
        assert torch.equal(new[others], old[others])


@pytest.mark.parametrize("name", ORACLES)
def test_padding_and_fresh_requests_ignore_rubbish(name, providers):
    """nan in page 0, in padded rows, and in the page that a new request got, reaches nobody."""
    case = next(c for c in CONTRACTS[name].samples(torch.float32) if c.instance.where == "mixed with padding")
    provider = providers[name]
    weights = [provider.pack(case.instance, case.weights)] if case.weights else []
    kernel = provider.build(case.instance)
    usual = kernel(*_planned(case.make()), *weights)[0]
    *inputs, state, batch = case.make()
    for x in inputs:
        x[batch.num_tokens :] = torch.nan
    state[0][1][0] = torch.nan
    state[0][1][int(batch.page_tables[0][1, 0])] = torch.nan  # request 1 starts in this step
    again = kernel(*_planned((*inputs, state, batch)), *weights)[0]
    assert torch.equal(usual[: batch.num_tokens], again[: batch.num_tokens])


def _planned(arguments):
    *rest, batch = arguments
    return (*rest, ReferencePlanner(torch.device("cpu")).plan(batch))
