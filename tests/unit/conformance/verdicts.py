"""Verdicts for the tests here: a device that passes everything, with changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hardpoint_platforms.conformance.ladder import LEVELS
from hardpoint_platforms.conformance.verdict import Report, Status, Verdict


def verdict(contract: str, level: int, status: Status = Status.PASS, group: str = "ops", **more: Any) -> Verdict:
    return Verdict(f"{group}/{contract}/a", group, contract, level, status, required=True, **more)


def perfect() -> list[Verdict]:
    """One pass of everything that the ladder asks for."""
    found = [verdict(contract, level.number) for level in LEVELS for contract in level.contracts]
    return found + [
        verdict(contract, level.number, group=group) for level in LEVELS for group, contract in level.interfaces
    ]


def changed(contract: str, **changes: Any) -> list[Verdict]:
    """As `perfect`, but for one contract."""
    return [replace(one, **changes) if one.contract == contract else one for one in perfect()]


def report(verdicts: list[Verdict], reached: int | None = 2, **more: Any) -> Report:
    facts = {
        "device": "acme:0", "name": "Acme <NPU>", "distribution": "acme-npu", "version": "1.2", "seed": 7, "asked": 6,
        "partial": False, "next_step": "for L3: write a provider of sample", "seconds": 1.5,
        "machine": {"torch": "2"},
    }  # fmt: skip
    return Report(**{**facts, **more}, reached=reached, verdicts=tuple(verdicts))
