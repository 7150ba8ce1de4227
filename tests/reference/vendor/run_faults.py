"""Runs checks of the kit under one fault of the Acme plugin after another, in this process; prints verdicts as JSON.

Input: JSON [[fault, group, pattern of cases, seconds per check or null], ...] as the first argument.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict

import torch

from hardpoint_platforms.conformance.catalogue import own_groups
from hardpoint_platforms.conformance.runner import Run, Selection
from hardpoint_platforms.conformance.subject import named


def main() -> None:
    """Hanging checks leave threads behind that would keep the process: it is left by force."""
    torch.set_num_threads(1)
    for fault, group, case, patience in json.loads(sys.argv[1]):
        os.environ["ACME_NPU_FAULT"] = fault
        selection = Selection(level=5, cases=(case,), patience=patience)
        run = Run(named("acme"), [one for one in own_groups() if one.name == group], selection)
        found = [asdict(run.verdict(check)) for check in run.checks()]
        print(json.dumps({"fault": fault, "case": case, "verdicts": found}), flush=True)
        if not patience:
            run.close()
    os._exit(0)


if __name__ == "__main__":
    main()
