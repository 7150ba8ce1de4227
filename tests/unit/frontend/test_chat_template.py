"""Chat templates: equal to transformers' rendering; continued messages (S-36); histories with broken calls (S-18)."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hardpoint.errors import RequestError, TokenizerError
from hardpoint.frontend.chat_template import ChatTemplate

CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content']|trim %}{% set rest = messages[1:] %}
{%- else %}{% set system = '' %}{% set rest = messages %}{% endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{ "Tools:\\n" }}
{%- for t in tools %}{{ t | tojson(indent=4) }}{{ "\\n" }}{% endfor %}{% endif %}
{{- system + "<|eot_id|>" }}
{%- for message in rest %}
    {%- if 'tool_calls' in message %}
        {%- for call in message.tool_calls %}
            {%- set f = call.function %}
            {{- f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}{% endfor %})
        {%- endfor %}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
MISTRAL = """{%- set ns = namespace(index=0, seen=false) %}{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.index = ns.index + 1 %}{{ '[INST] ' + message.content + ' [/INST]' }}
    {%- elif message.role == 'assistant' %}{% generation %}{{ ' ' + message.content + eos_token }}{% endgeneration %}
    {%- elif message.role == 'tool' %}{% continue %}
    {%- else %}{{ raise_exception('Only user, assistant and tool, not ' + message.role) }}{% endif %}
{%- endfor %}"""
PARTS = """{% for m in messages %}{{ m.role }}:
{%- if m.content is string %}{{ m.content }}{% else %}
{%- for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %};{% endfor %}"""
PARTS_ONLY = "{% for m in messages %}{% for p in m['content'] %}[{{ p['text'] }}]{% endfor %}{% endfor %}"
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "mistral": MISTRAL, "parts": PARTS}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [
        {"role": "user", "content": " hi \n"},
        {"role": "assistant", "content": "<b>&"},
        {"role": "user", "content": "你好 🎉"},
    ],
    [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
    [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    [{"role": "robot", "content": "a"}],
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "ä <x>", "parameters": {"type": "object"}}}]


def theirs(template: str, chat: list[dict[str, Any]], **options: Any) -> str:
    """transformers' rendering, or the text of its error."""
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([chat], chat_template=template, **options)
    return str(rendered[0])


def ours(template: str, chat: list[dict[str, Any]], **options: Any) -> str:
    names = {key: options.pop(key) for key in list(options) if key in SPECIAL or key == "extra"}
    return ChatTemplate(template).render(chat, variables=names, **options)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_renders_as_transformers_does(name: str, generate: bool, tools: Any) -> None:
    rendered = 0
    for chat in CHATS:
        options = {"add_generation_prompt": generate, "tools": tools, **SPECIAL}
        try:
            wanted = theirs(TEMPLATES[name], chat, **options)
        except Exception as error:
            # The template's own refusal: ours must carry its words to the caller.
            with pytest.raises(RequestError, match=re.escape(str(error))) as caught:
                ours(TEMPLATES[name], chat, **options)
            assert caught.value.field == "messages"
            assert caught.value.status == 400
        else:
            assert ours(TEMPLATES[name], chat, **options) == wanted
            rendered += 1
    assert rendered >= 2


FINALS = ["Sure", "Sure: ", "Sure:\n", " Sure ", "two\nlines\n\n"]


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma", "mistral", "parts"])
@pytest.mark.parametrize("final", FINALS)
def test_continued_message_is_left_open_as_in_transformers(name: str, final: str) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": final}]
    prompt = ours(TEMPLATES[name], chat, continue_final_message=True, add_generation_prompt=False, **SPECIAL)
    assert prompt == theirs(TEMPLATES[name], chat, continue_final_message=True, **SPECIAL)
    assert prompt.rstrip().endswith(final.strip())


@pytest.mark.parametrize("final", ["", "\n", "  "])
@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma"])
def test_continuing_white_space_leaves_the_header_whole(name: str, final: str) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": final}]
    prompt = ours(TEMPLATES[name], chat, continue_final_message=True, add_generation_prompt=False, **SPECIAL)
    header = ours(TEMPLATES[name], chat[:1], add_generation_prompt=True, **SPECIAL)
    assert prompt == (header + final if name == "chatml" else header)


def test_continued_content_parts() -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [{"type": "text", "text": "Sure: "}]}]
    for name in ("chatml", "parts"):
        prompt = ours(TEMPLATES[name], chat, continue_final_message=True, add_generation_prompt=False)
        assert prompt.endswith("Sure: ")


def test_what_cannot_be_continued() -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Sure"}]
    with pytest.raises(RequestError, match="exclude each other"):
        ours(CHATML, chat, continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(RequestError, match="must be the assistant's") as caught:
        ours(CHATML, chat[:1], continue_final_message=True, add_generation_prompt=False)
    assert caught.value.field == "messages[0].role"
    hiding = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    thinking = [*chat[:1], {"role": "assistant", "content": "<think>a</think>b"}]
    with pytest.raises(RequestError, match="cannot be continued"):
        ours(hiding, thinking, continue_final_message=True, add_generation_prompt=False)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"k": 1}', "k=1"),
        ({"k": 1}, "k=1"),
        ("{}", ""),
        ('{"k": "unfin', ""),
        ("null", ""),
        ("", ""),
        ('"x"', ""),
        ("[1]", ""),
        ("3", ""),
        ("[" * 100_000, ""),
        (None, ""),
    ],
)
def test_call_arguments_in_the_history_never_break_it(arguments: Any, shown: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    chat = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "done"}]},
        {"role": "user", "content": "and?"},
    ]
    assert f"f({shown})" in ours(LLAMA3, chat, tools=TOOLS, **SPECIAL)
    assert "done" in ours(CHATML, chat, **SPECIAL)


def test_missing_and_null_content() -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant"}, {"role": "assistant", "content": None}]
    assert ours(CHATML, chat, add_generation_prompt=False).count("<|im_start|>assistant\n<|im_end|>") == 2


def test_content_takes_the_form_that_the_template_reads() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    text = [{"role": "user", "content": "ab"}]
    assert ours(CHATML, parts, add_generation_prompt=False) == "<|im_start|>user\na\nb<|im_end|>\n"
    assert ours(PARTS, parts, add_generation_prompt=False) == "user:[a][b];"
    assert ours(PARTS, text, add_generation_prompt=False) == "user:ab;"
    assert ours(PARTS_ONLY, parts, add_generation_prompt=False) == "[a][b]"
    assert ours(PARTS_ONLY, text, add_generation_prompt=False) == "[ab]"
    by_variable = "{% for m in messages %}{% set c = m.content %}{% for p in c %}<{{ p.text }}>{% endfor %}{% endfor %}"
    assert ours(by_variable, text, add_generation_prompt=False) == "<ab>"


@pytest.mark.parametrize(
    ("chat", "field"),
    [
        ([], "messages"),
        (["hi"], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0].function"),
    ],
)
def test_bad_messages_name_their_field(chat: list[Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        ours(CHATML, chat)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__ }}",
        "{% set ns = namespace(_x=1) %}{{ ns._x }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ 1 / 0 }}",
        "{{ messages | no_such_variable }}",
        "{{ missing.attribute }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ 'x' * 3 + messages }}",
    ],
)
def test_bad_templates_are_the_requests_error_or_harmless(template: str) -> None:
    try:
        compiled = ChatTemplate(template)
    except TokenizerError:
        return
    try:
        text = compiled.render([{"role": "user", "content": "x"}])
    except RequestError as error:
        assert error.field == "messages"  # noqa: PT017
    else:
        assert text == ""


def test_deep_nesting_is_the_requests_error() -> None:
    deep: Any = "x"
    for _ in range(50_000):
        deep = [deep]
    with pytest.raises(RequestError, match="too deeply"):
        ours(CHATML, [{"role": "user", "content": "x", "extra": deep}])


def test_callers_variables_and_dates() -> None:
    template = "{{ extra }} {{ strftime_now('%Y') }} {{ dict(a=1) | tojson }} {{ messages | length }}"
    text = ChatTemplate(template).render(
        [{"role": "user", "content": "x"}], variables={"extra": "E", "messages": "replaced"}
    )
    assert re.fullmatch(r"E 20\d\d \{\"a\": 1\} 1", text)


def test_a_template_that_does_not_compile() -> None:
    with pytest.raises(TokenizerError, match="does not compile"):
        ChatTemplate("{% for x %}")
