"""Byte-level tokenizers out of GGUF metadata: the split, special tokens, BOS and EOS rules, end tokens, templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf_vocabularies import CHATML, CONTROL, NORMAL, byte_level_vocabulary, write_vocabulary

from hardpoint.config.engine import ModelConfig
from hardpoint.errors import ConfigError, RequestError, TokenizerError
from hardpoint.frontend.gguf_pre_tokenizers import SPLITS
from hardpoint.frontend.tokenizer import Tokenizer, load_tokenizer


def load(path: Path, **config: Any) -> Tokenizer:
    return load_tokenizer(ModelConfig(model=str(path), **config))


def pieces(name: str, text: str) -> list[str]:
    return [text[begin:end] for _, (begin, end) in SPLITS[name].build().pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("gpt-2", "I'll pay 1234 now", ["I", "'ll", " pay", " 1234", " now"]),
        ("smollm", "I'll pay 1234 now", ["I", "'ll", " pay", " ", "1", "2", "3", "4", " now"]),
        ("llama-bpe", "I'LL pay 12345 now!\n\n x", ["I", "'LL", " pay", " ", "123", "45", " now", "!\n\n", " x"]),
        ("qwen2", "a 12 b", ["a", " ", "1", "2", " b"]),
        ("gpt-4o", "HelloWorld's 1234/\n", ["Hello", "World's", " ", "123", "4", "/\n"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", " ", "1", "2"]),
        ("deepseek-llm", "Hi there 你好 123\n\n", ["Hi", " there", " ", "你好", " ", "123", "\n", "\n"]),
        ("deepseek-coder", "x, y += 12\n", ["x", ",", " y", " += ", "1", "2", "\n"]),
        ("deepseek-v3", "#include 12345你好", ["#include", " ", "123", "45", "你好"]),
        ("falcon", "a+b 12345", ["a", "+", "b", " ", "123", "45"]),
        ("default", "a+b 1234", ["a", "+", "b", " ", "123", "4"]),
        ("deepseek-llm", "Ωμέγα мир، hi", ["Ωμέγα", " мир", "،", " hi"]),
        ("bloom", "hey you, there", ["hey", " you", ",", " there"]),
        ("qwen35", "हिन्दी x", ["हिन्दी", " x"]),
    ],
)
def test_split(name: str, text: str, wanted: list[str]) -> None:
    assert pieces(name, text) == wanted


@pytest.mark.parametrize("name", sorted(SPLITS))
def test_every_split_keeps_the_whole_text(name: str) -> None:
    text = "I'll don't  \n\n\tx2 = foo_bar(12345, 'ä') # 你好, ½ мир — 🎉… 日本語  end \n"
    assert "".join(pieces(name, text)) == text


def test_the_split_decides_the_ids(tmp_path: Path) -> None:
    whole = load(byte_level_vocabulary(tmp_path / "a.gguf"))
    digits = load(byte_level_vocabulary(tmp_path / "b.gguf", pre="smollm"))
    assert len(whole.encode("12")) == 1
    assert len(digits.encode("12")) == 2


@pytest.mark.parametrize("name", ["brand-new-2030", None])
def test_an_unknown_or_missing_split_is_an_error(tmp_path: Path, name: str | None) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.pre") as caught:
        load(byte_level_vocabulary(tmp_path / "a.gguf", pre=name))
    assert "--tokenizer FOLDER" in str(caught.value)


def test_special_and_user_tokens_stay_whole(tmp_path: Path) -> None:
    tokenizer = load(byte_level_vocabulary(tmp_path / "a.gguf"))
    ids = tokenizer.encode("<|im_start|>hello<think> w<|im_end|>")
    assert [tokenizer.id_to_token(number) for number in ids] == ["<|im_start|>", "hello", "<think>", "Ġw", "<|im_end|>"]
    assert tokenizer.special_ids == frozenset(range(4))
    assert tokenizer.decode(ids) == "hello<think> w"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>hello<think> w<|im_end|>"
    assert [tokenizer.token_bytes(number) for number in ids[1:4]] == [b"hello", b"<think>", b" w"]
    assert tokenizer.token_bytes(tokenizer.encode("é")[0]) == b"\xc3"


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({}, ["hello"]),
        ({"add_bos_token": False}, ["hello"]),
        ({"add_bos_token": True}, ["<s>", "hello"]),
        ({"add_bos_token": True, "add_eos_token": True}, ["<s>", "hello", "</s>"]),
        ({"add_bos_token": True, "bos_token_id": None}, ["hello"]),
        ({"pre": "llama-bpe"}, ["<s>", "hello"]),
        ({"pre": "llama-bpe", "add_bos_token": False}, ["hello"]),
    ],
)
def test_bos_and_eos_follow_the_metadata(tmp_path: Path, keys: dict[str, Any], wanted: list[str]) -> None:
    tokenizer = load(byte_level_vocabulary(tmp_path / "a.gguf", **keys))
    assert [tokenizer.id_to_token(number) for number in tokenizer.encode("hello")] == wanted
    assert [tokenizer.id_to_token(number) for number in tokenizer.encode("hello", add_special_tokens=False)] == [
        "hello"
    ]
    assert tokenizer.encode_batch(["hello", "hello"]) == [tokenizer.encode("hello")] * 2


def test_stops_at_the_templates_end_of_turn(tmp_path: Path) -> None:
    """The file's eos is </s>, its template ends turns with <|im_end|>: both end a sequence."""
    tokenizer = load(byte_level_vocabulary(tmp_path / "a.gguf", chat_template=CHATML))
    assert tokenizer.eos_token_ids == (1, 3)
    assert tokenizer.eos_token_id == 1
    named = load(byte_level_vocabulary(tmp_path / "b.gguf", chat_template=CHATML, eot_token_id=3, eom_token_id=2))
    assert named.eos_token_ids == (1, 3, 2)
    assert load(byte_level_vocabulary(tmp_path / "c.gguf")).eos_token_ids == (1,)


def test_ignore_merges_takes_whole_tokens(tmp_path: Path) -> None:
    keys = {"merges": ["h e", "l l"]}
    assert len(load(byte_level_vocabulary(tmp_path / "a.gguf", **keys)).encode("hello")) == 3
    tokenizer = load(byte_level_vocabulary(tmp_path / "b.gguf", pre="llama-bpe", **keys))
    assert len(tokenizer.encode("hello", add_special_tokens=False)) == 1


def test_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = load(byte_level_vocabulary(tmp_path / "a.gguf"))
    for number in (tokenizer.vocab_size, -1, 10**9):
        with pytest.raises(RequestError, match=str(number)) as caught:
            tokenizer.decode([5, number])
        assert caught.value.field == "tokens"
        assert tokenizer.id_to_token(number) is None
        assert tokenizer.token_bytes(number) == b""


def test_a_lone_surrogate_is_the_requests_error(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        load(byte_level_vocabulary(tmp_path / "a.gguf")).encode("a\ud800b")


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"merges": None}, "merges' is missing"),
        ({"merges": ["h q"]}, "does not fit the tokens"),
        ({"merges": ["nospace"]}, "does not fit the tokens"),
        ({"eos_token_id": 99999}, "99999"),
    ],
)
def test_damaged_metadata_names_the_key(tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    path = byte_level_vocabulary(tmp_path / "a.gguf", **keys)
    with pytest.raises(TokenizerError, match=says) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_a_token_twice_and_too_few_types(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="'a' twice"):
        load(write_vocabulary(tmp_path / "a.gguf", "gpt2", ["a", "b", "a"], [NORMAL] * 3, pre="gpt-2", merges=["a b"]))
    with pytest.raises(TokenizerError, match="1 entries for 2 tokens"):
        load(write_vocabulary(tmp_path / "b.gguf", "gpt2", ["a", "b"], [CONTROL], pre="gpt-2", merges=["a b"]))


@pytest.mark.parametrize("model", ["bert", "rwkv", "t5"])
def test_other_kinds_are_refused(tmp_path: Path, model: str) -> None:
    with pytest.raises(TokenizerError, match=f"'{model}'"):
        load(write_vocabulary(tmp_path / "a.gguf", model, ["a"], [NORMAL]))


def test_chat_template_file(tmp_path: Path) -> None:
    path = byte_level_vocabulary(tmp_path / "a.gguf", chat_template=CHATML)
    (tmp_path / "own.jinja").write_text("{{ bos_token }}{{ messages[0]['content'] }}")
    tokenizer = load(path, chat_template=str(tmp_path / "own.jinja"))
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "<s>x"
    with pytest.raises(ConfigError, match="--chat-template"):
        load(path, chat_template=str(tmp_path / "none.jinja"))
    with pytest.raises(ConfigError, match="cannot be read"):
        load(path, chat_template="\ud800.jinja")
    (tmp_path / "bad.jinja").write_text("{% for %}")
    with pytest.raises(TokenizerError, match="does not compile"):
        load(path, chat_template=str(tmp_path / "bad.jinja"))
