"""Size, encoding and media type of bodies; the structure check against a plain one."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.errors import RequestError
from hardpoint.server import json_body
from hardpoint.server.json_body import MAX_DEPTH, check_structure, parse

TEXT = "/v1/completions"


@pytest.mark.parametrize("declared", [True, False])
def test_bodies_over_the_limit(make_harness, declared) -> None:
    harness = make_harness(max_body_bytes=100_000)
    pieces = [b'{"prompt":"x","zz":"', *[b"y" * 50_000] * 200, b'"}']

    async def chunks():
        for piece in pieces:
            yield piece

    content = b"".join(pieces) if declared else chunks()
    response = harness.request("POST", TEXT, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    assert response.headers["connection"] == "close"
    exact = json.dumps({"prompt": "x"}).encode()
    assert harness.post(TEXT, exact + b" " * (100_000 - len(exact))).status_code == 200


def test_expecting_clients_are_answered_before_they_send(make_harness) -> None:
    harness = make_harness(max_body_bytes=10)
    asked = False

    async def receive():
        nonlocal asked
        asked = True
        return {"type": "http.request", "body": b"", "more_body": False}

    sent = []

    async def send(message):
        sent.append(message)

    headers = [(b"content-length", b"99999999999"), (b"expect", b"100-continue")]
    scope = {"type": "http", "method": "POST", "path": TEXT, "query_string": b"", "headers": headers, "root_path": ""}
    asyncio.run(harness.app(scope, receive, send))
    assert sent[0]["status"] == 413
    assert not asked


def test_compressed_bodies_and_other_media_types(harness) -> None:
    packed = gzip.compress(b'{"prompt":"x"}')
    response = harness.post(TEXT, packed, headers={"Content-Encoding": "gzip"})
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_content_encoding")
    for media in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        response = harness.request("POST", TEXT, content=b'{"prompt":"x"}', headers={"Content-Type": media})
        assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_media_type")
    for media in ("application/json; charset=utf-8", "application/vnd.x+json"):
        response = harness.request("POST", TEXT, content=b'{"prompt":"x"}', headers={"Content-Type": media})
        assert response.status_code == 200
    assert harness.request("POST", TEXT, content=b'{"prompt":"x"}').status_code == 200


def test_large_bodies_are_parsed_beside_the_loop(harness, monkeypatch) -> None:
    threads = []

    def spy(body, decoder):
        threads.append(threading.current_thread())
        return parse(body, decoder)

    monkeypatch.setattr(json_body, "parse", spy)
    for size in (10, 100_000):
        harness.post(TEXT, {"prompt": "x", "zz": "y" * size})
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


@pytest.mark.parametrize(
    "body",
    [
        b'{"zz":[' + b"1," * 1_100_000 + b"1]}",
        b'{"zz":[' + b"[]," * 600_000 + b"1]}",
        b'{"zz":[' + b'"",' * 1_100_000 + b"1]}",
    ],
)
def test_too_many_values(body) -> None:
    with pytest.raises(RequestError, match="values"):
        parse(body, msgspec.json.Decoder(dict))


def test_many_messages_and_stops_are_refused_or_served(harness) -> None:
    many = [{"role": "user", "content": "x"}] * 100_000
    assert harness.post("/v1/chat/completions", {"messages": many}).status_code == 400
    assert harness.post(TEXT, {"prompt": "x", "stop": ["s"] * 10_000}).json()["error"]["param"] == "stop"
    assert harness.post(TEXT, {"prompt": "x", "stop": "s" * 10**6}).json()["error"]["param"] == "stop"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='[]{}"\\,é🦜a\n'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='[{"\\'), inner, max_size=4),
    max_leaves=30,
)


def depth(value) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@settings(max_examples=300, deadline=None)
@given(value=json_values, extra=st.integers(0, 4), block=st.integers(1, 40), escape=st.booleans())
def test_depth_is_measured_exactly(value, extra, block, escape) -> None:
    wrapped = value
    for _ in range(MAX_DEPTH - depth(value) + extra):
        wrapped = [wrapped] if extra % 2 else {"k": wrapped}
    body = json.dumps(wrapped, ensure_ascii=escape).encode()
    before = json_body._BLOCK
    json_body._BLOCK = block  # cuts strings and escapes at every kind of place
    try:
        if depth(wrapped) > MAX_DEPTH:
            with pytest.raises(RequestError, match="nested"):
                check_structure(body)
        else:
            check_structure(body)
    finally:
        json_body._BLOCK = before


def test_unbalanced_brackets_go_to_the_parser_or_are_too_deep() -> None:
    for body in (b"[" * 101, b"[" * 10**6, b"]" * 10**6, b"[}" * 1000, b'{"a":[' * 200 + b"}"):
        with pytest.raises(RequestError):
            parse(body, msgspec.json.Decoder(dict))
