"""Which level verdicts add up to, and what the kit says about the next."""

from __future__ import annotations

import pytest
from verdicts import changed, perfect, verdict

from hardpoint_platforms.conformance.ladder import HIGHEST, LEVELS, is_required, lacks, level_of, reached
from hardpoint_platforms.conformance.verdict import Status


def test_a_perfect_device_reaches_the_top() -> None:
    level, advice = reached(perfect(), HIGHEST)
    assert level == HIGHEST == 6
    assert "nothing is left" in advice


@pytest.mark.parametrize("asked", range(HIGHEST))
def test_no_level_above_the_one_that_was_run(asked: int) -> None:
    level, advice = reached(perfect(), asked)
    assert level == asked
    assert f"L{asked + 1}" in advice


@pytest.mark.parametrize("rung", LEVELS, ids=lambda rung: rung.title)
def test_one_failure_holds_its_level_and_those_above(rung) -> None:
    broken = [*perfect(), verdict("anything", rung.number, Status.FAIL, group="odd")]
    level, advice = reached(broken, HIGHEST)
    assert level == rung.number - 1
    assert "odd/anything" in advice
    assert f"L{rung.number}" in advice


@pytest.mark.parametrize(
    ("contract", "level"),
    [(contract, rung.number) for rung in LEVELS for contract in rung.contracts],
)
def test_a_level_needs_own_kernels_of_each_of_its_contracts(contract: str, level: int) -> None:
    refused = changed(contract, status=Status.REFUSED, message="no provider implements it")
    got, advice = reached(refused, HIGHEST)
    assert got == level - 1
    assert f"write a provider of {contract} (no provider implements it)" in advice


def test_some_refusals_are_allowed() -> None:
    some = [*perfect(), verdict("linear", 1, Status.REFUSED, message="no bias")]
    assert reached(some, HIGHEST)[0] == HIGHEST


def test_what_is_not_required_does_not_count_as_own() -> None:
    """A kernel that is claimed in a second dtype alone is not enough."""
    others = changed("attention", required=False)
    assert reached(others, HIGHEST)[0] == 1


def test_unverified_holds_nothing_but_replaces_nothing() -> None:
    assert reached([*perfect(), verdict("models", 0, Status.UNVERIFIED, group="models")], HIGHEST)[0] == HIGHEST
    assert reached(changed("kv_transfer", status=Status.UNVERIFIED), HIGHEST)[0] == HIGHEST - 1


def test_nothing_run_reaches_nothing() -> None:
    level, advice = reached([], HIGHEST)
    assert level == -1
    assert "was not run" in advice
    assert lacks(LEVELS[1], [])


def test_unknown_contracts_stand_with_the_primitives() -> None:
    assert level_of("rotary_attention") == level_of("attention")
    assert not is_required("rotary_attention")
    assert (level_of("gated_mlp"), level_of("attention"), level_of("verify"), level_of("program")) == (1, 2, 6, 3)
