"""Prefix cache and n > 1 seen from the scheduler (cases S-22, S-38)."""

from __future__ import annotations

import pytest
from driving import Driver, batch

from hardpoint.request.request import Status
from hardpoint.request.sampling import SamplingParams


@pytest.mark.parametrize("length", [15, 16, 17, 32, 33, 48])
def test_at_least_one_token_of_a_cached_prompt_is_computed_again(length: int) -> None:
    """S-38: three times in a row, twice at once, one token only, and n = 3."""
    driver = Driver(page_tokens=16, budget=128)
    prompt = list(range(1, length + 1))
    runs = []
    for run in range(3):
        runs.append(driver.add(f"run{run}", prompt, output=5))
        driver.drain()
    assert [r.cached_tokens for r in runs] == [0, (length - 1) // 16 * 16, (length - 1) // 16 * 16]
    twins = [driver.add(f"twin{i}", prompt, output=5) for i in range(2)]
    once = driver.add("once", prompt, output=1)
    family = [driver.add(f"n{i}", prompt, output=5, parent="n0" if i else None) for i in range(3)]
    driver.drain()
    for request in (*runs, *twins, once, *family):
        assert driver.tokens(request.id) == driver.alone(request, len(request.output))
        assert request.cached_tokens is not None
        assert request.cached_tokens < length


def test_a_follow_up_turn_finds_the_answer_too() -> None:
    driver = Driver(page_tokens=4)
    first = driver.add("first", 10, output=12)
    driver.drain()
    turn = first.prompt.tolist() + first.output + [7, 8]
    second = driver.add("second", turn, output=2)
    driver.drain()
    assert second.cached_tokens == 20  # 21 of 22 tokens were computed: five full pages
    assert (driver.pager.queries, driver.pager.hits) == (34, 20)


def test_salts_keep_tenants_apart() -> None:
    driver = Driver(page_tokens=4)
    requests = [driver.add(f"r{i}", range(1, 13), output=2, salt=salt) for i, salt in enumerate(["", "x", "y"])]
    driver.drain()
    again = driver.add("again", range(1, 13), output=2, salt="x")
    driver.drain()
    assert [r.cached_tokens for r in requests] == [0, 0, 0]
    assert again.cached_tokens == 8


def test_requests_in_one_step_do_not_share_what_is_not_computed() -> None:
    driver = Driver(page_tokens=4)
    a, b = driver.add("a", range(1, 13)), driver.add("b", range(1, 13))
    assert batch(driver.step()) == [(0, 12), (1, 12)]
    assert (a.cached_tokens, b.cached_tokens) == (0, 0)


def test_a_scored_prompt_is_computed_whole_though_it_is_cached() -> None:
    """S-22."""
    driver = Driver(page_tokens=4, budget=5)
    driver.add("cold", range(1, 13))
    driver.drain()
    scored = driver.add("scored", range(1, 13), params=SamplingParams(max_tokens=2, seed=0, prompt_logprobs=1))
    driver.drain()
    (whole,) = [output.prompt_logprobs for output in driver.outputs["scored"] if output.prompt_logprobs]
    assert [entry and entry.token_ids[0] for entry in whole] == [None, *range(2, 13)]
    assert scored.cached_tokens == 0
    assert driver.pager.queries == 12, "it did not ask the cache"


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_children_wait_for_the_parents_prompt_and_share_its_full_pages(prefix_caching: bool) -> None:
    driver = Driver(page_tokens=4, budget=8, prefix_caching=prefix_caching)
    parent = driver.add("p#0", 14, output=6)
    children = [driver.add(f"p#{i}", parent.prompt.tolist(), output=6, parent="p#0", seed=i) for i in (1, 2)]
    assert driver.scheduler.num_waiting == 3
    driver.step()
    assert [child.status for child in children] == [Status.PARKED] * 2
    driver.step()
    plan = driver.step()
    assert batch(plan) == [(0, 1), (1, 2), (2, 2)]
    table = plan.page_tables[0]  # type: ignore[union-attr]
    assert (table[0, :3] == table[1, :3]).all()
    assert (table[0, :3] == table[2, :3]).all()
    assert len(set(table[:, 3].tolist())) == 3
    assert driver.pager.used_pages == 3 + 3
    assert [child.cached_tokens for child in children] == [12, 12]
    driver.drain()
    for child in children:
        assert driver.tokens(child.id) == driver.alone(child, 6)


def test_children_of_a_parent_that_is_gone_go_alone() -> None:
    driver = Driver(page_tokens=4, budget=4, prefix_caching=False)
    parent = driver.add("p#0", 14)
    child = driver.add("p#1", parent.prompt.tolist(), parent="p#0")
    driver.step()
    driver.scheduler.abort("p#0")
    assert child.status is Status.WAITING
    driver.drain()
    assert driver.tokens("p#1") == driver.alone(child, 4)
    orphan = driver.add("p#2", 5, parent="p#0")
    driver.drain()
    assert len(orphan.output) == 4


def test_a_parked_child_can_be_aborted() -> None:
    driver = Driver(budget=4)
    parent = driver.add("p#0", 14)
    driver.add("p#1", parent.prompt.tolist(), parent="p#0")
    assert driver.scheduler.abort("p#1")
    assert driver.scheduler.num_waiting == 1
    driver.drain()
    assert len(parent.output) == 4


def test_pages_of_a_request_with_bad_values_are_not_cached() -> None:
    driver = Driver(page_tokens=4, budget=8, poisoned=frozenset({"bad"}))
    bad = driver.add("bad", range(1, 13))
    driver.step()
    assert driver.pager.match(lambda count: bad.digests(count, 4), 12).tokens == 8, "the first chunk was cached"
    driver.drain()
    assert (bad.finish_reason, driver.pager.cached_pages) == ("error", 0)
    good = driver.add("good", range(1, 13))
    driver.drain()
    assert good.cached_tokens == 0
    assert driver.tokens("good") == driver.alone(good, 4)


def test_a_reset_forgets_everything_for_later_requests() -> None:
    driver = Driver(page_tokens=4)
    driver.add("a", range(1, 13))
    driver.drain()
    running = driver.add("b", range(1, 13), output=20)
    driver.step()
    driver.scheduler.reset_prefix_cache()
    later = driver.add("c", range(1, 13))
    driver.drain()
    assert (running.cached_tokens, later.cached_tokens) == (8, 0)


def test_a_sliding_group_needs_only_its_window_for_a_hit_and_holds_no_more() -> None:
    driver = Driver(page_tokens=4, windows=(None, 6), pages=40)
    a = driver.add("a", range(1, 41), output=8)
    driver.step()
    driver.step()
    # full: 11 pages of 42 tokens; sliding: query 41 reads 36 .. 41, columns 9 and 10
    assert driver.pager.used_pages == 11 + 2
    driver.drain()
    b = driver.add("b", range(1, 42), output=8)
    plan = driver.step()
    assert b.cached_tokens == 40
    assert [int((table[0] > 0).sum()) for table in plan.page_tables] == [11, 3]  # type: ignore[union-attr]
    driver.drain()
    assert driver.tokens("b") == driver.alone(b, 8)
    assert a.finished
