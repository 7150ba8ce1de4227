"""docs/reading-order.md leads a newcomer along one request, through files that exist and are short."""

from __future__ import annotations

import re
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
PAGE = CHECKOUT / "docs" / "reading-order.md"
ORDER = [
    "core/hardpoint/server/openai/chat.py",
    "core/hardpoint/frontend/client.py",
    "core/hardpoint/engine/loop.py",
    "core/hardpoint/scheduler/scheduler.py",
    "core/hardpoint/kv/pager.py",
    "core/hardpoint/worker/model_runner.py",
    "core/hardpoint/models/decoder.py",
    "platforms/hardpoint_platforms/ops/attention.py",
]


def test_the_page_lists_the_eight_files_in_order() -> None:
    listed = re.findall(r"^\d+\. \[`([^`]+)`\]", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert listed == ORDER


def test_each_listed_file_is_there_and_short() -> None:
    for path in ORDER:
        lines = len((CHECKOUT / path).read_text(encoding="utf-8").splitlines())
        assert 10 <= lines <= 400, f"{path} has {lines} lines"
