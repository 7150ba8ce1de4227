"""Tokenizers out of folders, against transformers' AutoTokenizer on the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf_vocabularies import CHATML, byte_level_vocabulary
from tokenizer_corpus import corpus
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from hardpoint.config.engine import ModelConfig
from hardpoint.errors import ModelError, ModelNotFound, RequestError, TokenizerError
from hardpoint.frontend.gguf_tokenizer import byte_letters
from hardpoint.frontend.tokenizer import Tokenizer as Ours
from hardpoint.frontend.tokenizer import load_tokenizer

CHAT = [{"role": "user", "content": "hi"}]


def backend() -> Tokenizer:
    vocabulary = {letter: number for number, letter in enumerate([*byte_letters(), "he", "llo", "ll"])}
    tokenizer = Tokenizer(BPE(vocabulary, [("h", "e"), ("l", "l"), ("ll", "o")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


def write(folder: Path, tokenizer: Tokenizer | None = None, model: dict[str, Any] | None = None, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (tokenizer or backend()).save(str(folder / "tokenizer.json"))
    full = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(full))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 300, **(model or {})}))
    return folder


def load(folder: Path, **config: Any) -> Ours:
    return load_tokenizer(ModelConfig(model=str(folder), **config))


def with_bos() -> Tokenizer:
    tokenizer = backend()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 259)])
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "flags"),
    [
        (backend, {}),
        (with_bos, {}),
        (with_bos, {"add_bos_token": False}),
        (backend, {"add_bos_token": True}),
        (backend, {"add_bos_token": True, "add_eos_token": True}),
        (with_bos, {"add_eos_token": True}),
    ],
)
def test_same_ids_and_text_as_transformers(tmp_path: Path, tokenizer: Any, flags: dict[str, bool]) -> None:
    from transformers import AutoTokenizer

    folder = write(tmp_path / "m", tokenizer(), **flags)
    ours, theirs = load(folder), AutoTokenizer.from_pretrained(folder)
    for text in corpus(150, ["<s>", "<|im_end|>", "<think>"]):
        for special in (True, False):
            ids = theirs(text, add_special_tokens=special)["input_ids"]
            assert ours.encode(text, add_special_tokens=special) == ids
            assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(
                ids, skip_special_tokens=special, clean_up_tokenization_spaces=False
            )
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)


def test_end_tokens_of_all_configs_are_joined(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", model={"eos_token_id": [260, 262]})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [261, 262]}))
    assert load(folder).eos_token_ids == (260, 261, 262)
    assert load(folder, overrides={"eos_token_id": 5}).eos_token_ids == (260, 261, 262, 5)


def test_padding_of_the_vocabulary_has_no_text(tmp_path: Path) -> None:
    tokenizer = load(write(tmp_path / "m"))
    assert tokenizer.vocab_size == 264
    assert tokenizer.decode([7, 290, 299]) == tokenizer.decode([7])
    assert tokenizer.id_to_token(290) is None
    with pytest.raises(RequestError, match="300"):
        tokenizer.decode([300])


def test_templates_of_every_place(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", chat_template=CHATML)
    assert load(folder).render_chat(CHAT, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    tokenizer = load(write(tmp_path / "m", chat_template=named))
    assert tokenizer.render_chat(CHAT) == "plain"
    assert tokenizer.render_chat(CHAT, tools=[{"type": "function"}]) == "with tools"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert load(folder).render_chat(CHAT) == "json"
    (folder / "chat_template.jinja").write_text("{{ bos_token }}jinja{{ eos_token }}")
    assert load(folder).render_chat(CHAT) == "<s>jinja</s>"
    assert load(folder).chat_template == "{{ bos_token }}jinja{{ eos_token }}"


def test_a_callers_template_that_does_not_compile(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as caught:
        load(write(tmp_path / "m")).render_chat(CHAT, chat_template="{% for")
    assert caught.value.field == "chat_template"


def test_special_tokens_as_objects_and_from_the_map(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", bos_token={"content": "<s>", "special": True}, eos_token=None)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    tokenizer = load(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (259, 262)


def test_added_tokens_of_the_config_alone(tmp_path: Path) -> None:
    listed = {"264": {"content": "<new>", "special": True}, "265": {"content": "<user>", "special": False}}
    tokenizer = load(write(tmp_path / "m", added_tokens_decoder=listed))
    assert tokenizer.encode("<new>x<user>") == [264, tokenizer.encode("x")[0], 265]
    assert 264 in tokenizer.special_ids
    assert 265 not in tokenizer.special_ids


def test_another_tokenizer(tmp_path: Path) -> None:
    """A folder for a GGUF model whose own tokenizer cannot be read, and the other way round."""
    strange = byte_level_vocabulary(tmp_path / "strange.gguf", pre="brand-new")
    folder = write(tmp_path / "m")
    with pytest.raises(TokenizerError):
        load(strange)
    assert load(strange, tokenizer=str(folder)).vocab_size == 264
    assert load(folder, tokenizer=str(byte_level_vocabulary(tmp_path / "good.gguf"))).vocab_size == 267


def test_sentencepiece_folder_goes_through_transformers(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    pytest.importorskip("google.protobuf", reason="transformers reads SentencePiece models with protobuf")
    folder = tmp_path / "m"
    folder.mkdir()
    with (folder / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["hello world"] * 50),
            model_writer=file,
            model_type="bpe",
            vocab_size=270,
            byte_fallback=True,
            hard_vocab_limit=False,
            minloglevel=2,
        )
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tokenizer = load(folder)
    library = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    ids = tokenizer.encode("hello world", add_special_tokens=False)
    assert ids == library.encode("hello world")
    assert tokenizer.decode(ids) == "hello world"


def test_folders_without_or_with_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        load(tmp_path / "nothing")
    with pytest.raises(TokenizerError, match="holds no tokenizer"):
        load(tmp_path)
    folder = write(tmp_path / "m")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: cannot be read"):
        load(folder)
    (folder / "tokenizer_config.json").write_text("[1")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        load(folder)
