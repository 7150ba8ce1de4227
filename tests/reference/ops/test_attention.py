"""Paged attention and MLA against float64 over each request's own keys and values, and what padding may not do."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint_platforms.batch import AttentionBatch
from hardpoint_platforms.ops.attention import ATTENTION, alibi_slopes
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Tolerance
from hardpoint_platforms.ops.samples import PagedRows, Source, run
from hardpoint_platforms.reference import attention as kernels
from hardpoint_platforms.reference import plan as plans
from hardpoint_platforms.reference.plan import ReferencePlanner
from hardpoint_platforms.reference.providers import reference_providers

pytestmark = pytest.mark.reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _sequence(cache, fresh, batch: AttentionBatch, row: int, group: int):
    """All keys (or values) of one request, the old ones out of its pages, the new ones as given: [L, heads, d]."""
    start, stop = batch.query_start[row : row + 2]
    length = int(batch.sequence_lengths[row])
    old = length - (stop - start)
    table, size = batch.page_tables[group][row], batch.page_tokens
    rows = [cache[table[p // size], p % size] for p in range(old)]
    return torch.stack([*rows, *fresh[start:stop]]).double()


def _softmax_oracle(q, k, v, attrs, sinks=None):
    """float64 attention of the last tokens q[n, h, d] over k[L, hk, d], v[L, hk, dv]."""
    heads, shared = q.shape[1], q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape[0], heads, v.shape[2], dtype=torch.float64)
    for token in range(q.shape[0]):
        at = k.shape[0] - q.shape[0] + token
        first = 0 if attrs.get("window") is None else max(0, at - attrs["window"] + 1)
        for head in range(heads):
            scores = k[first : at + 1, head // shared] @ q[token, head].double() * attrs["scale"]
            if attrs.get("softcap") is not None:
                scores = attrs["softcap"] * torch.tanh(scores / attrs["softcap"])
            if attrs.get("alibi") is not None:
                scores = scores - attrs["alibi"][head] * torch.arange(at - first, -1, -1)
            if sinks is not None:
                scores = torch.cat((scores, sinks[head : head + 1].double()))
            weights = scores.softmax(-1)[: at + 1 - first]
            out[token, head] = weights @ v[first : at + 1, head // shared]
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_against_float64(dtype, providers, close):
    for case in ATTENTION.samples(dtype):
        attrs, where = case.instance.attrs, case.instance.where
        q, k, v, state, batch = case.make()
        out, after = run(providers["attention"], case)
        assert out.dtype == dtype
        assert out.shape == (q.shape[0], attrs["heads"], attrs["v_head_dim"])
        keys, values = state[attrs["pool_layer"]]
        for row in range(batch.num_requests):
            start, stop = batch.query_start[row : row + 2]
            expected = _softmax_oracle(
                q[start:stop],
                _sequence(keys, k, batch, row, attrs["group"]),
                _sequence(values, v, batch, row, attrs["group"]),
                attrs,
                case.weights.get("sinks"),
            )
            close(out[start:stop], expected, ATTENTION.tolerance[dtype], where)
        assert torch.isfinite(out).all()
        _check_writes(state, after, (k, v), batch, attrs)


def _check_writes(before, after, fresh, batch: AttentionBatch, attrs):
    """New tokens lie at their slots and nothing else but page 0 has changed."""
    slots = torch.from_numpy(batch.slot_mapping[attrs["group"]][: batch.num_tokens].astype(np.int64))
    for layer, (old, new) in enumerate(zip(before, after, strict=True)):
        for part, (a, b) in enumerate(zip(old, new, strict=True)):
            wanted = a.clone()
            if layer == attrs["pool_layer"]:
                wanted[slots // batch.page_tokens, slots % batch.page_tokens] = fresh[part][: batch.num_tokens]
            assert torch.equal(wanted[1:], b[1:])


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_against_torch(kv_heads, window, providers, close):
    """One prompt, an explicit mask, torch's own attention."""
    rows, heads = PagedRows(((0, 11),)), 4
    s = Source(3)
    q, k, v = s.normal(11, heads, 8), s.normal(11, kv_heads, 8), s.normal(11, kv_heads, 8)
    instance = ATTENTION.instance(
        "x",
        torch.float32,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=8,
        v_head_dim=8,
        scale=8**-0.5,
        window=window,
    )
    state = (tuple(torch.zeros(rows.num_pages, 4, kv_heads, 8) for _ in range(2)),)
    plan = ReferencePlanner(torch.device("cpu")).plan(rows.batch())
    out, same = providers["attention"].build(instance)(q, k, v, state, plan)
    assert same is state
    place = torch.arange(11)
    mask = place[:, None] >= place
    if window is not None:
        mask &= place[:, None] - place < window
    expected = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), attn_mask=mask, enable_gqa=True)
    close(out, expected.transpose(0, 1), Tolerance(1e-5, 1e-5))


def _split_run(providers, rows, attrs, seed=5):
    """Feed one random sequence per request in the given steps; outputs by request."""
    total = [sum(steps) for steps in rows]
    s = Source(seed)
    tensors = [(s.normal(n, 4, 8), s.normal(n, 2, 8), s.normal(n, 2, 8)) for n in total]
    layout = PagedRows(tuple((0, n) for n in total))
    whole = layout.batch()
    state = (tuple(torch.zeros(layout.num_pages, 4, 2, 8) for _ in range(2)),)
    instance = ATTENTION.instance("x", torch.float32, heads=4, kv_heads=2, head_dim=8, v_head_dim=8, scale=0.4, **attrs)
    kernel = providers["attention"].build(instance)
    planner = ReferencePlanner(torch.device("cpu"))
    done = [0] * len(rows)
    outputs = [[] for _ in rows]
    for step in range(max(len(steps) for steps in rows)):
        live = [r for r, steps in enumerate(rows) if step < len(steps)]
        news = [rows[r][step] for r in live]
        spans = [(done[r], done[r] + n) for r, n in zip(live, news, strict=True)]
        tables = whole.page_tables[0][live]
        slots = [tables[i, np.arange(a, b) // 4] * 4 + np.arange(a, b) % 4 for i, (a, b) in enumerate(spans)]
        batch = AttentionBatch(
            np.cumsum([0, *news]).astype(np.int32),
            np.array([b for _, b in spans], np.int32),
            (tables,),
            (np.concatenate(slots).astype(np.int32),),
            4,
            len(live),
            sum(news),
        )
        parts = [torch.cat([tensors[r][i][a:b] for r, (a, b) in zip(live, spans, strict=True)]) for i in range(3)]
        out, state = kernel(*parts, state, planner.plan(batch))
        for r, n, piece in zip(live, news, out.split(news), strict=True):
            outputs[r].append(piece)
            done[r] += n
    return [torch.cat(pieces) for pieces in outputs]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=5), min_size=1, max_size=4),
    st.sampled_from([{}, {"window": 3}, {"softcap": 1.0}, {"alibi": alibi_slopes(4)}]),
)
def test_any_cut_into_steps_gives_the_same(rows, attrs):
    """Prefill, chunked prefill, decode and mixtures are one computation."""
    providers = {p.op: p for p in reference_providers()}
    stepped = _split_run(providers, rows, attrs)
    whole = _split_run(providers, [[sum(steps)] for steps in rows], attrs)
    for a, b in zip(stepped, whole, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_small_blocks_give_the_same(providers, monkeypatch):
    case = next(c for c in ATTENTION.samples(torch.float32) if c.instance.where == "mixed with padding")
    usual, _ = run(providers["attention"], case)
    monkeypatch.setattr(plans, "BLOCK_TOKENS", 10)
    monkeypatch.setattr(kernels, "SCORE_ELEMENTS", 50)
    assert len(ReferencePlanner(torch.device("cpu")).plan(case.make()[-1]).blocks) > 1
    cut, _ = run(providers["attention"], case)
    torch.testing.assert_close(usual, cut)


@pytest.mark.parametrize("name", ["attention", "mla_attention"])
def test_padding_changes_nothing(name, providers):
    """More padding, and any rubbish in it and in page 0, leaves real rows and real pages as they were."""
    for case in CONTRACTS[name].samples(torch.float32):
        *tensors, state, batch = case.make()
        if batch.num_tokens == 0:
            continue
        weights = [providers[name].pack(case.instance, case.weights)] if case.weights else []
        kernel, planner = providers[name].build(case.instance), ReferencePlanner(torch.device("cpu"))
        out, after = kernel(*tensors, state, planner.plan(batch), *weights)
        *tensors, again, batch = case.make()
        for part in again[case.instance.attrs["pool_layer"]]:
            part[0] = torch.nan
        rubbish = [torch.cat((t[: batch.num_tokens], t.new_full((5, *t.shape[1:]), torch.nan))) for t in tensors]
        padded = _padded(batch, 5, 3)
        result, changed = kernel(*rubbish, again, planner.plan(padded), *weights)
        # the projections around MLA are matrix products over all tokens, and those round by batch size
        slack = 0.0 if name == "attention" else 1e-6
        torch.testing.assert_close(out[: batch.num_tokens], result[: batch.num_tokens], atol=slack, rtol=slack)
        assert torch.isfinite(result[: batch.num_tokens]).all()
        for a, b in zip(after[-1], changed[-1], strict=True):
            assert torch.equal(a[1:], b[1:])


def _padded(batch: AttentionBatch, tokens: int, requests: int) -> AttentionBatch:
    real, rows = batch.num_tokens, batch.num_requests
    return dataclasses.replace(
        batch,
        query_start=np.r_[batch.query_start[: rows + 1], [real] * requests].astype(np.int32),
        sequence_lengths=np.r_[batch.sequence_lengths[:rows], [0] * requests].astype(np.int32),
        page_tables=tuple(np.pad(t[:rows], ((0, requests), (0, 2))) for t in batch.page_tables),
        slot_mapping=tuple(np.r_[s[:real], [1] * tokens].astype(np.int32) for s in batch.slot_mapping),
    )


def test_a_broken_neighbour_stays_alone(providers):
    """A request full of nan, and what it left in pages that others got later, harms nobody else."""
    rows = PagedRows(((9, 1), (3, 1), (0, 5), (2, 4)))
    case = next(iter(ATTENTION.samples(torch.float32))).instance
    s = Source(1)
    q, k, v = s.normal(11, 4, 16), s.normal(11, 2, 16), s.normal(11, 2, 16)
    kernel, plan = providers["attention"].build(case), ReferencePlanner(torch.device("cpu")).plan(rows.batch())

    def outputs(fill, broken):
        part = torch.full((rows.num_pages, 4, 2, 16), fill)
        batch = rows.batch()
        for row, (old, _) in enumerate(rows.rows):  # only what was stored before is sound
            for p in range(old):
                part[batch.page_tables[0][row, p // 4], p % 4] = 0.25 if row != 1 else broken
        parts = [x.clone() for x in (q, k, v)]
        for x in parts:
            x[1] = broken
        return kernel(*parts, ((), (part, part.clone())), plan)[0]

    sound, broken = outputs(0.0, 0.5), outputs(torch.nan, torch.nan)
    others = [0, *range(2, 11)]
    assert torch.equal(sound[others], broken[others])
    assert broken[1].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mla_against_expanded_attention(dtype, providers, close):
    """The latent is expanded to keys and values of every head, in float64."""
    contract = CONTRACTS["mla_attention"]
    for case in contract.samples(dtype):
        attrs = case.instance.attrs
        q_nope, q_rope, latent, k_rope, state, batch = case.make()
        out, _ = run(providers["mla_attention"], case)
        weight = case.weights["kv_b"]
        expand = weight.double() if isinstance(weight, torch.Tensor) else weight.dequantize(dtype).double()
        expand = expand.view(attrs["heads"], -1, attrs["latent_dim"])
        assert out.dtype == dtype
        for row in range(batch.num_requests):
            start, stop = batch.query_start[row : row + 2]
            latents = _sequence(state[0][0], latent[:, None], batch, row, 0)[:, 0]
            ropes = _sequence(state[0][1], k_rope[:, None], batch, row, 0)
            both = torch.einsum("lc,hnc->lhn", latents, expand)
            keys, values = both.split([attrs["nope_dim"], attrs["v_head_dim"]], dim=-1)
            keys = torch.cat((keys, ropes.expand(-1, attrs["heads"], -1)), dim=-1)
            q = torch.cat((q_nope[start:stop], q_rope[start:stop]), dim=-1)
            close(out[start:stop], _softmax_oracle(q, keys, values, attrs), contract.tolerance[dtype])


def test_plan_of_a_mixed_batch():
    rows = PagedRows(((0, 6), (7, 1), (2, 3), (1, 1)), extra_tokens=2, extra_requests=1)
    plan = ReferencePlanner(torch.device("cpu")).plan(rows.batch())
    (block,) = plan.blocks
    assert block.tokens.tolist() == [6, 10]
    assert block.last.tolist() == [7, 1]
    assert [(c.start, c.stop, c.computed) for c in plan.chunks] == [(0, 6, 0), (7, 10, 2)]
    assert plan.padding == 2
    pieces = [torch.tensor([6.0, 10.0]), torch.arange(6.0), torch.tensor([7.0, 8.0, 9.0])]
    assert plan.join(pieces).tolist() == [*range(11), 0, 0]


def test_alibi_slopes():
    assert alibi_slopes(8) == tuple(2.0**-i for i in range(1, 9))
    assert alibi_slopes(6)[4:] == (2.0**-1, 2.0**-3)
