"""How each `tokenizer.ggml.pre` splits text before byte pairs are merged.

GGUF stores vocabulary and merges, and only the name of the split. The expressions are those of the models' own
tokenizer.json files. A name that is not here has no safe guess: another split gives other tokens without any error.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

from hardpoint.errors import TokenizerError


@dataclass(frozen=True)
class Split:
    """Attributes:
    expressions: applied one after the other; what matches becomes a piece, and so does what lies between.
    gpt2: whether GPT-2's own expression is applied last.
    ignore_merges: a piece that is a whole token is taken, whatever the merges say.
    add_bos: whether texts begin with BOS where the file does not say.
    """

    expressions: tuple[str, ...] = ()
    gpt2: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def build(self) -> PreTokenizer:
        """The pre-tokenizer, byte level last."""
        steps: list[PreTokenizer] = [pre_tokenizers.Split(Regex(e), "isolated") for e in self.expressions]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2))
        return pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]


_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"

_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}{_SYMBOLS}{_TAIL}"
_QWEN2 = rf"{_WORDS}|\p{{N}}{_SYMBOLS}{_TAIL}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_TAIL}"
)
_SEED = rf"{_WORDS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+{_TAIL}"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_EDGE = r"[^\r\n\p{L}\p{N}]?"
_SLASHED = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_TAIL}"
_TEKKEN = rf"{_EDGE}{_UPPER}*{_LOWER}+|{_EDGE}{_UPPER}+{_LOWER}*|\p{{N}}{_SLASHED}"
_GPT4O = (
    rf"{_EDGE}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_EDGE}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}{_SLASHED}"
)

_CJK = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
#: Letters with a case, up to Unicode 11 and without the newest Latin blocks: code points, or ranges of them.
_CASED = """
    41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1
    3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A
    1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4
    1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128
    212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D
    A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3
    104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943
"""


def _class(ranges: str) -> str:
    """A character class of hexadecimal code points and ranges."""
    return "".join("-".join(rf"\x{{{code}}}" for code in part.split("-")) for part in ranges.split())


_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_class(_CASED)}]+",
    rf"\s?[{_class('21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002')}]+",
    r"\s+$",
    _CJK,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    rf"[{_class('4E00-9FA5 3040-30FF')}]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _TAIL,
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_BLOOM = rf" ?[^(\s|.,!?{_class('2026 3002 FF0C 3001 964 6D4 60C')})]+"

_PLAIN_GPT2 = Split(gpt2=True)
_DIGITS_GPT2 = Split((r"\p{N}",), gpt2=True)
_LLAMA3_SPLIT = Split((_LLAMA3,), ignore_merges=True, add_bos=True)

_NAMES: dict[Split, str] = {
    _PLAIN_GPT2: "gpt-2 phi-2 gigachat mpt olmo jais trillion granite-docling exaone4 roberta-bpe",
    _DIGITS_GPT2: "smollm starcoder refact command-r codeshell exaone minerva-7b",
    _LLAMA3_SPLIT: "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    Split((_LLAMA3,)): "dbrx smaug-bpe chatglm-bpe glm4",
    Split((_QWEN2,)): "qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan grok-2",
    Split((_QWEN35,)): "qwen35",
    Split((_TEKKEN,), ignore_merges=True, add_bos=True): "tekken",
    Split((_GPT4O,)): "gpt-4o llama4 kanana2 minimax-m2",
    Split(_DEEPSEEK_LLM): "deepseek-llm",
    Split(_DEEPSEEK_CODER): "deepseek-coder",
    Split(_DEEPSEEK_V3): "deepseek-v3 hunyuan-dense",
    Split(_FALCON): "falcon",
    Split((_BLOOM,)): "bloom poro-chat gpt3-finnish",
    Split((_BLOOM, r"\p{N}")): "viking",
    Split((_SEED,)): "seed-coder",
    Split((_BAILING,)): "bailingmoe",
    Split(_DEFAULT): "default",
}
SPLITS = {name: split for split, names in _NAMES.items() for name in names.split()}


def split_of(name: object, file: str) -> Split:
    """The split called `name`. Raises TokenizerError for one that is not known or not given."""
    split = SPLITS.get(name) if isinstance(name, str) else None
    if split is None:
        what = "is missing" if name is None else f"is {name!r}, which is not known"
        raise TokenizerError(
            f"{file}: metadata 'tokenizer.ggml.pre' {what}, and any other split gives wrong tokens; "
            f"known are {', '.join(sorted(SPLITS))}",
            hint="name a folder with the model's tokenizer.json: --tokenizer FOLDER",
        )
    return split
