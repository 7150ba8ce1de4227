"""Small tokenizers built on the spot: byte-level BPE, and one in the way of SentencePiece."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PHRASES = (
    "Hello world, the kettle is on.",
    "Grüße aus Köln: naïve façade œuvre ß",
    "日本語のテキストと漢字、そして句読点。",
    "한국어 문장도 있습니다",
    "🦜🪁 flags 🇳🇴🇯🇵 family 👩‍👩‍👧‍👦 tone 👍🏽",
    "مرحبا بالعالم שלום עולם",
    "def f(x):\n\treturn x ** 2  # code",
    "  runs   of    spaces\n\n\nand newlines\r\n",
)


class Scripted:
    """The part of the tokenizer interface that the text side needs, over a `tokenizers.Tokenizer`."""

    def __init__(self, tokenizer: Tokenizer, eos: tuple[int, ...] = ()) -> None:
        self.raw = tokenizer
        self._eos = eos

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._eos

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(self.raw.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self.raw.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        piece = self.raw.id_to_token(token_id)
        return self.decode([token_id], skip_special_tokens=False).encode() if piece else b""


def byte_level(merges: Sequence[tuple[str, str]] = ()) -> Scripted:
    """Every byte is a token (id = place in the sorted alphabet); `merges` add longer ones; 2 special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    raw = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken("<|start|>", special=True), AddedToken("<|end|>", special=True)])
    return Scripted(raw, (raw.token_to_id("<|end|>"),))


def sentencepiece_like() -> Scripted:
    """Pieces with a space mark, 256 byte tokens, and a decoder that drops one leading space."""
    pieces = ["<s>", "▁", "▁kettle", "▁on", "on"] + [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens([AddedToken("<s>", special=True)])
    return Scripted(raw)
