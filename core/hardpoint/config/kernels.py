"""`--kernel "attention[layers.3.*]=reference"`: which provider is to run which ops."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError

from hardpoint_platforms.choices import KernelChoice

_CHOICE = re.compile(r"([\w*?]+)(?:\[([^\]=]+)\])?=(.+)")


def parse_kernel_choice(text: str) -> KernelChoice:
    """Read "OP[WHERE]=PROVIDER" or "OP=PROVIDER". Raises ArgumentTypeError that shows the form."""
    match = _CHOICE.fullmatch(text.strip())
    if match is None or not match[3].strip():
        raise ArgumentTypeError(
            f"{text!r} chooses no kernel; write OP=PROVIDER or OP[WHERE]=PROVIDER: attention[layers.3.*]=reference"
        )
    return KernelChoice(match[1], match[2] or "*", match[3].strip())
