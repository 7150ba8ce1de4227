"""One prompt, one answer, streamed to the terminal. The engine runs for this command alone.

A model with a chat template answers the prompt; a base model (and --raw) continues it. A prompt of "-" is read from
standard input.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import closing

from hardpoint.cli import console
from hardpoint.cli.local_engine import start_local
from hardpoint.cli.model_name import shown_name
from hardpoint.cli.speakers import Answer, LocalSpeaker, LoopThread
from hardpoint.config.arguments import ENGINE_SECTIONS, add_sections, engine_config
from hardpoint.config.quantities import at_least, between
from hardpoint.errors import ConfigError
from hardpoint.request.sampling import SamplingParams


def add_sampling_arguments(parser: argparse.ArgumentParser, *, temperature: float, max_tokens: int | None) -> None:
    """The few sampling parameters that one types."""
    group = parser.add_argument_group("Sampling")
    group.add_argument(
        "--temperature",
        type=between(0.0, 100.0),
        default=temperature,
        help="0 takes the likeliest token each time (default: %(default)s)",
    )
    group.add_argument("--top-p", type=between(1e-6, 1.0), default=1.0, help="nucleus (default: %(default)s)")
    group.add_argument("--top-k", type=at_least(0), default=0, help="likeliest tokens to draw from; 0 is all")
    group.add_argument(
        "--repetition-penalty", type=between(0.01, 100.0), default=1.0, help="above 1 repeats less (default: 1)"
    )
    group.add_argument(
        "--max-tokens",
        type=at_least(1),
        default=max_tokens,
        help="most tokens of an answer" + (f" (default: {max_tokens})" if max_tokens else ""),
    )
    group.add_argument("--seed", type=int, default=None, help="same seed, same text")
    group.add_argument("--stop", action="append", default=None, metavar="TEXT", help="ends the answer; several allowed")


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """From these flags."""
    return SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        repetition_penalty=args.repetition_penalty,
        max_tokens=args.max_tokens,
        seed=args.seed,
        stop=tuple(args.stop or ()),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `hardpoint run`."""
    parser.add_argument("model", metavar="MODEL", help="folder, .gguf file, hub id or named model")
    parser.add_argument("prompt", metavar="PROMPT", help='text, or "-" for standard input')
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling_arguments(parser, temperature=0.0, max_tokens=256)
    add_sections(parser, ENGINE_SECTIONS, without=("model.seed",))


def execute(args: argparse.Namespace) -> int:
    """Start the engine, print the answer, stop the engine."""
    prompt = read_prompt(args.prompt)
    config = engine_config(args, args.model)
    with closing(LoopThread()) as loop:
        local = start_local(loop, config)
        speaker = LocalSpeaker(local, shown_name(args.model))
        answer, started = Answer(), time.perf_counter()
        try:
            if speaker.has_template and not args.raw:
                messages = [{"role": "system", "content": args.system}] if args.system else []
                messages.append({"role": "user", "content": prompt})
                pieces = speaker.reply(messages, sampling_params(args), answer)
            elif args.system:
                raise ConfigError("--system needs a chat template", hint="put the text into the prompt")
            else:
                pieces = speaker.complete(local.tokenizer.encode(prompt), sampling_params(args), answer)
            for piece in loop.iterate(pieces):
                print(piece, end="", flush=True)
            print()
        finally:
            loop.call(speaker.close())
    seconds = time.perf_counter() - started
    if sys.stderr.isatty():
        line = f"{answer.tokens} tokens in {seconds:.1f} s ({answer.finish_reason})"
        console.note(console.paint(line, "dim", sys.stderr))
    return 0


def read_prompt(text: str) -> str:
    """The prompt itself, or standard input for "-". Raises ConfigError for an empty one."""
    prompt = sys.stdin.read() if text == "-" else text
    if not prompt.strip():
        raise ConfigError("the prompt is empty")
    return prompt
