"""An engine for one command of the terminal: the process is started first, and the tokenizer loads meanwhile."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hardpoint.cli.console import ProgressLine
from hardpoint.cli.model_name import shown_name
from hardpoint.errors import ConfigError

if TYPE_CHECKING:
    from hardpoint.config.engine import EngineConfig
    from hardpoint.frontend.remote_client import RemoteEngineClient
    from hardpoint.frontend.tokenizer import Tokenizer


class Caller(Protocol):
    """Runs a coroutine on the event loop that the client lives on."""

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run to the end and return the result."""


@dataclass(frozen=True)
class LocalEngine:
    """A running engine with its tokenizer."""

    client: RemoteEngineClient
    tokenizer: Tokenizer

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation that waits for the assistant's answer."""
        text = self.tokenizer.render_chat([dict(message) for message in messages], add_generation_prompt=True)
        return self.tokenizer.encode(text, add_special_tokens=False)


def start_local(loop: Caller, config: EngineConfig, *, to_chat: bool = False) -> LocalEngine:
    """Start it and wait until it serves, with a progress line on a terminal.

    Raises HardpointError; `to_chat`: ConfigError for a base model, before its weights are loaded.
    """
    from hardpoint.frontend.remote_client import RemoteEngineClient
    from hardpoint.frontend.tokenizer import load_tokenizer
    from hardpoint.weights.store import resolve

    # a wrong name should not cost the start of a process
    if config.model.load_format != "dummy":
        resolve(config.model.model)
    progress = ProgressLine()
    client = RemoteEngineClient(config, on_progress=progress.update)
    try:
        tokenizer = load_tokenizer(config.model)
        if to_chat and not tokenizer.has_chat_template:
            raise no_template(shown_name(config.model.model))
        client.use_tokenizer(tokenizer)
        loop.call(client.start())
    except BaseException:
        progress.clear()
        loop.call(client.close())
        raise
    progress.clear()
    return LocalEngine(client, tokenizer)


def no_template(name: str) -> ConfigError:
    """What to say of a base model."""
    return ConfigError(
        f"{name} is a base model: it has no chat template, so it continues text and cannot chat",
        hint=f'hardpoint run {name} "Once upon a time", or name a template with --chat-template FILE',
    )
