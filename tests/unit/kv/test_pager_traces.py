"""6,000 random runs of the pager against a model of what its pages hold, and a state machine that shrinks."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pager_model import PagerModel, random_run

CHUNKS, RUNS = 12, 500


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_runs(chunk: int) -> None:
    found = 0
    for seed in range(chunk * RUNS, (chunk + 1) * RUNS):
        try:
            found += random_run(seed)
        except Exception as error:
            error.add_note(f"random_run({seed})")
            raise
    assert found > RUNS, "the cache had nothing to do"


class PagerMachine(RuleBasedStateMachine):
    """Four rows, one full and one sliding group, few pages, two token values."""

    def __init__(self) -> None:
        super().__init__()
        self.model = PagerModel((None, 3), 2, 20, True)

    @rule(row=st.integers(0, 3), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def start(self, row: int, tokens: list[int]) -> None:
        if row not in self.model.rows:
            self.model.start(row, tokens)

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data(), count=st.integers(1, 14))
    def compute(self, data: st.DataObject, count: int) -> None:
        self.model.compute(data.draw(st.sampled_from(sorted(self.model.rows))), count)

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data(), token=st.integers(0, 1))
    def decode(self, data: st.DataObject, token: int) -> None:
        row = data.draw(st.sampled_from(sorted(self.model.rows)))
        self.model.rows[row].grow([token])
        self.model.compute(row, 30)

    @precondition(lambda self: any(s.computed for s in self.model.rows.values()))
    @rule(data=st.data(), child=st.integers(0, 3))
    def fork(self, data: st.DataObject, child: int) -> None:
        parents = sorted(row for row, sequence in self.model.rows.items() if sequence.computed)
        if child not in self.model.rows:
            self.model.fork(data.draw(st.sampled_from(parents)), child)

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data(), forget=st.booleans())
    def end(self, data: st.DataObject, forget: bool) -> None:
        self.model.end(data.draw(st.sampled_from(sorted(self.model.rows))), forget)

    @invariant()
    def sound(self) -> None:
        self.model.check()


TestPagerMachine = PagerMachine.TestCase
TestPagerMachine.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
