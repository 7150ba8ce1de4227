"""GGUF files that hold nothing but a tokenizer, written with the `gguf` package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gguf import GGUFWriter

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_vocabulary(path: Path, model: str, tokens: Sequence[str], types: Sequence[int], **keys: Any) -> Path:
    """`keys` are written under tokenizer.ggml, but for chat_template; None leaves one out."""
    writer = GGUFWriter(path, "llama")
    writer.add_string("tokenizer.ggml.model", model)
    writer.add_array("tokenizer.ggml.tokens", list(tokens))
    writer.add_array("tokenizer.ggml.token_type", list(types))
    for key, value in keys.items():
        name = "tokenizer.chat_template" if key == "chat_template" else f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif value is not None:
            writer.add_array(name, list(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_vocabulary(path: Path, **keys: Any) -> Path:
    """256 bytes, a few merges, BOS 0, EOS 1, a chat's markers 2 and 3, a user's own token 4."""
    from hardpoint.frontend.gguf_tokenizer import byte_letters

    marks = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>"]
    merged = ["he", "ll", "hell", "hello", "Ġw", "12"]
    types = [CONTROL] * 4 + [USER_DEFINED] + [NORMAL] * (256 + len(merged))
    defaults: dict[str, Any] = {
        "pre": "gpt-2",
        "merges": ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"],
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return write_vocabulary(path, "gpt2", [*marks, *byte_letters(), *merged], types, **{**defaults, **keys})
