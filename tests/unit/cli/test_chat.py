"""The conversation in the terminal, with a speaker made up here, and with a server made up here."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from hardpoint.bench.load import Target
from hardpoint.cli.chat import Conversation
from hardpoint.cli.local_engine import LocalEngine, no_template
from hardpoint.cli.speakers import Answer, LocalSpeaker, LoopThread, ServerSpeaker, Speaker, request_fields
from hardpoint.errors import EngineDead, EngineError, RequestError
from hardpoint.request.output import SequenceDelta
from hardpoint.request.sampling import SamplingParams


class Echo(Speaker):
    """Answers with the number of messages and the last text; remembers what it was given."""

    name = "echo"

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.heard: list[list[dict[str, str]]] = []
        self.closed = False

    async def reply(self, messages: Sequence[Any], params: SamplingParams, answer: Answer) -> AsyncIterator[str]:
        self.heard.append([dict(message) for message in messages])
        for word in (str(len(messages)), " ", messages[-1]["content"].upper()):
            yield word
        if self.error is not None:
            raise self.error
        answer.finish_reason = "stop"

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    with closing(LoopThread()) as thread:
        yield thread


def converse(loop: LoopThread, speaker: Speaker, lines: list[str], system: str | None = None) -> Conversation:
    conversation = Conversation(loop, speaker, SamplingParams(max_tokens=None), system)
    waiting: Iterator[str] = iter(lines)
    conversation.run(lambda: next(waiting, None))
    return conversation


def test_answers_stream_and_are_remembered(loop: LoopThread, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = converse(loop, Echo(), ["one\n", "\n", "two\n"])
    assert capsys.readouterr().out == "1 ONE\n3 TWO\n"
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 2
    assert conversation.messages[1]["content"] == "1 ONE"


def test_commands(loop: LoopThread, capsys: pytest.CaptureFixture[str]) -> None:
    echo = Echo()
    lines = ["one", "/reset", "/system be brief", "two", "/system", "three", "/what", "/quit", "never"]
    converse(loop, echo, lines, system="first")
    captured = capsys.readouterr()
    assert [messages[0]["content"] for messages in echo.heard] == ["first", "be brief", "two"]
    assert [len(messages) for messages in echo.heard] == [2, 2, 3]
    assert "/what: unknown" in captured.err
    assert "NEVER" not in captured.out


def test_a_path_is_no_command(loop: LoopThread, capsys: pytest.CaptureFixture[str]) -> None:
    converse(loop, Echo(), ["/etc/hosts is a file"])
    assert "1 /ETC/HOSTS IS A FILE" in capsys.readouterr().out


def test_a_failed_turn_is_taken_back(loop: LoopThread, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = converse(loop, Echo(RequestError("too long")), ["one"])
    assert conversation.messages == []
    assert "error: too long" in capsys.readouterr().err


def test_a_dead_engine_ends_the_conversation(loop: LoopThread) -> None:
    with pytest.raises(EngineDead):
        converse(loop, Echo(EngineDead("gone")), ["one"])


def test_leaving_a_stream_early_closes_it(loop: LoopThread) -> None:
    closed = threading.Event()

    async def endless() -> AsyncIterator[str]:
        try:
            while True:
                yield "x"
                await asyncio.sleep(0)
        finally:
            closed.set()

    stream = loop.iterate(endless())
    assert next(stream) == "x"
    stream.close()  # type: ignore[attr-defined]
    assert closed.is_set()


class Client:
    """An engine client of two deltas."""

    info = SimpleNamespace(vocab_size=100, max_model_len=50, max_logprobs=None, max_biased_tokens=None)

    def __init__(self, last: SequenceDelta) -> None:
        self.last = last
        self.prompt: list[int] = []

    async def generate(self, prompt: Sequence[int], params: Any, *, request_id: str) -> AsyncIterator[SequenceDelta]:
        self.prompt = list(prompt)
        yield SequenceDelta(0, "hel", (1, 2))
        yield self.last


TOKENIZER = SimpleNamespace(
    has_chat_template=True,
    render_chat=lambda messages, add_generation_prompt: "|".join(m["content"] for m in messages),
    encode=lambda text, add_special_tokens=True: [len(text)],
)


def speak(last: SequenceDelta, params: SamplingParams) -> tuple[list[str], Answer, Client]:
    client, answer = Client(last), Answer()
    speaker = LocalSpeaker(LocalEngine(client, TOKENIZER), "tiny")  # type: ignore[arg-type]

    async def collect() -> list[str]:
        return [text async for text in speaker.reply([{"role": "user", "content": "abc"}], params, answer)]

    return asyncio.run(collect()), answer, client


def test_the_local_speaker_streams_and_counts() -> None:
    texts, answer, client = speak(SequenceDelta(0, "lo", (3,), finish_reason="stop"), SamplingParams(max_tokens=9))
    assert texts == ["hel", "lo"]
    assert answer == Answer(tokens=3, finish_reason="stop")
    assert client.prompt == [3]


def test_the_local_speaker_raises_the_engines_error() -> None:
    with pytest.raises(EngineError, match="not finite"):
        speak(SequenceDelta(0, finish_reason="error", error="not finite"), SamplingParams())


def test_wrong_parameters_never_reach_the_engine() -> None:
    with pytest.raises(RequestError, match="top_p"):
        speak(SequenceDelta(0), SamplingParams(top_p=2.0))


def test_a_base_model_is_told_what_else_works() -> None:
    error = no_template("gemma3-270m")
    assert "base model" in error.message
    assert "hardpoint run gemma3-270m" in (error.hint or "")


class Handler(http.server.BaseHTTPRequestHandler):
    """A server of the OpenAI kind; the model's name chooses what it does."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.seen.append((self.path, self.headers.get("authorization"), body))  # type: ignore[attr-defined]
        if body["model"] == "absent":
            self._send(404, json.dumps({"error": {"message": "no such model"}}))
            return
        events: list[dict[str, Any]] = [
            {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
            {"choices": [{"delta": {"content": "Hi"}, "finish_reason": None}]},
        ]
        if body["model"] == "dying":
            events.append({"error": {"message": "the engine is gone"}})
        else:
            events.append({"choices": [{"delta": {"content": "!"}, "finish_reason": "stop"}]})
            events.append({"choices": [], "usage": {"completion_tokens": 7}})
        self._send(200, "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")

    def _send(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:
        return None


@pytest.fixture
def server() -> Iterator[http.server.HTTPServer]:
    made = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    made.seen = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()


def ask(server: http.server.HTTPServer, model: str) -> tuple[list[str], Answer]:
    speaker = ServerSpeaker(Target("127.0.0.1", server.server_port, api_key="k"), model)
    answer = Answer()

    async def collect() -> list[str]:
        params = SamplingParams(temperature=0.0, max_tokens=5, stop=("x",))
        return [text async for text in speaker.reply([{"role": "user", "content": "hi"}], params, answer)]

    return asyncio.run(collect()), answer


def test_the_server_speaker(server: Any) -> None:
    assert ask(server, "tiny") == (["Hi", "!"], Answer(tokens=7, finish_reason="stop"))
    path, key, body = server.seen[0]
    assert (path, key) == ("/v1/chat/completions", "Bearer k")
    assert body["stream"] is True
    assert (body["max_tokens"], body["stop"], body["temperature"]) == (5, ["x"], 0.0)


@pytest.mark.parametrize(("model", "message"), [("absent", "HTTP 404.*no such model"), ("dying", "the engine is gone")])
def test_the_servers_refusals_are_told(server: Any, model: str, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        ask(server, model)


def test_unset_fields_are_not_sent() -> None:
    assert request_fields(SamplingParams(max_tokens=None)) == {"temperature": 1.0, "top_p": 1.0}
