"""Hold a device plugin against the interface, level by level: every contract, state, programs, whole tiny models.

Prints the level reached, what fails with a command that repeats it, and what to do for the next level. Exit code 1 if a
check fails.
"""

from __future__ import annotations

import argparse
import sys

from hardpoint.cli import console
from hardpoint_platforms.conformance import command
from hardpoint_platforms.errors import HardpointError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `hardpoint conformance`."""
    command.add_arguments(parser)


def execute(args: argparse.Namespace) -> int:
    """Run the checks and report."""
    from hardpoint.conformance.groups import groups

    try:
        outcome = command.conduct_arguments(args, groups(), "hardpoint conformance")
    except HardpointError as error:
        if args.stream is None:
            raise
        return command.refuse(error, args)
    if isinstance(outcome, list):
        sys.stdout.write("".join(f"{case}\n" for case in outcome))
        return 0
    return command.write(outcome, args, console.paint)
