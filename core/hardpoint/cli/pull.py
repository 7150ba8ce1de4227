"""Download a model into the model folder and check it.

hardpoint pull smollm2               a named model (`hardpoint models list` shows the names)
hardpoint pull Qwen/Qwen3-0.6B       a repository of the hub
hardpoint pull REPO:Q4_K_M           one GGUF file of a repository, by its quantization
"""

from __future__ import annotations

import argparse

from hardpoint.cli import console
from hardpoint.config.quantities import format_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `hardpoint pull`."""
    parser.add_argument("name", metavar="NAME", help="named model, hub id, or REPO:QUANT")


def execute(args: argparse.Namespace) -> int:
    """Pull it, unless it is there."""
    from hardpoint.weights.store import pull

    line = console.ProgressLine()

    def show(what: str, done: int, total: int) -> None:
        line.update(progress_text(what, done, total), share(done, total))

    try:
        path = pull(args.name, show)
    finally:
        line.clear()
    print(path)
    console.note(f"ready: hardpoint serve {args.name}")
    return 0


def share(done: int, total: int) -> float:
    """0 to 1; 0 where the whole is not known."""
    return done / total if total else 0.0


def progress_text(what: str, done: int, total: int) -> str:
    """ "download 12.0 of 88.6 MiB"."""
    of = f" of {format_bytes(total)}" if total else ""
    return f"{what} {format_bytes(done)}{of}"
