"""Real server processes over tiny models, shared where tests leave them as they were."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if (HERE := str(Path(__file__).parent)) not in sys.path:
    sys.path.insert(0, HERE)
if (CASES := str(Path(__file__).parent.parent / "reference" / "cases")) not in sys.path:
    sys.path.insert(0, CASES)

from server_process import ServerProcess
from tiny_models import llama_config, random_weights, save_llama

#: Trims content and walks through the arguments of tool calls, as real templates do.
TEMPLATE = """\
{%- for message in messages -%}
<s>{{ message['role'] }}
{{ message['content'] | trim }}
{%- for call in message.tool_calls or [] %}[{{ call.function.name }}
{%- for key, value in call.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}]{% endfor -%}
</s>
{%- endfor -%}
{%- if add_generation_prompt %}<s>assistant
{% endif -%}
"""
CONTEXT, PAGES = 4096, 264


def save_tiny(folder: Path, *, template: bool = False, pieces: int | None = None, **changes: Any) -> Path:
    """The random tiny model as a folder. pieces: words that the tokenizer has besides bytes; None fits the rows."""
    config = llama_config(**changes)
    words = None if pieces is None else [f" w{number}" for number in range(pieces)]
    save_llama(folder, config, random_weights(config), words)
    if template:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_folder(**settings of save_tiny) -> Path."""
    return lambda **settings: save_tiny(tmp_path_factory.mktemp("model") / "tiny", **settings)


@pytest.fixture(scope="session")
def tiny_folder(make_folder: Callable[..., Path]) -> Path:
    """300 rows, 300 tokens, a chat template."""
    return make_folder(template=True, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="session")
def make_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., ServerProcess]]:
    """make_server(model, *flags, api_key=None, wait=True) -> ServerProcess. All are ended after the last test."""
    servers: list[ServerProcess] = []

    def make(model: Path | str, *flags: str, api_key: str | None = None, wait: bool = True) -> ServerProcess:
        log = tmp_path_factory.mktemp("server") / "log"
        servers.append(ServerProcess(model, log, *flags, api_key=api_key))
        return servers[-1].wait_ready() if wait else servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture(scope="session")
def tiny_server(make_server: Callable[..., ServerProcess], tiny_folder: Path) -> ServerProcess:
    """The server that most tests share: one request of the whole context takes 97 % of the pages."""
    return make_server(tiny_folder, "--numerics", "exact", "--num-kv-pages", str(PAGES), "--served-model-name", "tiny")


@pytest.fixture
def server(tiny_server: ServerProcess) -> Iterator[ServerProcess]:
    """The shared server, idle before and healthy after each test."""
    tiny_server.wait_idle()
    yield tiny_server
    assert tiny_server.http.get("/health").status_code == 200
    tiny_server.wait_idle()
    assert len(tiny_server.complete([9, 8, 7], max_tokens=3, ignore_eos=True)["choices"][0]["token_ids"]) == 3


@pytest.fixture(scope="session")
def small_server(make_server: Callable[..., ServerProcess], make_folder: Callable[..., Path]) -> ServerProcess:
    """A base model (no template) with 512 rows of which 500 are tokens, 20 pages, 64 tokens per step, and a key."""
    folder = make_folder(pieces=242, vocab_size=512)
    flags = ("--num-kv-pages", "20", "--max-batch-tokens", "64", "--max-num-seqs", "16", "--served-model-name", "small")
    return make_server(folder, *flags, api_key="sesame")
