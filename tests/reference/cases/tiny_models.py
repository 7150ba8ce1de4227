"""Tiny models, saved as Hugging Face folders, whose right answers are known: by a script, or by transformers.

    chain model     the next token depends on the current one alone: greedy text follows a script
    random model    a Llama whose answers transformers gives too; weights large enough that attention matters

The tokenizer of both is byte-level and holds the wanted pieces:

    id    0    1     2 .. 257       258 ...
          <s>  </s>  single bytes   pieces, each one token
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS = 0, 1
FIRST_BYTE, FIRST_PIECE = 2, 258
#: The gap between the logit of the wanted token and all others is CHAIN_NORM times the chain's strength.
CHAIN_NORM = 512**0.5


def byte_id(byte: int) -> int:
    """The token of one byte."""
    return FIRST_BYTE + byte


def byte_letters() -> list[str]:
    """The letter by which byte-level tokenizers spell each byte (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def save_tokenizer(folder: Path, pieces: Sequence[str]) -> None:
    """tokenizer.json with the two special tokens, all bytes, and the pieces."""
    letters = byte_letters()
    vocabulary = {"<s>": BOS, "</s>": EOS}
    vocabulary |= {letters[byte]: byte_id(byte) for byte in range(256)}
    for number, piece in enumerate(pieces):
        vocabulary["".join(letters[byte] for byte in piece.encode())] = FIRST_PIECE + number
    assert len(vocabulary) == FIRST_PIECE + len(pieces), "a piece is there twice"
    # a text that is one piece becomes its token; any other is spelled in bytes
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


def llama_config(**changes: Any) -> dict[str, Any]:
    """config.json of the random tiny model, with changes."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    } | changes


def llama_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama's weights."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    kv = width * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}self_attn.q_proj.weight": (heads * width, hidden),
            f"{at}self_attn.k_proj.weight": (kv, hidden),
            f"{at}self_attn.v_proj.weight": (kv, hidden),
            f"{at}self_attn.o_proj.weight": (hidden, heads * width),
            f"{at}post_attention_layernorm.weight": (hidden,),
            f"{at}mlp.gate_proj.weight": (inner, hidden),
            f"{at}mlp.up_proj.weight": (inner, hidden),
            f"{at}mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


def random_weights(config: Mapping[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """fp32 weights, so large that a wrong mask, rotation or page shows in the logits."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in llama_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            weights[name] = 1.0 + 0.2 * noise
        else:
            weights[name] = noise if "embed" in name else 1.5 * noise * shape[-1] ** -0.5
    return weights


def save_llama(
    folder: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor],
    pieces: Sequence[str] | None = None,
) -> Path:
    """Write config, weights and a tokenizer; without `pieces` it has as many words as the model has rows."""
    if pieces is None:
        pieces = [f" w{number}" for number in range(config["vocab_size"] - FIRST_PIECE)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(weights), folder / "model.safetensors")
    save_tokenizer(folder, pieces)
    return folder


class Chain:
    """A chain model of text pieces, and their token ids.

    script: pieces (or raw bytes, or ids) in the order in which they follow each other; the last is followed by
    `end`, </s> unless it says otherwise. strength: of the wanted successor (1: greedy and sampling alike; 0.05: soft).
    rivals: piece -> the second best behind it, at half the logit.
    """

    def __init__(
        self,
        folder: Path,
        script: Sequence[str | bytes | int],
        *,
        end: str | bytes | int = EOS,
        strength: float = 1.0,
        rivals: Mapping[str, str] | None = None,
        extra: Sequence[str] = (),
    ) -> None:
        texts = [*(piece for piece in script if isinstance(piece, str)), *extra]
        self.pieces = list(dict.fromkeys(text for text in texts if len(text.encode()) > 1))
        self.ids = [self.id(piece) for piece in script]
        assert len(set(self.ids)) == len(self.ids), "each piece may occur once"
        config = llama_config(
            vocab_size=320,
            hidden_size=512,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=8,
            num_key_value_heads=4,
        )
        weights = random_weights(config)
        weights["model.embed_tokens.weight"] = torch.eye(320, 512)
        for name, weight in weights.items():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
            elif weight.ndim == 1:
                weight.fill_(1.0)
        head = torch.zeros(320, 512)
        for token, successor in zip(self.ids, [*self.ids[1:], self.id(end)], strict=True):
            head[successor, token] = strength
        for piece, rival in (rivals or {}).items():
            head[self.id(rival), self.id(piece)] = strength / 2
        weights["lm_head.weight"] = head
        self.folder = save_llama(folder, config, weights, self.pieces)

    def id(self, piece: str | bytes | int) -> int:
        """The token of a piece, or of a single byte."""
        if isinstance(piece, int):
            return piece
        raw = piece.encode() if isinstance(piece, str) else piece
        return byte_id(raw[0]) if len(raw) == 1 else FIRST_PIECE + self.pieces.index(raw.decode())
