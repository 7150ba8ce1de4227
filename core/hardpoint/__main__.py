"""`python -m hardpoint` is the command `hardpoint`."""

from __future__ import annotations

import sys

from hardpoint.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
