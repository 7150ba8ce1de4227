"""A tokenizer out of a model's folder: tokenizer.json, tokenizer_config.json, special tokens, chat templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from hardpoint.errors import TokenizerError
from hardpoint.frontend.gguf_tokenizer import TokenizerParts
from hardpoint.weights.formats import read_json

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SENTENCEPIECE = ("tokenizer.model", "sentencepiece.bpe.model", "spiece.model")


def tokenizer_in(folder: Path) -> TokenizerParts:
    """Build it. Raises TokenizerError for a folder without a tokenizer or with a damaged one."""
    if not folder.is_dir():
        raise TokenizerError(f"{folder}: is no folder with a tokenizer")
    config = read_json(folder / "tokenizer_config.json")
    special = {**_special(read_json(folder / "special_tokens_map.json")), **_special(config)}
    file = folder / "tokenizer.json"
    if file.exists():
        backend = _read(file)
        _add_missing(backend, config)
    elif any((folder / name).exists() for name in _SENTENCEPIECE):
        backend = _converted(folder)
    else:
        raise TokenizerError(
            f"{folder}: holds no tokenizer (no tokenizer.json, no tokenizer.model)",
            hint="name a folder that has one: --tokenizer FOLDER",
        )
    eos, bos = _id(backend, special.get("eos_token")), _id(backend, special.get("bos_token"))
    return TokenizerParts(
        backend,
        # tokenizer.json says what it adds; the config's add_bos_token counts for files without one, as in transformers
        add_bos=False,
        add_eos=False,
        space_prefix=False,
        bos_token_id=bos,
        eos_token_ids=() if eos is None else (eos,),
        special=special,
        templates=_templates(folder, config),
    )


def _read(file: Path) -> Tokenizer:
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:
        # The library raises a bare Exception.
        raise TokenizerError(f"{file}: cannot be read: {error}") from None
    backend.no_truncation()
    backend.no_padding()
    return backend


def _special(config: dict[str, Any]) -> dict[str, str]:
    """Names of special tokens to their text, which is a string or an object with `content`."""
    found = {name: _text(config.get(name)) for name in _NAMES}
    return {name: text for name, text in found.items() if text is not None}


def _text(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _id(backend: Tokenizer, token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)


def _add_missing(backend: Tokenizer, config: dict[str, Any]) -> None:
    """Added tokens that only tokenizer_config.json has, and those it calls special."""
    listed = config.get("added_tokens_decoder")
    known = backend.get_added_tokens_decoder()
    for number, entry in sorted((listed or {}).items(), key=lambda item: int(item[0])):
        text = _text(entry)
        if text is None or int(number) in known:
            continue
        flags = {key: bool(entry[key]) for key in ("lstrip", "rstrip", "normalized", "single_word") if key in entry}
        token = AddedToken(text, special=bool(entry.get("special")), **flags)
        if backend.token_to_id(text) in (None, int(number)):
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])


def _converted(folder: Path) -> Tokenizer:
    """Through transformers, which converts SentencePiece models."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        backend = tokenizer.backend_tokenizer
    except Exception as error:
        raise TokenizerError(
            f"{folder}: its SentencePiece model cannot be converted: {error}",
            hint="pip install sentencepiece protobuf, or add a tokenizer.json to the folder",
        ) from None
    if not isinstance(backend, Tokenizer):
        raise TokenizerError(f"{folder}: its tokenizer has no fast form", hint="add a tokenizer.json")
    return backend


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name. Files go before the config, as they are the newer habit."""
    found: dict[str, str] = {}
    listed = config.get("chat_template")
    if isinstance(listed, str):
        found["default"] = listed
    elif isinstance(listed, list):
        found |= {entry["name"]: entry["template"] for entry in listed if isinstance(entry, dict)}
    alone = read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(alone, str):
        found["default"] = alone
    if (folder / "chat_template.jinja").exists():
        found["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for file in sorted(folder.glob("additional_chat_templates/*.jinja")):
        found[file.stem] = file.read_text(encoding="utf-8")
    return found
