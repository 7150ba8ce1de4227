"""Cases of public bug reports about messages, over HTTP: S-18 (tool history) and S-36 (a message to continue)."""

from __future__ import annotations

from typing import Any

import pytest
from server_process import ServerProcess, events

pytestmark = pytest.mark.server

USER = {"role": "user", "content": "go"}


def rendered(server: ServerProcess, messages: list[Any], **fields: Any) -> str:
    """The prompt as text, through /tokenize and /detokenize."""
    answer = server.http.post("/tokenize", json={"messages": messages, **fields})
    assert answer.status_code == 200, answer.text
    text = server.http.post("/detokenize", json={"tokens": answer.json()["tokens"]}).json()["prompt"]
    return str(text)


def call(arguments: Any, **fields: Any) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": function}], **fields}


def answers(server: ServerProcess, messages: list[Any]) -> Any:
    return server.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 3, "temperature": 0})


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"k": "unfin', "[look]"),
        ("null", "[look]"),
        ("", "[look]"),
        ('"x"', "[look]"),
        ("[1]", "[look]"),
        ("17", "[look]"),
        ("NaN", "[look]"),
        ("[" * 5000, "[look]"),
        ("{}", "[look]"),
        ('{"k": "v", "n": 2}', "[look k=v n=2]"),
        ({"k": "v"}, "[look k=v]"),
        (None, "[look]"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_arguments_in_the_history(server: ServerProcess, arguments: Any, shown: str) -> None:
    """S-18: broken arguments do not end the conversation."""
    tool = {"role": "tool", "tool_call_id": "c1", "content": "seen"}
    for content in ({}, {"content": None}, {"content": "hm"}):
        messages = [USER, call(arguments, **content), tool, USER]
        assert shown in rendered(server, messages)
        assert answers(server, messages).status_code == 200
    assert answers(server, [USER, {"role": "assistant", "content": "hm"}, USER]).status_code == 200


@pytest.mark.parametrize("arguments", [5, [1], True])
def test_arguments_of_a_wrong_type(server: ServerProcess, arguments: Any) -> None:
    refused = answers(server, [USER, call(arguments), USER])
    assert refused.status_code == 400
    assert refused.json()["error"]["param"].startswith("messages[1].tool_calls[0].function.arguments")


def test_tool_messages_in_odd_places(server: ServerProcess) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    tool = {"role": "tool", "tool_call_id": "c1", "content": "seen"}
    for messages in (
        [USER, call("{}"), {**tool, "content": parts}, USER],
        [tool, USER],
        [USER, call("{}"), tool, tool, USER],
        [USER, {"role": "assistant", "content": None}, USER],
        [USER, {"role": "assistant"}, USER],
        [USER, {"role": "assistant", "content": "", "tool_calls": []}, USER],
    ):
        assert answers(server, messages).status_code == 200, messages
    for messages, field in (
        ([USER, {"role": "tool", "content": None}], "messages[1].content"),
        ([USER, {"role": "robot", "content": "x"}], "messages[1].role"),
        ([USER, {"content": "x"}], "messages[1].role"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
        ),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([], "messages"),
        ("hi", "messages"),
    ):
        refused = answers(server, messages)
        assert refused.status_code == 400, messages
        assert refused.json()["error"]["param"] == field


@pytest.mark.parametrize("final", ["Sure: ", "Sure:\n", "\n", "", "Sure", " <s>x"])
def test_a_message_to_continue(server: ServerProcess, final: str) -> None:
    """S-36: nothing closes the message, whatever the template does with white space."""
    messages = [USER, {"role": "assistant", "content": final}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    text = rendered(server, messages, **fields)
    assert text.endswith((f"<s>assistant\n{final.strip()}", f"<s>assistant\n{final}"))
    body = {"messages": messages, "max_tokens": 4, "temperature": 0, **fields}
    plain = server.http.post("/v1/chat/completions", json=body).json()
    for _ in range(2):  # the second time from the prefix cache
        echoed = server.http.post("/v1/chat/completions", json={**body, "echo": True}).json()
        stream = events(server.http.post("/v1/chat/completions", json={**body, "echo": True, "stream": True}).text)
        content = echoed["choices"][0]["message"]["content"]
        assert content == final + plain["choices"][0]["message"]["content"]
        assert "".join(c["delta"].get("content") or "" for chunk in stream for c in chunk["choices"]) == content
        assert echoed["usage"]["completion_tokens"] == 4


def test_what_cannot_be_continued(server: ServerProcess) -> None:
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assistant = {"role": "assistant", "content": "Sure"}
    for messages, fields in (([USER, assistant], both), ([USER], {"continue_final_message": True})):
        for path in ("/v1/chat/completions", "/tokenize"):
            refused = server.http.post(path, json={"messages": messages, **fields})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] in ("continue_final_message", "messages", "messages[0].role")
    parts = {"role": "assistant", "content": [{"type": "text", "text": "Sure"}, {"type": "text", "text": "ly"}]}
    assert rendered(server, [USER, parts], continue_final_message=True).endswith("Sure\nly")
