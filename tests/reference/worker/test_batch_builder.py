"""Laying out a plan: positions, slots, padding."""

from __future__ import annotations

import numpy as np
import pytest

from hardpoint.scheduler.plan import StepPlan
from hardpoint.worker.batch_builder import build_host_batch
from hardpoint_platforms.program import ANY_SIZE, Bucket

pytestmark = pytest.mark.reference


def make_plan(lengths, computed, samples, tables, rows=None):
    return StepPlan(
        step=0,
        released=(),
        new=(),
        rows=np.array(rows if rows is not None else range(len(lengths)), np.int32),
        query_lengths=np.array(lengths, np.int32),
        computed=np.array(computed, np.int32),
        samples=np.array(samples, np.bool_),
        page_tables=tuple(np.array(table, np.int32) for table in tables),
    )


def test_mixed_step_by_hand():
    plan = make_plan([1, 3], [5, 2], [True, False], [[[3, 7], [9, 0]]], rows=[4, 2])
    batch = build_host_batch(plan, page_tokens=4, bucket=ANY_SIZE, table_width=2)
    assert batch.positions.tolist() == [5, 2, 3, 4]
    assert batch.rows.tolist() == [4, 2, 2, 2]
    # token 5 of row 4 is in its second page (7) at offset 1; row 2 crosses from page 9 into an unused entry
    assert batch.attention.slot_mapping[0].tolist() == [7 * 4 + 1, 9 * 4 + 2, 9 * 4 + 3, 0 * 4 + 0]
    assert batch.attention.query_start.tolist() == [0, 1, 4]
    assert batch.attention.sequence_lengths.tolist() == [6, 5]
    assert batch.logits_index.tolist() == [0]
    assert batch.sampled.tolist() == [0]
    assert not batch.attention.decode_only


def test_decode_only_step_needs_no_expansion():
    plan = make_plan([1, 1], [3, 8], [True, True], [[[1, 0, 0], [2, 5, 6]]])
    batch = build_host_batch(plan, page_tokens=4, bucket=ANY_SIZE, table_width=3)
    assert batch.attention.decode_only
    assert batch.attention.slot_mapping[0].tolist() == [1 * 4 + 3, 6 * 4 + 0]
    assert batch.logits_index.tolist() == [0, 1]


def test_padding_points_into_page_zero_and_has_no_tokens():
    plan = make_plan([2], [0], [True], [[[3]], [[8]]])
    batch = build_host_batch(plan, page_tokens=4, bucket=Bucket(tokens=4, requests=3), table_width=5)
    attention = batch.attention
    assert [slots.tolist() for slots in attention.slot_mapping] == [[12, 13, 0, 0], [32, 33, 0, 0]]
    assert attention.query_start.tolist() == [0, 2, 2, 2]
    assert attention.sequence_lengths.tolist() == [2, 0, 0]
    assert attention.page_tables[1].tolist() == [[8, 0, 0, 0, 0], [0] * 5, [0] * 5]
    assert batch.logits_index.tolist() == [1, 1, 1]
    assert batch.num_sampled == 1
    assert attention.num_tokens == 2


def test_a_step_that_samples_nothing():
    plan = make_plan([4], [0], [False], [[[3]]])
    batch = build_host_batch(plan, page_tokens=4, bucket=ANY_SIZE, table_width=1)
    assert batch.logits_index.tolist() == []
    assert batch.num_sampled == 0
