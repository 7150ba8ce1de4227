"""`hardpoint simulate` as people type it."""

from __future__ import annotations

import builtins
import html
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from hardpoint.cli.main import main
from hardpoint.simulate.page import marks

BASE = [
    "simulate",
    "llama-3.1-8b",
    "--hardware",
    "h200-sxm",
    "--rate",
    "20",
    "--duration",
    "5",
    "--max-model-len",
    "4k",
]


def answer(capsys: pytest.CaptureFixture[str], *flags: str, code: int = 0) -> Any:
    assert main([*BASE, *flags, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 2
    return capsys.readouterr().err


def test_the_same_seed_gives_the_same_answer(capsys: pytest.CaptureFixture[str]) -> None:
    one, two, other = (answer(capsys, "--spread", "0.5", "--burst", "3", "--seed", seed) for seed in "112")
    assert one == two
    assert one != other
    assert one["requests"] > 50
    assert one["ttft"]["p50"] <= one["ttft"]["p95"] <= one["ttft"]["max"]


def test_the_text_says_it_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, "--replicas", "2", "--routing", "least-loaded"]) == 0
    text = capsys.readouterr().out
    for word in ("ttft", "tpot", "throughput", "KV use", "preemptions", "p95", "output tok/s", "pages of 16 tokens"):
        assert word in text, word


def test_a_trace_is_replayed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "day.csv"
    path.write_text("arrival,prompt_tokens,output_tokens,prefix_id\n0,640,4,a\n1,700,5,a\n2,10,6,\n")
    assert main(["simulate", "llama-3.1-8b", "--trace", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["prompt_tokens"], found["output_tokens"]) == (3, 1350, 15)
    assert found["prefix_hit_share"] == pytest.approx(640 / 1350)
    path.write_text("arrival,prompt_tokens,output_tokens\n0,640,4\n1,many,5\n")
    told = refusal(capsys, "simulate", "llama-3.1-8b", "--trace", str(path))
    assert "line 3, column prompt_tokens: 'many'" in told


def test_the_fewest_replicas_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    slo = "latency_p95<1.2"
    found = answer(capsys, "--rate", "120", "--find-replicas", "--slo", slo)
    needed = found["replicas_needed"]
    assert needed > 1
    assert found["chips_needed"] == needed
    assert found["replicas"] == needed
    assert answer(capsys, "--rate", "120", "--replicas", str(needed))["latency"]["p95"] < 1.2
    assert answer(capsys, "--rate", "120", "--replicas", str(needed - 1))["latency"]["p95"] >= 1.2
    never = answer(capsys, "--find-replicas", "--slo", "ttft_p95<0.1ms", "--max-replicas", "2", code=1)
    assert never["replicas_needed"] is None


def test_a_run_that_refuses_all_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = answer(capsys, "--input-len", "5000", "--html", str(tmp_path / "out.html"))
    assert (found["requests"], found["output_tokens"], found["ttft"]["p95"]) == (0, 0, None)
    assert found["refused"] > 50
    assert "5000 tokens" in found["refusal"]
    asked = answer(
        capsys, "--input-len", "5000", "--find-replicas", "--slo", "ttft_p95<1", "--max-replicas", "1", code=1
    )
    assert asked["tried"][0]["ttft_p95"] is None


def test_recorded_step_times_replace_the_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text("tokens,seconds\n1,0.5\n100000,0.5\n")
    found = answer(capsys, "--rate", "1", "--step-times", str(path))
    assert found["step_mean"] == pytest.approx(0.5)


def test_the_html_stands_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.html"
    answer(capsys, "--html", str(path))
    page = path.read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert page.count("<svg") == 5
    assert len(re.findall(r'polyline class="line \w+" points="[\d., ]{50,}', page)) == 6
    assert not re.search(r"https?:|src=|href=|url\(|<script|@import|NaN", page)
    assert "prefers-color-scheme:dark" in page
    assert "width=device-width" in page
    assert "no such" in refusal(capsys, *BASE, "--html", str(tmp_path / "no" / "out.html")).lower()


def test_the_page_names_the_command_that_gives_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, again = tmp_path / "out.html", tmp_path / "again.html"
    flags = ["--spread", "0.25", "--no-overlap", "--prefixes", "2", "--prefix-tokens", "40", "--burst", "2.5"]
    answer(capsys, *flags, "--html", str(path))
    (command,) = re.findall(r"<code>(.*?)</code>", path.read_text(encoding="utf-8"))
    words = shlex.split(html.unescape(command))
    assert words[:2] == ["hardpoint", "simulate"]
    assert "--html" not in words
    assert main([*words[1:], "--html", str(again)]) == 0
    assert again.read_text(encoding="utf-8") == path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("highest", "wanted"),
    [
        (0.0, [0, 1]), (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1]), (61.9, [0, 20, 40, 60, 80]),
        (0.0111, [0, 0.0025, 0.005, 0.0075, 0.01, 0.0125]),
        (22111.0, [0, 5000, 10000, 15000, 20000, 25000]), (100.0, [0, 20, 40, 60, 80, 100]),
    ],
)  # fmt: skip
def test_axes_have_round_marks(highest: float, wanted: list[float]) -> None:
    assert marks(highest) == pytest.approx(wanted)


def test_plot_without_matplotlib_names_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError("No module named 'matplotlib'")
        return plain(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    told = refusal(capsys, *BASE, "--plot", str(tmp_path / "out.png"))
    assert "pip install 'hardpoint[plot]'" in told
    assert not (tmp_path / "out.png").exists()


def test_plot_is_a_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    answer(capsys, "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["simulate"], "--list"),
        (["simulate", "llama-3.1-8b"], "--trace FILE or --rate R"),
        ([*BASE, "--trace", "x.csv"], "--trace FILE or --rate R"),
        ([*BASE, "--slo", "ttft_p95<1"], "--find-replicas"),
        ([*BASE, "--find-replicas", "--slo", "nonsense"], "nonsense"),
        ([*BASE, "--hardware", "h300"], "no such row"),
        ([*BASE, "--duration", "0"], "--duration"),
        ([*BASE, "--prefixes", "3"], "--prefix-tokens"),
        ([*BASE, "--tp", "7"], "--tp 7"),
        (["simulate", "llama-3.1-405b", "--rate", "1"], "--tp"),
    ],
)
def test_what_cannot_be_is_refused(capsys: pytest.CaptureFixture[str], argv: list[str], named: str) -> None:
    assert named in refusal(capsys, *argv)


def test_the_list_and_help_need_no_torch() -> None:
    code = (
        "import sys\nfrom hardpoint.cli.main import main\n"
        "for flag in ('--help', '--list'): assert main(['simulate', flag]) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "tpu-v6e" in shown
    assert "llama-3.1-70b" in shown
