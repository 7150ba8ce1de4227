"""What the tests of hardpoint-tpu share."""

from __future__ import annotations

from typing import Any

#: Few programs that compile fast; what they compute is the same. Nothing is kept on disk.
FAST: dict[str, Any] = {"effort": 0, "shapes": "full", "growth": 16, "cache": "off"}
