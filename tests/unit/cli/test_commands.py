"""doctor, models, pull, run, bench and the choice of a model, with what they call replaced."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hardpoint.bench.load import Record
from hardpoint.cli import local_engine, run
from hardpoint.cli.main import main
from hardpoint.cli.model_name import chosen_model, shown_name
from hardpoint.errors import ConfigError, ModelNotFound
from hardpoint.request.output import SequenceDelta


def device_row(status: str) -> Any:
    from hardpoint_platforms.doctor import DeviceRow

    return DeviceRow(
        "acme:0", "Acme One", status, "8x64 by 64x32", 1 << 30, 2 << 30, tuning=(("threads", "2", "cores"),)
    )


def doctor_rows(status: str) -> list[Any]:
    from hardpoint_platforms.doctor import Row

    return [
        Row("acme", "acme-hp", "1.2", "accelerator", status, mend=None, devices=(device_row(status),)),
        Row("lost", "lost-hp", "0.1", "accelerator", "absent", reason="no such chip here", mend="plug one in"),
    ]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HARDPOINT_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(("status", "code"), [("PASS", 0), ("FAIL", 1)])
def test_doctor(
    status: str, code: int, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hardpoint_platforms.discovery.discover", lambda: None)
    monkeypatch.setattr("hardpoint_platforms.doctor.diagnose", lambda registry: doctor_rows(status))
    (home / "models").mkdir()
    (home / "models" / "x.gguf").write_bytes(b"12345")
    assert main(["doctor"]) == code
    out = capsys.readouterr().out
    for fact in (status, "acme:0: Acme One", "no such chip here", "-> plug one in", "1.00 GiB free of 2.00 GiB"):
        assert fact in out
    assert "1 files, 5 B" in out
    assert "not run this plugin on real hardware" in out
    assert main(["doctor", "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is (code == 0)
    assert document["platforms"][0]["devices"][0]["device"] == "acme:0"
    assert document["models"]["bytes"] == 5
    assert document["versions"]["python"]


def test_models_list_and_rm(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from hardpoint.weights.store import CATALOGUE

    folder = home / "models" / "smollm2"
    folder.mkdir(parents=True)
    (folder / CATALOGUE["smollm2"].file).write_bytes(b"GGUF")
    assert main(["models"]) == 0
    assert "hardpoint pull gemma3-270m" in capsys.readouterr().out
    assert main(["models", "list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["smollm2"]["path"].endswith(".gguf")
    assert datetime.fromisoformat(rows["smollm2"]["pulled"])
    assert rows["gemma3-270m"]["path"] is None
    assert main(["models", "rm", "smollm2"]) == 0
    assert not folder.exists()
    assert main(["models", "rm", "smollm2"]) == 2


def test_pull(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = []

    def pull(name: str, progress: Any) -> Path:
        asked.append(name)
        progress("download", 1 << 20, 4 << 20)
        progress("unpack", 5, 0)
        return Path("/models/it.gguf")

    monkeypatch.setattr("hardpoint.weights.store.pull", pull)
    assert main(["pull", "smollm2"]) == 0
    captured = capsys.readouterr()
    assert asked == ["smollm2"]
    assert captured.out == "/models/it.gguf\n"
    assert "hardpoint serve smollm2" in captured.err


def test_no_model_means_the_default_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen_model("given", "serve") == "given"
    monkeypatch.setattr("hardpoint.weights.store.resolve", lambda name: Path("/there"))
    assert chosen_model(None, "serve") == "smollm2"

    def absent(name: str) -> Path:
        raise ModelNotFound("no")

    monkeypatch.setattr("hardpoint.weights.store.resolve", absent)
    with pytest.raises(ConfigError, match="default model 'smollm2' is not here") as caught:
        chosen_model(None, "chat")
    assert "hardpoint pull smollm2 && hardpoint chat" in (caught.value.hint or "")


def test_serve_without_a_model_says_what_to_type(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve"]) == 2
    assert "hardpoint pull smollm2 && hardpoint serve" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "name"), [("/a/b/c.gguf", "c.gguf"), ("org/repo", "org/repo"), ("smollm2", "smollm2"), ("./m/", "m")]
)
def test_names_for_people(model: str, name: str) -> None:
    assert shown_name(model) == name


class Client:
    """Answers with the prompt's length, then ends."""

    info = SimpleNamespace(vocab_size=1000, max_model_len=500, max_logprobs=None, max_biased_tokens=None)
    closed = False

    async def generate(self, prompt: Sequence[int], params: Any, *, request_id: str) -> AsyncIterator[SequenceDelta]:
        self.params = params
        yield SequenceDelta(0, f"got {len(prompt)}", (1,))
        yield SequenceDelta(0, "", (2,), finish_reason="stop")

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    client = Client()
    tokenizer = SimpleNamespace(
        has_chat_template=True,
        render_chat=lambda messages, add_generation_prompt: "#".join(message["content"] for message in messages),
        encode=lambda text, add_special_tokens=True: list(range(len(text))),
    )
    local = local_engine.LocalEngine(client, tokenizer)  # type: ignore[arg-type]
    monkeypatch.setattr(run, "start_local", lambda loop, config: local)
    return local


def test_run_uses_the_chat_template(engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "tiny", "hello", "--system", "s", "--seed", "5", "--stop", "x"]) == 0
    assert capsys.readouterr().out == "got 7\n"  # "s#hello"
    assert engine.client.closed
    assert engine.client.params.seed == 5
    assert engine.client.params.stop == ("x",)
    assert engine.client.params.temperature == 0.0


def test_run_raw_and_base_models_continue_the_prompt(engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "tiny", "hello", "--raw"]) == 0
    engine.tokenizer.has_chat_template = False
    assert main(["run", "tiny", "hello!"]) == 0
    assert capsys.readouterr().out == "got 5\ngot 6\n"
    assert main(["run", "tiny", "hello", "--system", "s"]) == 2
    assert engine.client.closed


def test_run_reads_standard_input(
    engine: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(read=lambda: "four", isatty=lambda: False))
    assert main(["run", "tiny", "-"]) == 0
    assert capsys.readouterr().out == "got 4\n"
    assert main(["run", "tiny", "  "]) == 2


def test_bench_serve_prints_the_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen = []

    def measure(settings: Any, on_done: Any) -> list[Record]:
        seen.append(settings)
        on_done()
        return [Record(0.0, (0.1, 0.2), 0.2, 8, 2), Record(0.0, (), 0.3, error="HTTP 500: no")]

    monkeypatch.setattr("hardpoint.bench.serving.run", measure)
    line = "bench serve --url http://h:1 --concurrency 4 --num-requests 2 --input-len 8 --output-len 2 --rate 5"
    assert main([*line.split(), "--histogram"]) == 1  # a request failed
    out = capsys.readouterr().out
    assert "1 done, 1 failed" in out
    assert "TTFT (ms)" in out
    settings = seen[0]
    assert (settings.concurrency, settings.requests, settings.rate, settings.prompts.input_len) == (4, 2, 5.0, 8)
    assert main([*line.split(), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ttft"]["p50"] == pytest.approx(0.1)


def test_bench_step_is_real(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", "--requests", "4", "--steps", "5"]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert "ms per step" in header
    assert row.split()[0] == "4"


def test_bench_throughput_and_latency(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    batches: list[Any] = []

    class Offline:
        @classmethod
        def from_config(cls, config: Any) -> Offline:
            return cls()

        def generate(self, prompts: Any, params: Any, *, use_tqdm: bool) -> list[Any]:
            batches.append(prompts)
            sequence = SimpleNamespace(token_ids=[0] * params.max_tokens)
            return [SimpleNamespace(prompt_token_ids=p["prompt_token_ids"], outputs=[sequence]) for p in prompts]

    monkeypatch.setitem(sys.modules, "hardpoint.llm", SimpleNamespace(LLM=Offline))
    assert (
        main(["bench", "throughput", "tiny", "--num-requests", "3", "--input-len", "4", "--output-len", "5", "--json"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["prompt_tokens"], found["output_tokens"]) == (3, 12, 15)
    batches.clear()
    assert (
        main(
            [
                "bench",
                "latency",
                "tiny",
                "--num-requests",
                "2",
                "--rounds",
                "2",
                "--input-len",
                "4",
                "--output-len",
                "5",
            ]
        )
        == 0
    )
    assert "batch of 2" in capsys.readouterr().out
    prompts = [tuple(p["prompt_token_ids"]) for batch in batches for p in batch]
    assert len(set(prompts)) == len(prompts) == 8  # every prompt is new to the prefix cache
