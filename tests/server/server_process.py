"""`hardpoint serve` as a process of its own, and what tests ask of it."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
from prometheus_client.parser import text_string_to_metric_families

#: Seconds. The machine may be busy with other things.
START_TIMEOUT = 180.0
PATIENCE = 60.0

_SERVING = re.compile(r"^\s*serving\s+(http://\S+)/v1\s*$", re.MULTILINE)


class ServerProcess:
    """One server on a port that was free. `log` takes stdout and stderr."""

    def __init__(self, model: Path | str, log: Path, *flags: str, api_key: str | None = None) -> None:
        keys = () if api_key is None else ("--api-key", api_key)
        argv = [sys.executable, "-m", "hardpoint", "serve", str(model), "--port", "0", *flags, *keys]
        self.log = log
        self.api_key = api_key
        self.url = ""
        with log.open("wb") as out:
            # a group of its own, so that a Ctrl-C in pytest goes through our own clean-up
            self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, process_group=0)
        self._family: list[psutil.Process] = []

    def wait_ready(self) -> ServerProcess:
        """Wait for the line that names the URL."""
        deadline = time.monotonic() + START_TIMEOUT
        while (found := _SERVING.search(self.output())) is None:
            assert self.process.poll() is None, f"exit code {self.process.returncode}\n{self.output()}"
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.05)
        self.url = found.group(1)
        self._family = [self.engine]
        return self

    def output(self) -> str:
        """Everything printed so far."""
        return self.log.read_text(errors="replace")

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.url.rsplit(":", 1)[1])

    @property
    def model(self) -> str:
        """The served model's name."""
        return str(self.http.get("/v1/models").json()["data"][0]["id"])

    @property
    def main(self) -> psutil.Process:
        """The front end."""
        return psutil.Process(self.process.pid)

    @property
    def engine(self) -> psutil.Process:
        """The engine process."""
        (child,) = self.main.children()
        return child

    @property
    def headers(self) -> dict[str, str]:
        """What opens the routes."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    @cached_property
    def http(self) -> httpx.Client:
        """A plain client, with the key."""
        return httpx.Client(base_url=self.url, headers=self.headers, timeout=PATIENCE, trust_env=False)

    @cached_property
    def client(self) -> openai.OpenAI:
        """The official client. It does not try again."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.api_key or "none", max_retries=0, timeout=PATIENCE)

    def async_http(self) -> httpx.AsyncClient:
        """For many requests at a time."""
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(
            base_url=self.url, headers=self.headers, timeout=PATIENCE, limits=limits, trust_env=False
        )

    def async_client(self) -> openai.AsyncOpenAI:
        """The official client, for many requests at a time."""
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=self.api_key or "none", max_retries=0, timeout=PATIENCE
        )

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """A greedy completion with token ids; the answer's JSON."""
        body = {"prompt": prompt, "temperature": 0, "return_token_ids": True, **fields}
        response = self.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def metrics(self) -> dict[str, float]:
        """Samples by name, label sets of one name added up."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    def load(self) -> tuple[float, float, float]:
        """Running and waiting sequences, pages in use."""
        now = self.metrics()
        return (
            now["vllm:num_requests_running"],
            now["vllm:num_requests_waiting"],
            now["hardpoint:kv_pages_used"],
        )

    def wait_idle(self, timeout: float = PATIENCE) -> None:
        """Wait until nothing runs, waits or holds a page."""
        wait_until(lambda: self.load() == (0, 0, 0), lambda: f"still busy: {self.load()}", timeout)

    def send(self, number: signal.Signals) -> None:
        """A signal to the front end."""
        self.process.send_signal(number)

    def end(self, timeout: float = PATIENCE) -> int:
        """Wait for the exit code. Nothing of the server may be left behind."""
        code = self.process.wait(timeout)
        _, alive = psutil.wait_procs(self._family, timeout=10)
        assert not alive, f"left behind: {alive}"
        return code

    def close(self) -> None:
        """End it, however it is."""
        for name in ("http", "client"):
            if name in self.__dict__:
                self.__dict__[name].close()
        family = list(self._family)
        if self.process.poll() is None:
            family += [self.main, *self.main.children(recursive=True)]
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(PATIENCE)


def wait_until(done: Callable[[], bool], explain: Callable[[], str] = lambda: "", timeout: float = PATIENCE) -> float:
    """Poll until `done`; returns the seconds that it took."""
    started = time.monotonic()
    while not done():
        assert time.monotonic() - started < timeout, explain() or "it never came"
        time.sleep(0.02)
    return time.monotonic() - started


@contextmanager
def open_stream(server: ServerProcess, path: str = "/v1/completions", **fields: Any) -> Iterator[Iterator[str]]:
    """A streamed request whose first event has come; yields the lines after it. Leaving closes the connection."""
    body = {"prompt": [5, 6, 7], "temperature": 0, "ignore_eos": True, "stream": True, **fields}
    with (
        httpx.Client(base_url=server.url, headers=server.headers, timeout=PATIENCE, trust_env=False) as http,
        http.stream("POST", path, json=body) as response,
    ):
        assert response.status_code == 200, response.read()
        lines = (line for line in response.iter_lines() if line)
        assert next(lines).startswith("data: {")
        yield lines


def send_raw(server: ServerProcess, path: str, body: dict[str, object]) -> socket.socket:
    """A request on a connection of its own, whose answer nobody reads."""
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@contextmanager
def neighbour(server: ServerProcess, tokens: int = 400) -> Iterator[None]:
    """A long greedy request that runs all the while; its ids must be those that it gets alone."""
    prompt = [40 + i for i in range(50)]
    fields = {"max_tokens": tokens, "ignore_eos": True, "return_token_ids": True}
    expected = server.complete(prompt, **fields)["choices"][0]["token_ids"]
    found: list[int] = []
    with open_stream(server, prompt=prompt, **fields) as lines:

        def read() -> None:
            for line in lines:
                if line.startswith("data: {"):
                    found.extend(json.loads(line[6:])["choices"][0]["token_ids"])

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield
        finally:
            reader.join(60)
    # the first event was read by open_stream: the ids that came with it (none or some) are missing here
    assert found == expected[len(expected) - len(found) :]
    assert len(found) > tokens - 20


def events(text: str) -> list[dict[str, Any]]:
    """The chunks of a whole event stream, which must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line]
    assert lines[-1] == "[DONE]", lines[-3:]
    chunks = [json.loads(line) for line in lines[:-1]]
    assert all("error" not in chunk for chunk in chunks), chunks[-1]
    return chunks


def assert_close(found: Any, expected: Any) -> None:
    """Equal JSON, numbers within 1e-4: the same computation in batches of other sizes rounds differently."""
    if isinstance(expected, float):
        assert abs(found - expected) < 1e-4, (found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_close(found[key], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    else:
        assert found == expected
