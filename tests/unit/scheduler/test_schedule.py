"""The law: catch up computed to known under a budget, decodes first. And what plans look like."""

from __future__ import annotations

import pytest
from driving import Driver, batch

from hardpoint.request.request import Status
from hardpoint.scheduler.settings import StepLimits


def test_a_prompt_is_cut_at_the_budget_and_draws_when_it_is_through() -> None:
    driver = Driver(budget=8)
    driver.add("a", 20, output=2)
    seen = []
    while (plan := driver.step()) is not None:
        seen.append((plan.computed.tolist(), plan.query_lengths.tolist(), plan.samples.tolist()))
    assert seen == [([0], [8], [False]), ([8], [8], [False]), ([16], [4], [True]), ([20], [1], [True])]
    assert len(driver.tokens("a")) == 2


def test_decodes_come_first_and_prefills_take_what_is_left() -> None:
    driver = Driver(budget=10)
    a = driver.add("a", 3, output=9)
    b = driver.add("b", 5, output=9)
    assert batch(driver.step()) == [(0, 3), (1, 5)]
    driver.add("c", 30)
    assert batch(driver.step()) == [(0, 1), (1, 1), (2, 8)]
    assert (a.row, b.row) == (0, 1)
    driver.drain()


def test_the_first_plan_carries_the_sequence_and_later_ones_do_not() -> None:
    driver = Driver()
    driver.add("a", [5, 6, 7], output=3)
    plan = driver.step()
    assert plan is not None
    (new,) = plan.new
    assert (new.row, new.request_id, new.tokens.tolist(), new.prompt_length) == (0, "a", [5, 6, 7], 3)
    assert new.params.seed == 0
    assert driver.step().new == ()  # type: ignore[union-attr]


def test_a_row_is_released_before_it_is_given_away() -> None:
    driver = Driver(rows=1)
    driver.add("a", 3, output=1)
    driver.add("b", 3, output=1)
    first, second = driver.step(), driver.step()
    assert first is not None
    assert second is not None
    assert (first.released, [new.row for new in first.new]) == ((), [0])
    assert (second.released, [new.row for new in second.new]) == ((0,), [0])


def test_page_tables_are_copies_as_wide_as_the_widest_row() -> None:
    driver = Driver(page_tokens=4)
    driver.add("a", 9, output=9)
    driver.add("b", 2, output=9)
    plan = driver.schedule()
    assert plan is not None
    table = plan.page_tables[0]
    assert table.shape == (2, 3)
    assert table.dtype == "int32"
    assert table[0].all()
    assert table[1].tolist()[1:] == [0, 0]
    before = table.copy()
    driver.update()
    driver.scheduler.abort("a")
    assert (table == before).all()


def test_a_seed_is_drawn_where_none_was_given() -> None:
    from hardpoint.request.sampling import SamplingParams

    driver = Driver()
    a = driver.add("a", 3, params=SamplingParams())
    b = driver.add("b", 3, params=SamplingParams())
    assert a.params.seed is not None
    assert a.params.seed != b.params.seed


def test_no_more_than_max_num_seqs_run() -> None:
    driver = Driver(rows=2)
    for name in "abc":
        driver.add(name, 2, output=3)
    assert len(batch(driver.step())) == 2
    assert driver.scheduler.num_waiting == 1
    driver.drain()
    assert len(driver.tokens("c")) == 3


def test_requests_come_in_as_they_arrived_and_nobody_overtakes_the_head() -> None:
    driver = Driver(pages=10, page_tokens=4)
    driver.add("a", 16, output=8)
    driver.step()
    big, small = driver.add("big", 30), driver.add("small", 2)
    driver.step()
    assert (big.status, small.status) == (Status.WAITING, Status.WAITING)
    driver.drain()


def test_priority_policy_lets_the_urgent_in_first() -> None:
    driver = Driver(policy="priority", rows=1)
    driver.add("a", 2, output=1)
    driver.add("late", 2, output=1, priority=5)
    driver.add("soon", 2, output=1, priority=-5)
    order = []
    while (plan := driver.step()) is not None:
        order += [new.request_id for new in plan.new]
    assert order == ["soon", "a", "late"]


def test_a_device_that_cannot_mix_gets_turns() -> None:
    driver = Driver(budget=8, limits=StepLimits(mixed=False))
    driver.add("a", 3, output=6)
    driver.step()
    driver.add("b", 20, output=3)
    shapes = []
    while (plan := driver.step()) is not None:
        shapes.append([tokens for _, tokens in batch(plan)])
    assert shapes[:6] == [[1], [8], [1], [8], [1], [4]] or shapes[:6] == [[8], [1], [8], [1], [4], [1, 1]]
    assert all(set(shape) == {1} or 1 not in shape for shape in shapes)


def test_limits_on_prefills_and_chunk_sizes_are_obeyed() -> None:
    driver = Driver(budget=30, limits=StepLimits(max_prefill_requests=1, prefill_chunk_multiple=8))
    driver.add("a", 27, output=2)
    driver.add("b", 27, output=2)
    steps = []
    while (plan := driver.step()) is not None:
        steps.append(batch(plan))
    assert steps[0] == [(0, 27)]
    assert steps[1] == [(0, 1), (1, 27)]
    driver = Driver(budget=20, limits=StepLimits(prefill_chunk_multiple=8))
    driver.add("a", 27, output=1)
    assert [batch(driver.step())[0][1] for _ in range(2)] == [16, 11]


@pytest.mark.parametrize("mixed", [True, False])
def test_without_chunking_a_prompt_runs_whole_and_is_not_starved_by_decodes(mixed: bool) -> None:
    driver = Driver(budget=16, chunked=False, limits=StepLimits(mixed=mixed))
    driver.add("a", 4, output=60)
    driver.step()
    driver.add("b", 16, output=2)
    lengths = [[tokens for _, tokens in batch(driver.step())] for _ in range(3)]
    assert [16] in lengths
    driver.drain()
    assert len(driver.tokens("a")) == 60
