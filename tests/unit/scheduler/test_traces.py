"""4,400 random traces of scheduler, pager and update against a device that checks what every query sees.

Requests come to the same tokens as alone, whatever the crowd, the pool, the limits and the results outstanding; nothing
leaks, nobody starves, and `check_integrity` holds at every step. Together with the pager's own 6,000 runs
(tests/unit/kv/test_pager_traces.py): 10,400 traces.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import play, random_trace

CHUNKS, TRACES = 22, 200


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_traces(chunk: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(chunk * TRACES, (chunk + 1) * TRACES):
        try:
            outcome = play(random_trace(seed))
        except Exception as error:
            error.add_note(f"play(random_trace({seed}))")
            raise
        seen.update(preempted=outcome.preemptions > 0, hit=outcome.hits > 0, refused=bool(outcome.refused))
    # the traces must go where the faults are
    assert seen["preempted"] >= TRACES // 20
    assert seen["hit"] >= TRACES // 10
    assert seen["refused"] >= TRACES // 20


@given(st.integers(10**6, 2**40))
@settings(max_examples=60, deadline=None)
def test_traces_that_nobody_has_seen(seed: int) -> None:
    play(random_trace(seed))
