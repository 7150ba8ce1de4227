"""The tests of this folder import what they look with."""

from __future__ import annotations

import sys
from pathlib import Path

if (HERE := str(Path(__file__).parent)) not in sys.path:
    sys.path.insert(0, HERE)
