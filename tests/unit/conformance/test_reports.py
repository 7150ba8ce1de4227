"""Reports: numbers, failures with their commands, and an HTML page that needs nothing from outside."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest
from verdicts import perfect, report, verdict

from hardpoint_platforms.conformance.report_html import page, share_of, speed_of
from hardpoint_platforms.conformance.report_text import MOST_FAILURES, render
from hardpoint_platforms.conformance.verdict import Status, counts

FAILURE = verdict(
    "linear", 1, Status.FAIL, dtype="float32", message="acme-npu 1.2: linear is off by 2", blame="acme.py:12 in kernel",
    repeat="hardpoint conformance --device acme --case 'ops/linear/a'", error=2.0, tolerance=0.5,
)  # fmt: skip
TIMED = verdict(
    "norm", 1, dtype="bfloat16", phase="decode", error=0.5, tolerance=1.0, seconds=1.0, reference_seconds=3.0
)


def test_text_says_level_failure_place_command_and_next() -> None:
    text = render(report([FAILURE, TIMED]))
    assert "level: L2 attention and state" in text
    assert "acme-npu 1.2: linear is off by 2" in text
    assert "at acme.py:12 in kernel" in text
    assert "repeat: hardpoint conformance --device acme --case 'ops/linear/a'" in text
    assert text.splitlines()[-1] == "next: for L3: write a provider of sample"
    assert "50% of what is allowed" in text
    assert "3.0 x the reference's speed" in text


@pytest.mark.parametrize(("reached", "words"), [(-1, "none yet"), (None, "not judged"), (0, "L0 memory")])
def test_text_of_other_levels(reached: int | None, words: str) -> None:
    assert words in render(report([TIMED], reached))


def test_many_failures_are_cut() -> None:
    text = render(report([FAILURE] * (MOST_FAILURES + 5)))
    assert text.count("repeat:") == MOST_FAILURES
    assert "and 5 more" in text


def test_colours_go_through_paint() -> None:
    assert "<red>" in render(report([FAILURE]), lambda text, style: f"<{style}>{text}</{style}>")


def test_json_is_whole_and_plain() -> None:
    odd = verdict("norm", 1, Status.FAIL, error=float("inf"), tolerance=float("nan"))
    document = json.loads(json.dumps(report([FAILURE, odd]).as_json(), allow_nan=False))
    assert document["counts"]["fail"] == 2
    assert document["verdicts"][0]["repeat"].startswith("hardpoint conformance")
    assert document["verdicts"][1]["error"] == "inf"
    assert document["reached"] == 2


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.cells: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action")]
        if tag == "td" and given.get("title"):
            self.cells.append((given.get("class") or "", given["title"] or ""))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_is_one_file_with_a_matrix() -> None:
    html = page(report([*perfect(), FAILURE, TIMED]))
    tags = _Tags()
    tags.feed(html)
    assert not tags.open
    assert not tags.links
    assert "@import" not in html
    assert "url(" not in html
    assert "prefers-color-scheme: dark" in html
    assert ("fail", "0 of 1 pass, 400% of the tolerance. acme-npu 1.2: linear is off by 2") in tags.cells
    assert any(kind == "pass" and "50% of the tolerance" in title for kind, title in tags.cells)
    assert "3.00x" in html
    assert "decode" in html


def test_html_escapes_what_plugins_say() -> None:
    html = page(report([verdict("<b>", 1, Status.FAIL, message="<script>alert(1)</script>", repeat="a & b")]))
    assert "<script>" not in html
    assert "Acme &lt;NPU&gt;" in html
    assert "a &amp; b" in html


def test_numbers() -> None:
    assert speed_of([TIMED, FAILURE]) == 3.0
    assert speed_of([FAILURE]) is None
    assert share_of([TIMED, FAILURE]) == 4.0
    assert verdict("x", 0, error=1.0, tolerance=0.0).ratio == float("inf")
    assert verdict("x", 0, error=0.0, tolerance=0.0).ratio == 0.0
    assert counts([TIMED, FAILURE]) == {"pass": 1, "fail": 1, "refused": 0, "unverified": 0}
