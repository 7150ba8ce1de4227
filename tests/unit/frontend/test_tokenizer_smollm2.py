"""The tokenizer read out of SmolLM2's GGUF file (case S-25).

The model's own tokenizer.json cannot be had offline. The oracle is built here instead, by hand, the way that file
defines it: single digits, GPT-2's split, byte-level BPE, 17 special tokens; from the vocabulary and merges that
transformers' reader takes out of the file. So it shares nothing with our code but the file and the tokenizers library.
A few ids that were published with the model are checked as they stand.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizer_corpus import corpus
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from hardpoint.config.engine import ModelConfig
from hardpoint.frontend.tokenizer import Tokenizer as Ours
from hardpoint.frontend.tokenizer import load_tokenizer

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def ours(smollm2_path: Path) -> Ours:
    return load_tokenizer(ModelConfig(model=str(smollm2_path)))


@pytest.fixture(scope="module")
def oracle(smollm2_path: Path) -> Tokenizer:
    from transformers.integrations.gguf.reader import read_gguf_metadata

    wanted = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")
    metadata, _ = read_gguf_metadata(str(smollm2_path), wanted)
    tokens, merges = (metadata[key] for key in wanted)
    assert len(tokens) == 49152
    merges = [tuple(merge.split(" ")) for merge in merges]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens[:17]])
    return tokenizer


def test_2000_strings_give_the_same_ids_and_text(ours: Ours, oracle: Tokenizer) -> None:
    special = sorted(ours.id_to_token(number) or "" for number in ours.special_ids)
    assert len(special) == 17
    strings = corpus(2000, special)
    assert len(set(strings)) == 2000
    for text in strings:
        wanted = oracle.encode(text).ids
        assert ours.encode(text) == wanted, text
        for skip in (True, False):
            assert ours.decode(wanted, skip_special_tokens=skip) == oracle.decode(wanted, skip_special_tokens=skip)


def test_text_comes_back(ours: Ours) -> None:
    for text in corpus(500, [], seed=1):
        ids = ours.encode(text)
        assert ours.decode(ids) == text
        assert b"".join(ours.token_bytes(number) for number in ids) == text.encode()


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world! 123", [19556, 905, 17, 216, 33, 34, 35]),
        ("The capital of France is", [504, 3575, 282, 4649, 314]),
        ("Café déjà vu.", [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]),
        ("  multiple   spaces", [216, 2701, 256, 5600]),
        ("\n", [198]),
    ],
)
def test_known_ids(ours: Ours, text: str, ids: list[int]) -> None:
    assert ours.encode(text) == ids


def test_markers_are_single_tokens_and_no_bos_is_added(ours: Ours) -> None:
    ids = ours.encode("<|im_start|>user\nhi<|im_end|>")
    assert (ids[0], ids[-1], len(ids)) == (1, 2, 5)
    assert ours.encode("hi") == ours.encode("hi", add_special_tokens=False)
    assert len(ours.encode("hi")) == 1


def test_facts(ours: Ours) -> None:
    assert ours.vocab_size == 49152
    assert ours.bos_token_id == 1
    assert ours.eos_token_ids == (2,)
    assert ours.special_ids == frozenset(range(17))
    assert ours.has_chat_template
    assert ours.end_of_turn_id() == 2


def test_chat_uses_the_files_own_template(ours: Ours) -> None:
    prompt = ours.render_chat([{"role": "user", "content": "hi"}])
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = ours.encode(prompt, add_special_tokens=False)
    assert ids.count(1) == 3
    assert ids[0] == 1
    assert ids[1] != 1
