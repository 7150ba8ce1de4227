"""The start-up story and the progress line."""

from __future__ import annotations

import io
import json

import msgspec
import pytest

from hardpoint.cli import console
from hardpoint.cli.serve import refuse_taken_port, shown_url
from hardpoint.cli.story import SHOWN_FALLBACKS, engine_story, server_story
from hardpoint.errors import ConfigError
from hardpoint.protocol.messages import EngineInfo

INFO = EngineInfo(
    device="cpu:0",
    device_name="Some CPU, 2 cores",
    device_reason="the only one",
    tuning=[("threads", "2", "physical cores"), ("dtype", "float32", "")],
    dtype="float32",
    kv_dtype="bfloat16",
    weight_bytes=64 << 20,
    kv_bytes=2 << 30,
    num_pages=1000,
    page_tokens=16,
    max_model_len=8192,
    max_concurrency=1.95,
    vocab_size=100,
    ops=[("fast", 30), ("reference", 2)],
    fallbacks=["sample at sampler"],
    phases=[("load weights", 1.25)],
)


def test_the_story_has_every_fact() -> None:
    text = "\n".join(engine_story(INFO, "tiny", 3.21))
    for fact in (
        "tiny, float32, context 8,192 tokens",
        "cpu:0, Some CPU, 2 cores (the only one)",
        "threads 2 (physical cores)",
        "weights 64.0 MiB, KV cache 2.00 GiB (bfloat16)",
        "1,000 of 16 tokens = 16,000 tokens",
        "1.9 sequences of full length",
        "fast 30, reference 2",
        "sample at sampler",
        "after 3.2 s: load weights 1.2",
    ):
        assert fact in text, fact


def test_it_is_short_and_narrow() -> None:
    lines = "\n".join(engine_story(INFO, "tiny", 3.0)).splitlines()
    assert len(lines) <= 12
    assert max(map(len, lines)) <= 124
    assert sum(line.startswith("  tuning") for line in lines) == 1  # the second has no name in front


def test_many_fallbacks_are_counted() -> None:
    many = msgspec.structs.replace(INFO, fallbacks=[f"op {i}" for i in range(SHOWN_FALLBACKS + 3)])
    text = "\n".join(engine_story(many, "tiny", 3.0))
    assert f"op {SHOWN_FALLBACKS - 1}" in text
    assert f"op {SHOWN_FALLBACKS}" not in text
    assert "and 3 more" in text


def test_no_fallbacks_no_line() -> None:
    assert "fallback" not in "\n".join(engine_story(msgspec.structs.replace(INFO, fallbacks=[]), "tiny", 3.0))


@pytest.mark.parametrize(("chat", "path"), [(True, "/v1/chat/completions"), (False, "/v1/completions")])
def test_the_curl_line_is_a_request(chat: bool, path: str) -> None:
    text = "\n".join(server_story("http://127.0.0.1:8000", "tiny", chat=chat, key_needed=True))
    assert f"curl http://127.0.0.1:8000{path} -H 'Authorization: Bearer" in text
    body = json.loads(text.split("-d '")[1].removesuffix("'"))
    assert body["model"] == "tiny"
    assert ("messages" in body) is chat


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:1"), ("::", "http://[::1]:1"), ("::1", "http://[::1]:1"), ("h", "http://h:1")],
)
def test_addresses_that_a_client_can_use(host: str, url: str) -> None:
    assert shown_url(host, 1) == url


def test_a_taken_port_is_refused_with_another() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}") as caught:
            refuse_taken_port("127.0.0.1", port)
        assert f"--port {port + 1}" in (caught.value.hint or "")
    refuse_taken_port("127.0.0.1", port)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_draws_on_terminals_only() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        line = console.ProgressLine(stream)
        line.update("load weights", 0.5)
        line.update("load weights", 0.5)
        line.clear()
    assert pipe.getvalue() == ""
    assert terminal.getvalue().count("load weights") == 1
    assert "50%" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\033[2K")


def test_colours_only_where_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert console.paint("x", "red", Terminal()) == "\033[31mx\033[0m"
    assert console.paint("x", "red", io.StringIO()) == "x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert console.paint("x", "red", Terminal()) == "x"
