"""Varied strings for comparing tokenizers: words, code, many scripts, emoji, runs of white space, special tokens."""

from __future__ import annotations

import random

PIECES = (
    [
        "Hello",
        " world",
        "the",
        " capital of",
        "I'll",
        " don't",
        "we've",
        "O'Neill's",
        "MiXeD",
        "_snake_case",
        "camelCase",
    ],
    ["0", "12", " 345", "6789012", "3.14159", "1,000,000", "0x1F", "½", "Ⅳ", "²", "٣٤", "१२"],
    [
        "def f(x):\n    return x**2",
        "if (a != b) {\n\t\tx += 1;\n}",
        '<div class="a">',
        "// ok",
        "#include <cstdio>",
        "=>",
        "::",
        "&&",
    ],
    ["你好", "世界", "日本語のテキスト", "カタカナ", "한국어", "繁體中文", "、。", "「引用」"],
    ["🎉", "👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "😀😀", "❤️", "\U0001f1e9\U0001f1ea"],
    [
        "café",
        "naïve",
        "ﬁ",
        "e\u0301",
        "Straße",
        "Ελληνικά",
        "русский",
        "العربية",
        "עברית",
        "हिन्दी",
        "ไทย",
        "\u200bzero",
        "\ufeff",
    ],
    [
        " ",
        "  ",
        "   ",
        "     ",
        "\n",
        "\n\n",
        "\n\n\n\n",
        "\t",
        "\t\t",
        "\r\n",
        " \n ",
        "\u00a0",
        "\u3000",
        "\x0b",
        "\x85",
    ],
    ["https://x.y/z?q=1&b=%20", "a@b.c", "...", "!!!", "—", "“quoted”", "$5.00", "100%", "C++", "\\n", "`code`", "~|^"],
    ["\x00", "\x07", "\x7f", "\u0378", "\U000e0001", "\ufffd", "\ud7ff", "\ue000"],
)


def corpus(count: int, special: list[str], seed: int = 0) -> list[str]:
    """`count` different strings, the same ones for the same seed. `special` are tokens to spell out in some of them."""
    rng = random.Random(seed)
    groups = [*PIECES, special] if special else list(PIECES)
    strings = dict.fromkeys(["", *special, *(piece for group in PIECES for piece in group)])
    while len(strings) < count:
        kind = rng.random()
        if kind < 0.1:
            text = "".join(
                chr(rng.choice(_ALPHABETS[rng.randrange(len(_ALPHABETS))])) for _ in range(rng.randint(1, 30))
            )
        elif kind < 0.2:
            text = rng.choice(PIECES[6]) * rng.randint(1, 40) + rng.choice(PIECES[0])
        else:
            text = "".join(rng.choice(rng.choice(groups)) for _ in range(rng.randint(1, 12)))
        strings[text] = None
    return list(strings)[:count]


_ALPHABETS = (
    range(0x20, 0x7F),
    range(0xA0, 0x250),
    range(0x370, 0x530),
    range(0x600, 0x780),
    range(0x900, 0xE00),
    range(0x2000, 0x2400),
    range(0x3040, 0x3100),
    range(0x4E00, 0x9FFF),
    range(0xAC00, 0xD7A0),
    range(0x1F300, 0x1F700),
    range(0x10400, 0x10450),
)
