"""All faults, and the kit run on one of them."""

from __future__ import annotations

from hardpoint_platforms import ceilings
from hardpoint_platforms.conformance.catalogue import own_groups
from hardpoint_platforms.conformance.mutants import kernels, machinery, paging
from hardpoint_platforms.conformance.mutants.platform import DISTRIBUTION, NAME, Fault, MutantPlatform
from hardpoint_platforms.conformance.runner import Selection, conduct
from hardpoint_platforms.conformance.subject import Subject
from hardpoint_platforms.conformance.verdict import Report
from hardpoint_platforms.discovery import PlatformEntry

FAULTS: tuple[Fault, ...] = (*kernels.FAULTS, *paging.FAULTS, *machinery.FAULTS)


def subject_of(fault: Fault) -> Subject:
    """The reference with this fault, as a device under test."""
    entry = PlatformEntry(NAME, DISTRIBUTION, "0", "hardpoint_platforms.conformance.mutants.platform")
    return Subject(entry, MutantPlatform(fault), folders=(str(__file__).rpartition("/")[0],))


def run(fault: Fault, selection: Selection | None = None) -> Report:
    """The groups that must catch the fault, or what the selection says."""
    chosen = selection or Selection(cases=fault.cases, groups=fault.groups, patience=fault.patience)
    needed = [group for group in own_groups() if not chosen.groups or group.name in chosen.groups]
    kept = ceilings.Ceilings
    try:
        return conduct(subject_of(fault), needed, chosen)
    finally:
        ceilings.Ceilings = kept  # type: ignore[misc]  # one of the faults patches it
