"""A tokenizer out of GGUF metadata, exactly as the model's own: vocabulary, merges, split, special tokens, BOS rule.

Two kinds of `tokenizer.ggml.model`: "gpt2" (byte-level BPE) and "llama" (SentencePiece BPE with byte fallback, whose
merges are recovered from the scores). Others are refused: an inexact tokenizer is worse than none.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from hardpoint.errors import TokenizerError
from hardpoint.frontend.gguf_pre_tokenizers import Split, split_of
from hardpoint.weights.gguf.split import GGUF

#: `tokenizer.ggml.token_type`
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\u2581"


@dataclass(frozen=True)
class TokenizerParts:
    """A backend and the rules around it.

    Attributes:
        add_bos, add_eos: whether a text gets them.
        space_prefix: whether a text begins with a space of the tokenizer's own, as SentencePiece has it. Texts that
            begin with an added token, and texts behind one, do not.
        special: names of special tokens ("bos_token" ...) to their text, for templates.
        templates: chat templates by name; "default" is the model's.
    """

    backend: Tokenizer
    add_bos: bool
    add_eos: bool
    space_prefix: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    special: Mapping[str, str] = field(default_factory=dict)
    templates: Mapping[str, str] = field(default_factory=dict)


def tokenizer_of(gguf: GGUF) -> TokenizerParts:
    """Build it. Raises TokenizerError naming file and key for whatever cannot be built exactly."""
    reader = _Reader(gguf)
    model = gguf.metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        split = split_of(gguf.metadata.get("tokenizer.ggml.pre"), str(gguf.path))
        backend, space_prefix = _byte_level(reader, split), False
    elif model == "llama":
        split = Split(add_bos=True)
        space_prefix = reader.flag("add_space_prefix", True)
        backend = _sentencepiece(reader, space_prefix)
    else:
        raise TokenizerError(
            f"{gguf.path}: metadata 'tokenizer.ggml.model' is {model!r}; gpt2 and llama can be built exactly",
            hint="name a folder with the model's tokenizer.json: --tokenizer FOLDER",
        )
    _add_tokens(backend, reader)
    bos, ends = reader.token_id("bos"), _ends(reader)
    return TokenizerParts(
        backend,
        add_bos=reader.flag("add_bos_token", split.add_bos) and bos is not None,
        add_eos=reader.flag("add_eos_token", False) and bool(ends),
        space_prefix=space_prefix,
        bos_token_id=bos,
        eos_token_ids=ends,
        special=_special_texts(reader),
        templates=_templates(gguf.metadata),
    )


class _Reader:
    """Typed access to the tokenizer's metadata."""

    def __init__(self, gguf: GGUF) -> None:
        self.path, self._metadata = gguf.path, gguf.metadata
        tokens = self.array("tokens")
        if tokens is None:
            raise TokenizerError(
                f"{gguf.path}: has no tokenizer (metadata 'tokenizer.ggml.tokens' is missing)",
                hint="name a folder with the model's tokenizer.json: --tokenizer FOLDER",
            )
        self.tokens: list[str] = list(tokens)
        types = self.array("token_type")
        self.types: list[int] = [NORMAL] * len(self.tokens) if types is None else list(types)
        if len(self.types) != len(self.tokens):
            raise self.fail("token_type", f"has {len(self.types)} entries for {len(self.tokens)} tokens")

    def fail(self, key: str, what: str) -> TokenizerError:
        return TokenizerError(f"{self.path}: metadata 'tokenizer.ggml.{key}' {what}")

    def array(self, key: str) -> Sequence[Any] | None:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if value is not None and (isinstance(value, str) or not hasattr(value, "__len__")):
            raise self.fail(key, f"is {value!r}, not a list")
        return value

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._metadata.get(f"tokenizer.ggml.{key}", default))

    def token_id(self, name: str) -> int | None:
        key = f"{name}_token_id"
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise self.fail(key, f"is {value!r}, but there are {len(self.tokens)} tokens")
        return value

    def vocabulary(self, spelled: Sequence[str]) -> dict[str, int]:
        """Token to id. Raises TokenizerError for a token that appears twice."""
        vocabulary = {token: number for number, token in enumerate(spelled)}
        if len(vocabulary) != len(spelled):
            twice = next(token for number, token in enumerate(spelled) if vocabulary[token] != number)
            raise self.fail("tokens", f"holds {twice!r} twice")
        return vocabulary


def _byte_level(reader: _Reader, split: Split) -> Tokenizer:
    merges = reader.array("merges")
    if merges is None:
        raise reader.fail("merges", "is missing")
    letters = byte_letters()
    alphabet = set(letters)
    spelled = [
        token if kind != NORMAL or alphabet.issuperset(token) else "".join(letters[byte] for byte in token.encode())
        for token, kind in zip(reader.tokens, reader.types, strict=True)
    ]
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        model = BPE(reader.vocabulary(spelled), pairs, fuse_unk=False, ignore_merges=split.ignore_merges)
    except Exception as error:
        # The library raises bare exceptions for a merge whose parts or result are no tokens.
        raise reader.fail("merges", f"does not fit the tokens: {error}") from None
    backend = Tokenizer(model)
    backend.pre_tokenizer = split.build()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(reader: _Reader, space_prefix: bool) -> Tokenizer:
    scores = reader.array("scores")
    if not isinstance(scores, array) or len(scores) != len(reader.tokens):
        have = "is missing" if scores is None else f"has {len(scores)} entries for {len(reader.tokens)} tokens"
        if scores is not None and not isinstance(scores, array):
            have = "does not hold numbers"
        raise reader.fail("scores", have)
    # Some converters write the space mark of ordinary pieces as a space.
    spelled = [
        token.replace(" ", _SPACE) if kind == NORMAL and " " in token else token
        for token, kind in zip(reader.tokens, reader.types, strict=True)
    ]
    unknown = reader.token_id("unknown")
    model = BPE(
        reader.vocabulary(spelled),
        list(_recovered_merges(spelled, reader.types, scores)),
        unk_token=None if unknown is None else spelled[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", _SPACE)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if space_prefix else steps)
    return backend


def _recovered_merges(tokens: Sequence[str], types: Sequence[int], scores: array[float]) -> Iterator[tuple[str, str]]:
    """The merges of a SentencePiece BPE, best first: it joins whichever neighbours form the best-scored piece.

    Only ordinary pieces take part: special ones and those of the user are cut out of the text before.
    """
    pieces = {token for token, kind in zip(tokens, types, strict=True) if kind in (NORMAL, UNUSED)}
    # What is no number comes last.
    order = [math.inf if math.isnan(score) else -score for score in scores]
    for number in sorted(range(len(order)), key=order.__getitem__):
        piece = tokens[number]
        if len(piece) < 2 or piece not in pieces:
            continue
        for cut in range(len(piece) - 1, 0, -1):
            left = piece[:cut]
            if left in pieces:
                right = piece[cut:]
                if right in pieces:
                    yield left, right


def _add_tokens(backend: Tokenizer, reader: _Reader) -> None:
    """Tokens that are found whole in a text, whatever stands around them: special ones, and the user's own."""
    added = [
        AddedToken(token, normalized=False, special=kind != USER_DEFINED)
        for token, kind in zip(reader.tokens, reader.types, strict=True)
        if kind in (CONTROL, USER_DEFINED, UNKNOWN) and token
    ]
    for special in (True, False):
        chosen = [token for token in added if token.special is special]
        (backend.add_special_tokens if special else backend.add_tokens)(chosen)


def _ends(reader: _Reader) -> tuple[int, ...]:
    found = (reader.token_id(name) for name in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(token for token in found if token is not None))


def _special_texts(reader: _Reader) -> dict[str, str]:
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    ids = {name: reader.token_id(key) for key, name in names.items()}
    return {name: reader.tokens[number] for name, number in ids.items() if number is not None}


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    named = {key.removeprefix(f"{prefix}."): value for key, value in metadata.items() if key.startswith(f"{prefix}.")}
    if isinstance(metadata.get(prefix), str):
        named["default"] = metadata[prefix]
    return named


def byte_letters() -> list[str]:
    """GPT-2's letter for each byte: printable ones are themselves, the others follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, next_letter = [], 0x100
    for byte in range(256):
        if byte in printable:
            letters.append(chr(byte))
        else:
            letters.append(chr(next_letter))
            next_letter += 1
    return letters
