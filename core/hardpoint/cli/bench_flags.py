"""Flags and output that several kinds of `hardpoint bench` share."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardpoint.config.arguments import engine_config
from hardpoint.config.quantities import at_least, between

if TYPE_CHECKING:
    from hardpoint.bench.datasets import PromptSettings

#: What it measures, its flags, and the measurement, which returns the exit code.
Kind = tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]


def count(parser: argparse.ArgumentParser, flag: str, default: int, text: str, *, lowest: int = 1) -> None:
    """An option that takes a whole number."""
    parser.add_argument(flag, type=at_least(lowest), default=default, metavar="N", help=f"{text} (default: {default})")


def counts(parser: argparse.ArgumentParser, flag: str, default: list[int], text: str) -> None:
    """An option that takes several whole numbers."""
    shown = " ".join(map(str, default))
    parser.add_argument(
        flag, type=at_least(1), nargs="+", default=default, metavar="N", help=f"{text} (default: {shown})"
    )


def prompt_arguments(parser: argparse.ArgumentParser, *, input_len: int, output_len: int) -> None:
    """The options of made-up prompts."""
    group = parser.add_argument_group("Prompts")
    group.add_argument("--input-len", type=at_least(1), default=input_len, metavar="TOKENS", help="of each prompt")
    group.add_argument("--output-len", type=at_least(1), default=output_len, metavar="TOKENS", help="made for each")
    group.add_argument("--shared-prefix", type=at_least(0), default=0, metavar="TOKENS", help="that all prompts share")
    group.add_argument("--spread", type=between(0.0, 1.0), default=0.0, help="of lengths, as a share of --input-len")
    group.add_argument("--prompts", type=Path, metavar="FILE", help='a text per line, or JSON lines with a "prompt"')
    group.add_argument("--vocab-size", type=at_least(300), default=16_000, metavar="N", help="random ids are below it")
    group.add_argument("--prompt-seed", type=int, default=0, help="same seed, same prompts")


def prompt_settings(args: argparse.Namespace) -> PromptSettings:
    """From these flags."""
    from hardpoint.bench.datasets import PromptSettings

    return PromptSettings(
        args.input_len, args.shared_prefix, args.spread, args.vocab_size, args.prompt_seed, args.prompts
    )


def offline_engine(args: argparse.Namespace) -> Any:
    """The offline interface with the settings of the command line."""
    from hardpoint.llm import LLM

    return LLM.from_config(engine_config(args, args.model))


def fresh_batches(args: argparse.Namespace) -> Callable[[int], list[Any]]:
    """Makes batches of prompts that have not been used before, so that no cache holds them."""
    from hardpoint.bench.datasets import prompts

    settings, used = prompt_settings(args), [0]

    def batch(size: int) -> list[Any]:
        used[0] += 1
        return prompts(dataclasses.replace(settings, seed=settings.seed + used[0]), size)

    return batch


def show(args: argparse.Namespace, found: Any, text: str) -> int:
    """Print the results, for programs or for people. Returns the exit code."""
    print(json.dumps(found) if args.json else text)
    sys.stdout.flush()
    return 0
