"""A scripted engine client and a byte tokenizer: the server's tests need no model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest

from hardpoint.config.engine import ModelConfig
from hardpoint.config.server import ServerConfig
from hardpoint.errors import EngineBusy, EngineDead
from hardpoint.frontend.client import EngineClient
from hardpoint.protocol.messages import EngineInfo, EngineStats, RequestTiming
from hardpoint.request.output import Logprob, SequenceDelta
from hardpoint.server.app import create_app

FIRST_BYTE = 3
EOS = 2
#: Pieces of several characters behind the 256 bytes.
PIECES = (" world", "hello", " 🦜")
VOCAB = FIRST_BYTE + 256 + len(PIECES)
MAX_MODEL_LEN = 256


class ByteTokenizer:
    """Ids 0 to 2 are <pad>, <s>, </s>; then one per byte; then PIECES. `<s>` is put before texts on request."""

    vocab_size = VOCAB
    special_ids = (0, 1, EOS)
    eos_token_ids = (EOS,)
    bos_token_id = 1
    adds_bos = False

    def __init__(self) -> None:
        self.chat_template: str | None = "{{ plain }}"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = [FIRST_BYTE + byte for byte in text.encode()]
        return [1, *ids] if add_special_tokens and self.adds_bos else ids

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < FIRST_BYTE:
            return (b"<pad>", b"<s>", b"</s>")[token_id]
        if token_id < FIRST_BYTE + 256:
            return bytes([token_id - FIRST_BYTE])
        return PIECES[token_id - FIRST_BYTE - 256].encode()

    def id_to_token(self, token_id: int) -> str | None:
        return self.token_bytes(token_id).decode("latin-1")

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        kept = [i for i in ids if not (skip_special_tokens and i < FIRST_BYTE)]
        return b"".join(self.token_bytes(i) for i in kept).decode("utf-8", "replace")

    def render_chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        self.rendered = (list(messages), options)
        parts = []
        for message in messages:
            content = message["content"]
            text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
            parts.append(f"[{message['role']}]{text}")
        return "".join(parts) + ("[assistant]" if options["add_generation_prompt"] else "")


Script = Callable[[Sequence[int], Any], list[SequenceDelta]]


def logprob_position(token: int, count: int | None) -> dict[int, Logprob] | None:
    """The drawn token at -0.5 with rank 2, and `count` others beginning with one above it."""
    if count is None:
        return None
    position = {token: Logprob(-0.5, 2, "drawn")}
    for rank in range(count):
        other = FIRST_BYTE + ord("A") + rank
        position[other] = Logprob(-0.25 if rank == 0 else -1.0 - rank, rank + 1, "other")
    return position


def alphabet(prompt: Sequence[int], params: Any) -> list[SequenceDelta]:
    """max_tokens letters per sequence: sequence i begins with letter i. Ends by length."""
    deltas = []
    scores = None
    if params.prompt_logprobs is not None:
        rest = tuple(logprob_position(token, params.prompt_logprobs) for token in prompt[1:])
        scores = (None, *rest)
    for step in range(max(params.max_tokens, 1)):
        for index in range(params.n):
            letter = ord("a") + (step + index) % 26
            last = step >= params.max_tokens - 1
            empty = params.max_tokens == 0
            position = logprob_position(FIRST_BYTE + letter, params.logprobs)
            deltas.append(
                SequenceDelta(
                    index,
                    text="" if empty else chr(letter),
                    token_ids=() if empty else (FIRST_BYTE + letter,),
                    logprobs=None if position is None or empty else (position,),
                    finish_reason="length" if last else None,
                    prompt_logprobs=scores if step == 0 and index == 0 else None,
                    cached_tokens=4 if step == 0 and index == 0 else None,
                    timing=RequestTiming(0.1, 0.2, 0.3, 1) if last else None,
                )
            )
    return deltas


class FakeClient(EngineClient):
    """Plays a script of deltas. `pace` waits before each; `fail` is raised once `fail_after` deltas are out."""

    def __init__(self, script: Script = alphabet) -> None:
        self.script = script
        self.calls: list[dict[str, Any]] = []
        self.closed_early: list[str] = []
        self.aborted: list[str] = []
        self.pace: Callable[[], Any] | None = None
        self.fail: Exception | None = None
        self.fail_after = 0
        self.health: Exception | None = None
        self.resets = 0
        self.is_gone = False
        self.live = 0
        self.max_model_len = MAX_MODEL_LEN
        self.closed = False

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            device="reference:0", device_name="reference", device_reason="test", tuning=[], dtype="float32",
            kv_dtype="float32", weight_bytes=1, kv_bytes=1, num_pages=20, page_tokens=16,
            max_model_len=self.max_model_len, max_concurrency=1.0, vocab_size=VOCAB, ops=[], fallbacks=[], phases=[],
        )  # fmt: skip

    @property
    def stats(self) -> EngineStats:
        return EngineStats(running=self.live, waiting=1, pages_total=20, pages_used=5, preemptions=7, prefix_hits=3)

    @property
    def gone(self) -> bool:
        return self.is_gone

    async def start(self) -> None:
        if self.health is not None and not isinstance(self.health, (EngineBusy, EngineDead)):
            raise self.health

    async def generate(self, prompt, params, *, request_id, priority=0, deadline=None, cache_salt=""):
        call = {"prompt": list(prompt), "params": params, "id": request_id, "priority": priority, "salt": cache_salt}
        call["deadline"] = deadline
        self.calls.append(call)
        self.live += 1
        complete = False
        try:
            for number, delta in enumerate(self.script(prompt, params)):
                if self.fail is not None and number >= self.fail_after:
                    complete = True
                    raise self.fail
                if self.pace is not None:
                    await self.pace()
                if request_id in self.aborted:
                    yield SequenceDelta(delta.index, finish_reason="abort")
                    complete = True
                    return
                yield delta
            complete = True
        finally:
            self.live -= 1
            if not complete:
                self.closed_early.append(request_id)

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def check_health(self) -> None:
        if self.health is not None:
            raise self.health

    async def reset_prefix_cache(self) -> None:
        self.resets += 1

    async def close(self) -> None:
        self.closed = True


class Harness:
    """An app over a fake client, called through ASGI on a loop of its own."""

    def __init__(self, **server: Any) -> None:
        self.client = FakeClient()
        self.tokenizer = ByteTokenizer()
        self.app = create_app(
            self.client,
            self.tokenizer,
            ServerConfig(**server),
            ModelConfig(model="tiny", served_names=("tiny", "small")),
        )

    @property
    def lifecycle(self) -> Any:
        return self.app.state.service.lifecycle

    def http(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def call() -> httpx.Response:
            async with self.http() as http:
                return await http.request(method, path, **options)

        return asyncio.run(call())

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        if isinstance(body, bytes):
            headers = {"Content-Type": "application/json", **options.pop("headers", {})}
            return self.request("POST", path, content=body, headers=headers, **options)
        return self.request("POST", path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)


@pytest.fixture
def harness() -> Harness:
    """A server with default settings."""
    return Harness()


@pytest.fixture
def make_harness() -> type[Harness]:
    """Harness(**ServerConfig fields)."""
    return Harness


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool]], Any]:
    """Let the loop turn until something holds; fails after 10 s."""

    async def wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, "it did not come about"
            await asyncio.sleep(0.005)

    return wait
