"""`python -m hardpoint_platforms.conformance --device NAME`: the kit where the core is not installed."""

from __future__ import annotations

import sys

from hardpoint_platforms.conformance.command import main

if __name__ == "__main__":
    sys.exit(main())
