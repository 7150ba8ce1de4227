"""SentencePiece vocabularies out of GGUF, held against the sentencepiece library itself on a model trained here."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from gguf_vocabularies import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, write_vocabulary
from tokenizer_corpus import PIECES, corpus

from hardpoint.config.engine import ModelConfig
from hardpoint.errors import TokenizerError
from hardpoint.frontend.tokenizer import Tokenizer, load_tokenizer

sentencepiece = pytest.importorskip("sentencepiece")
SYMBOLS = ["<think>", "[INST]", "\n\n"]


@pytest.fixture(scope="module")
def trained() -> dict[bool, Any]:
    """A small BPE model, with and without the space before the first word."""
    models = {}
    for prefix in (True, False):
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(
                ["".join(group) for group in PIECES[:6]] + ["hello world, the world says hello"] * 20
            ),
            model_writer=model,
            model_type="bpe",
            vocab_size=600,
            byte_fallback=True,
            character_coverage=0.98,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=prefix,
            user_defined_symbols=SYMBOLS,
            hard_vocab_limit=False,
            minloglevel=2,
        )
        models[prefix] = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return models


def write(path: Path, model: Any, **keys: Any) -> Path:
    """The trained model as a GGUF file."""
    count = range(model.vocab_size())

    def kind(number: int) -> int:
        if model.is_unknown(number):
            return UNKNOWN
        if model.is_control(number):
            return CONTROL
        if model.is_byte(number):
            return BYTE
        return USER_DEFINED if model.id_to_piece(number) in SYMBOLS else NORMAL

    given = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "scores": [model.get_score(i) for i in count]}
    tokens = [model.id_to_piece(number) for number in count]
    return write_vocabulary(path, "llama", tokens, [kind(number) for number in count], **{**given, **keys})


def load(path: Path) -> Tokenizer:
    return load_tokenizer(ModelConfig(model=str(path)))


@pytest.mark.parametrize("prefix", [True, False])
def test_ids_and_text_equal_the_library(tmp_path: Path, trained: dict[bool, Any], prefix: bool) -> None:
    model = trained[prefix]
    ours = load(write(tmp_path / "a.gguf", model, add_space_prefix=prefix))
    checked = 0
    for text in corpus(500, []):
        # The library drops zero bytes, and puts its prefix before a leading symbol of the user's.
        if "\x00" in text or "\u2581" in text or text.startswith(tuple(SYMBOLS)):
            continue
        ids = model.encode(text)
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert ours.decode(ids) == model.decode(ids), text
        checked += 1
    assert checked > 400


def test_the_prefix_comes_once_and_only_before_the_first_word(tmp_path: Path, trained: dict[bool, Any]) -> None:
    tokenizer = load(write(tmp_path / "a.gguf", trained[True], add_space_prefix=True))

    def pieces(text: str) -> list[str | None]:
        return [tokenizer.id_to_token(number) for number in tokenizer.encode(text, add_special_tokens=False)]

    assert pieces("hello")[0].startswith("\u2581")
    assert not (pieces("<s>hello")[1] or "").startswith("\u2581")
    assert not (pieces("hello[INST]hello")[-1] or "").startswith("\u2581")
    assert pieces("hello</s>world") == [*pieces("hello"), "</s>", *pieces("<s>world")[1:]]
    assert pieces("") == []


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [({}, [1]), ({"add_bos_token": True}, [1]), ({"add_bos_token": False}, [])],
)
def test_bos_is_added_unless_the_file_says_no(
    tmp_path: Path, trained: dict[bool, Any], keys: dict[str, Any], wanted: list[int]
) -> None:
    tokenizer = load(write(tmp_path / "a.gguf", trained[False], add_space_prefix=False, **keys))
    assert tokenizer.encode("") == wanted
    assert tokenizer.encode("hello") == [*wanted, *trained[False].encode("hello")]


def test_bytes_of_tokens(tmp_path: Path, trained: dict[bool, Any]) -> None:
    tokenizer = load(write(tmp_path / "a.gguf", trained[False], add_space_prefix=False))
    for text in ("hello world", "\u4e01\U0001f9ff", "a<think>b\n\nc"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(tokenizer.token_bytes(number) for number in ids) == text.encode()
    assert tokenizer.special_ids == frozenset({0, 1, 2})


def test_scores_must_fit(tmp_path: Path, trained: dict[bool, Any]) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.scores.*2 entries"):
        load(write(tmp_path / "a.gguf", trained[False], scores=[0.0, 1.0]))
    with pytest.raises(TokenizerError, match=r"scores' is missing"):
        load(write(tmp_path / "b.gguf", trained[False], scores=None))
