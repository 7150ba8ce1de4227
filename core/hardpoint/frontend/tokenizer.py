"""The tokenizer of a model: text to tokens and back, chat messages to a prompt. No torch, no transformers.

Made from a folder (tokenizer.json and the small files beside it) or from a GGUF file's metadata; the work is done by
the `tokenizers` library. A folder with nothing but a SentencePiece model goes through transformers, which converts it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from hardpoint.config.engine import ModelConfig
from hardpoint.errors import ConfigError, RequestError, TokenizerError
from hardpoint.frontend.chat_template import ChatTemplate
from hardpoint.frontend.folder_tokenizer import tokenizer_in
from hardpoint.frontend.gguf_tokenizer import TokenizerParts, byte_letters, tokenizer_of
from hardpoint.weights.formats import is_gguf, read_json
from hardpoint.weights.store import resolve

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
#: Rows of a model that does not say how many it has.
_ANY_ROW = 2**31
#: Asks a template where an assistant's turn ends.
_PROBE = "\ue001probe\ue001"


class Tokenizer:
    """Text to tokens and back. Immutable; safe to use from several threads."""

    def __init__(
        self,
        parts: TokenizerParts,
        *,
        eos_token_ids: Sequence[int] = (),
        chat_template: str | None = None,
        model_vocab_size: int = 0,
    ) -> None:
        """`eos_token_ids` join those of `parts`; `chat_template` replaces its default one.

        Raises TokenizerError for a template that does not compile.
        """
        self._parts = parts
        self._backend: Backend = parts.backend
        templates = {**parts.templates}
        if chat_template is not None:
            templates = {"default": chat_template}
        self._templates = {name: ChatTemplate(source) for name, source in templates.items()}
        added = self._backend.get_added_tokens_decoder()
        base = self._backend.get_vocab_size(with_added_tokens=False)
        self.vocab_size: int = max(base, max(added, default=-1) + 1)
        self._limit = max(self.vocab_size, model_vocab_size)
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        self._added = {number: token.content for number, token in added.items()}
        self.bos_token_id = parts.bos_token_id
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys((*parts.eos_token_ids, *eos_token_ids)))

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` works without a template of the caller's."""
        return bool(self._templates)

    @property
    def chat_template(self) -> str | None:
        """The text of the model's template."""
        return self._template(None).source if self._templates else None

    @property
    def eos_token_id(self) -> int | None:
        """The main end-of-sequence token."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens that are spelled out in it become tokens.

        `add_special_tokens` adds BOS or EOS where the model wants them; leave it off for a rendered chat, whose
        template has written them. Raises RequestError for a text that is not valid Unicode.
        """
        return self.encode_batch((text,), add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of each, on several threads."""
        prepared = [self._prefixed(text) for text in texts]
        try:
            encoded = self._backend.encode_batch_fast(prepared, add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError):
            raise RequestError(
                "the text holds a lone surrogate, which is no valid Unicode character", field="prompt"
            ) from None
        before = [self.bos_token_id] if add_special_tokens and self._parts.add_bos else []
        behind = [self.eos_token_id] if add_special_tokens and self._parts.add_eos else []
        return [[*before, *item.ids, *behind] for item in encoded]  # type: ignore[list-item]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens. Ids that the model has and the tokenizer has not (padding) have no text.

        Raises RequestError (field `tokens`) for an id outside the vocabulary.
        """
        for number in ids:
            if not 0 <= number < self._limit:
                raise RequestError(
                    f"token id {number} is outside the vocabulary (0 to {self._limit - 1})", field="tokens"
                )
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, or None where there is none."""
        return self._backend.id_to_token(token_id) if token_id >= 0 else None

    def token_to_id(self, token: str) -> int | None:
        """The id of a token, as the vocabulary spells it."""
        return self._backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for within a text; tokens of part of a character have part of its bytes."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            letters = self._letter_bytes
            return bytes(letters[letter] for letter in token) if letters.keys() >= set(token) else token.encode()
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation; encode it with `add_special_tokens=False`.

        `chat_template` is the caller's own Jinja text; `variables` are passed to the template.
        Raises RequestError: no template, messages that the template refuses, a caller's template that does not compile.
        """
        if chat_template is None:
            template = self._template(tools)
        else:
            try:
                template = ChatTemplate(chat_template)
            except TokenizerError as error:
                raise RequestError(error.message, field="chat_template") from None
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            documents=documents,
            variables={**self._parts.special, **variables},
        )

    def end_of_turn_id(self) -> int | None:
        """The special token that the chat template writes behind an assistant's message, or None."""
        if not self._templates:
            return None
        turn = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _PROBE}]
        try:
            text = self.render_chat(turn, add_generation_prompt=False)
        except RequestError:
            return None
        ids = self.encode(text.rpartition(_PROBE)[2], add_special_tokens=False)
        return next((number for number in ids if number in self.special_ids), None)

    def with_eos(self, *token_ids: int) -> Tokenizer:
        """The same tokenizer with further end-of-sequence tokens."""
        other = object.__new__(Tokenizer)
        other.__dict__.update(self.__dict__)
        other.eos_token_ids = tuple(dict.fromkeys((*self.eos_token_ids, *token_ids)))
        return other

    def _template(self, tools: object) -> ChatTemplate:
        if not self._templates:
            raise RequestError(
                "this model has no chat template: it is a base model, made to continue text",
                field="messages",
                hint="use /v1/completions, or start the server with --chat-template FILE",
            )
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        return self._templates.get("default") or next(iter(self._templates.values()))

    def _prefixed(self, text: str) -> str:
        """SentencePiece's space before the first word, unless an added token comes first."""
        if not self._parts.space_prefix or not text or self._begins_with_added.match(text):
            return text
        return " " + text

    @cached_property
    def _begins_with_added(self) -> re.Pattern[str]:
        contents = sorted((re.escape(content) for content in self._added.values()), key=len, reverse=True)
        return re.compile("|".join(contents) or r"(?!)")

    @cached_property
    def _byte_level(self) -> bool:
        return "ByteLevel" in repr(self._backend.decoder)

    @cached_property
    def _letter_bytes(self) -> dict[str, int]:
        return {letter: byte for byte, letter in enumerate(byte_letters())}


def load_tokenizer(config: ModelConfig) -> Tokenizer:
    """The tokenizer of a configured model: `config.tokenizer` where given, else the model's own.

    Stops at every end token that the model's config, its generation config or its tokenizer names, and, for GGUF, at
    the template's end of turn, which converters often leave out.
    Raises ModelNotFound, TokenizerError, ConfigError (a --chat-template file that cannot be read).
    """
    path = resolve(config.model)
    template = _template_file(config.chat_template)
    ends: tuple[int, ...] = ()
    rows = 0
    gguf = is_gguf(path, config.load_format)
    if not gguf:
        ends, rows = _ends_and_rows(path, config)
    elsewhere = resolve(config.tokenizer) if config.tokenizer is not None else path
    if is_gguf(elsewhere):
        parts, own_rows = _parts_of_gguf(elsewhere)
    else:
        parts, own_rows = tokenizer_in(elsewhere), 0
    if gguf:
        rows = own_rows if elsewhere == path else _ANY_ROW
    tokenizer = Tokenizer(parts, eos_token_ids=ends, chat_template=template, model_vocab_size=rows)
    if gguf:
        turn = tokenizer.end_of_turn_id()
        return tokenizer if turn is None else tokenizer.with_eos(turn)
    return tokenizer


def _parts_of_gguf(path: Path) -> tuple[TokenizerParts, int]:
    """The parts, and the rows of the model's embedding (0 in a file without weights)."""
    from hardpoint.weights.gguf.split import open_gguf

    gguf = open_gguf(path)
    try:
        embedding = gguf.tensors.get("token_embd.weight")
        return tokenizer_of(gguf), 0 if embedding is None else embedding.shape[0]
    finally:
        gguf.close()


def _template_file(name: str | None) -> str | None:
    if name is None:
        return None
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # a name that no file can have is a ValueError
        raise ConfigError(f"--chat-template {name!a}: cannot be read: {error}") from None


def _ends_and_rows(folder: Path, config: ModelConfig) -> tuple[tuple[int, ...], int]:
    """End tokens of a folder's configs, and the rows of the model's embedding (0 in a folder without a model)."""
    if not folder.is_dir():
        return (), 0
    values = {**read_json(folder / "config.json"), **config.overrides}
    generation = read_json(folder / "generation_config.json")
    inner = values.get("text_config") if isinstance(values.get("text_config"), dict) else {}
    found: list[int] = []
    for source in (generation, values, inner or {}):
        ends = source.get("eos_token_id")
        found += [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)]
    rows = values.get("vocab_size") or (inner or {}).get("vocab_size")
    if not isinstance(rows, int):
        # a config may leave it to its family's default: then any id may be a row
        rows = _ANY_ROW if values else 0
    return tuple(dict.fromkeys(found)), rows
