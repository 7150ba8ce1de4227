"""Chat templates: messages in, prompt out. The same Jinja dialect as transformers', in a sandbox.

Templates come with models and are not trusted: they run in Jinja's immutable sandbox and see plain JSON values only.
What goes wrong in one is the request's error (field `messages`), never the server's.

    messages -> checked and plain -> content in the form the template reads -> render -> cut for a continued message
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils

from hardpoint.errors import RequestError, TokenizerError

Message = dict[str, Any]

#: Marks the end of the message that the model is to continue. The space shows whether the template trims.
_MARK = "\ue000hardpoint-continue\ue000"
#: Names under which a message's reasoning is passed; templates read the first, some the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_ITERABLE_TESTS = frozenset({"string", "iterable", "sequence", "mapping"})


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str) -> None:
        """Raises TokenizerError for a template that does not compile."""
        self.source = source
        environment = _environment()
        try:
            self._tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TokenizerError(
                f"the chat template does not compile: {error}", hint="give another one with --chat-template FILE"
            ) from None

    @cached_property
    def reads_parts(self) -> bool:
        """Whether the template goes through `content` part by part, so that it takes lists."""
        names = self._content_names
        return any(_mentions_content(loop.iter, names) for loop in self._tree.find_all(jinja2.nodes.For))

    @cached_property
    def reads_strings(self) -> bool:
        """Whether the template takes content that is a string: it reads no parts, or asks which of both it got."""
        names = self._content_names
        tests = self._tree.find_all(jinja2.nodes.Test)
        asks = any(test.name in _ITERABLE_TESTS and _mentions_content(test.node, names) for test in tests)
        return asks or not self.reads_parts

    @cached_property
    def _content_names(self) -> frozenset[str]:
        """Variables that the template sets to a message's content."""
        names: set[str] = set()
        for assign in self._tree.find_all(jinja2.nodes.Assign):
            if isinstance(assign.target, jinja2.nodes.Name) and _mentions_content(assign.node, frozenset()):
                names.add(assign.target.name)
        return frozenset(names)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. `variables` are further names that the template sees (bos_token, enable_thinking ...).

        `continue_final_message` leaves the last message, which must be the assistant's, open at its end; white space
        there is kept or trimmed as the template does it. Raises RequestError.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other: one continues the last "
                "message, the other begins a new one",
                field="continue_final_message",
            )
        try:
            chat = [self._shaped(message) for message in checked_messages(messages)]
        except RecursionError:
            raise RequestError("the messages are nested too deeply", field="messages") from None
        final = _mark_final(chat) if continue_final_message else ""
        # A caller's own variables must not replace what the template is about.
        names = {**_plain(dict(variables or {})), "messages": chat, "add_generation_prompt": add_generation_prompt}
        names |= {"tools": _plain(tools), "documents": _plain(documents)}
        try:
            prompt = self._template.render(names)
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template refuses these messages: {error}", field="messages") from None
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise RequestError(
                f"the chat template fails on these messages: {type(error).__name__}: {error}", field="messages"
            ) from None
        return _cut_final(prompt, final) if continue_final_message else prompt

    def _shaped(self, message: Message) -> Message:
        """Content as the template reads it: parts joined by line breaks, or a string made into one part."""
        content = message.get("content", "")
        if isinstance(content, list) and not self.reads_parts:
            content = "\n".join(part["text"] for part in content)
        elif isinstance(content, str) and not self.reads_strings:
            content = [{"type": "text", "text": content}]
        return {**message, "content": content}


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages as templates expect them: plain values, no nulls, call arguments as objects.

    Raises RequestError naming message and field.
    """
    if not messages:
        raise RequestError("there are no messages", field="messages")
    chat = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"{where} must be an object with a 'role'", field=f"{where}.role")
        kept = {key: _plain(value) for key, value in message.items() if value is not None}
        _check_content(kept.get("content", ""), where)
        if "tool_calls" in kept:
            kept["tool_calls"] = _checked_calls(kept["tool_calls"], where)
            if not kept["tool_calls"]:
                del kept["tool_calls"]
        reasoning = next((kept[name] for name in _REASONING if name in kept), None)
        if reasoning is not None:
            kept = {"thinking": reasoning, **kept, "reasoning_content": reasoning}
        chat.append(kept)
    return chat


def _check_content(content: Any, where: str) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise RequestError(f"{where}.content must be a string or a list of parts", field=f"{where}.content")
    for number, part in enumerate(content):
        field = f"{where}.content[{number}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise RequestError(f"{field}: this model takes parts of type 'text' only, got {kind!r}", field=field)
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{field}.text must be a string", field=f"{field}.text")


def _checked_calls(calls: Any, where: str) -> list[Any]:
    if not isinstance(calls, list):
        raise RequestError(f"{where}.tool_calls must be a list", field=f"{where}.tool_calls")
    for number, call in enumerate(calls):
        field = f"{where}.tool_calls[{number}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"{field}.function must be an object with a 'name'", field=f"{field}.function")
        function["arguments"] = call_arguments(function.get("arguments"))
    return calls


def call_arguments(arguments: Any) -> dict[str, Any]:
    """The arguments of an earlier call as an object.

    Models write broken calls, and the conversation must go on afterwards: what is no JSON object counts as no
    arguments. The tool's answer, which is in the history too, tells the model that the call failed.
    """
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {}
    return arguments if isinstance(arguments, dict) else {}


def _mark_final(chat: list[Message]) -> str:
    """Put the mark behind the last message's text; returns the text."""
    last = chat[-1]
    where = f"messages[{len(chat) - 1}]"
    if last["role"] != "assistant":
        raise RequestError(
            f"continue_final_message: the last message must be the assistant's, it is the {last['role']}'s",
            field=f"{where}.role",
        )
    content = last["content"]
    if isinstance(content, str):
        last["content"] = f"{content}{_MARK} "
        return content
    if not content:
        raise RequestError("continue_final_message: the last message has no text", field=f"{where}.content")
    text = str(content[-1]["text"])
    content[-1]["text"] = f"{text}{_MARK} "
    return text


def _cut_final(prompt: str, final: str) -> str:
    """Cut the rendered prompt behind the continued message."""
    at = prompt.rfind(_MARK)
    if at < 0 or final.strip() not in prompt[:at]:
        raise RequestError(
            "continue_final_message: the chat template does not show the last message as it is: it cannot be continued",
            field="continue_final_message",
        )
    end = at + len(_MARK)
    trims = prompt[end : end + 1] != " "
    prompt = prompt[:at]
    if not trims or not final.strip():
        return prompt
    # The template trims content, but the mark shielded the space before it; only the message's own goes.
    space = len(final) - len(final.rstrip())
    return prompt[: len(prompt) - space] if space and prompt.endswith(final[-space:]) else prompt


def _mentions_content(node: jinja2.nodes.Node, names: frozenset[str]) -> bool:
    """Whether an expression is `x.content`, `x['content']`, a variable set to it, or a filter or slice of one."""
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, jinja2.nodes.Getitem):
        if isinstance(node.arg, jinja2.nodes.Const):
            return bool(node.arg.value == "content")
        return _mentions_content(node.node, names)
    if isinstance(node, jinja2.nodes.Filter) and node.node is not None:
        return _mentions_content(node.node, names)
    return isinstance(node, jinja2.nodes.Name) and node.name in names


def _plain(value: Any) -> Any:
    """JSON types only: other objects have methods that a sandbox does not know to be dangerous."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    return f"<{type(value).__name__}>"


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks tokens to train on; here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own attribute)

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_show"), [], [], body).set_lineno(line)

    def _show(self, caller: Any) -> str:
        return str(caller())


class _Namespace(jinja2.utils.Namespace):
    """`namespace()` without underscored names, which would reach into Python."""

    def __init__(self, *args: Any, **values: Any) -> None:
        attributes = dict(*args, **values)
        for name in attributes:
            _refuse_underscore(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


class _Dict:
    """`dict(...)` for templates, and nothing else of the class."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}: it begins with an underscore")


def _raise_exception(message: Any) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes for HTML
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment
