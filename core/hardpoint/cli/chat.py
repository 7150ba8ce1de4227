"""Talk to a model in the terminal: one of an engine started for this command, or that of a running server (--url).

In the conversation: /reset forgets it, /system TEXT sets the system message, /quit (or Ctrl-D) leaves, Ctrl-C stops an
answer.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import closing

from hardpoint import env
from hardpoint.bench.load import Target
from hardpoint.bench.serving import served_model
from hardpoint.cli import console
from hardpoint.cli.local_engine import start_local
from hardpoint.cli.model_name import chosen_model, shown_name
from hardpoint.cli.run import add_sampling_arguments, sampling_params
from hardpoint.cli.speakers import Answer, LocalSpeaker, LoopThread, Message, ServerSpeaker, Speaker
from hardpoint.config.arguments import ENGINE_SECTIONS, add_sections, engine_config
from hardpoint.errors import ConfigError, EngineDead
from hardpoint.request.sampling import SamplingParams
from hardpoint_platforms.errors import HardpointError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `hardpoint chat`."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="folder, .gguf file, hub id or named model")
    parser.add_argument("--url", help="talk to this server instead (http://127.0.0.1:8000); MODEL is its name there")
    parser.add_argument("--api-key", metavar="KEY", help="of that server (default: HARDPOINT_API_KEY)")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling_arguments(parser, temperature=0.7, max_tokens=None)
    add_sections(parser, ENGINE_SECTIONS, without=("model.seed",))


def execute(args: argparse.Namespace) -> int:
    """Connect or start, then converse until the end of input."""
    with closing(LoopThread()) as loop:
        speaker = connect(args) if args.url else start(args, loop)
        try:
            Conversation(loop, speaker, sampling_params(args), args.system).run(read_line_function())
        finally:
            loop.call(speaker.close())
    return 0


def connect(args: argparse.Namespace) -> Speaker:
    """The server at --url. Raises LoadError if it cannot be reached."""
    target = Target.parse(args.url, args.api_key or env.API_KEY.read())
    return ServerSpeaker(target, args.model or asyncio.run(served_model(target)))


def start(args: argparse.Namespace, loop: LoopThread) -> Speaker:
    """An engine of our own. Raises ConfigError for a base model."""
    if args.api_key:
        raise ConfigError("--api-key goes with --url")
    model = chosen_model(args.model, "chat")
    return LocalSpeaker(start_local(loop, engine_config(args, model), to_chat=True), shown_name(model))


class Conversation:
    """The messages so far, and what the lines that begin with "/" do."""

    def __init__(self, loop: LoopThread, speaker: Speaker, params: SamplingParams, system: str | None) -> None:
        self._loop, self._speaker, self._params = loop, speaker, params
        self._system = system
        self.messages: list[Message] = []

    def run(self, read_line: Callable[[], str | None]) -> None:
        """Until /quit or the end of input. `read_line` returns None for the end."""
        if sys.stdin.isatty():
            console.note(f"{self._speaker.name}. /reset, /system TEXT, /quit; Ctrl-C stops an answer.")
        while True:
            try:
                line = read_line()
            except KeyboardInterrupt:
                console.note()
                return
            if line is None or line.strip() in ("/quit", "/exit", "/bye"):
                return
            if line.strip():
                self.take(line.strip())

    def take(self, line: str) -> None:
        """One line: a command, or something to answer."""
        command, _, rest = line.partition(" ")
        if command == "/reset":
            self.messages.clear()
            console.note("forgotten")
        elif command == "/system":
            self._system = rest.strip() or None
            console.note("system message set" if self._system else "system message removed")
        elif command.startswith("/") and command[1:].isalpha():
            console.note(f"{command}: unknown; there are /reset, /system TEXT and /quit")
        else:
            self._answer(line)

    def _answer(self, text: str) -> None:
        """Stream the answer. A failed turn is taken back, so that the conversation goes on without it."""
        system: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        self.messages.append({"role": "user", "content": text})
        answer, pieces, started = Answer(), list[str](), time.perf_counter()
        stream = self._loop.iterate(self._speaker.reply(system + self.messages, self._params, answer))
        try:
            with closing(stream):  # type: ignore[type-var]
                for piece in stream:
                    pieces.append(piece)
                    print(piece, end="", flush=True)
        except KeyboardInterrupt:
            answer.finish_reason = "stopped"
        except EngineDead:
            raise
        except HardpointError as error:
            print(flush=True)
            self.messages.pop()
            console.show_error(error)
            return
        print(flush=True)
        self.messages.append({"role": "assistant", "content": "".join(pieces)})
        if sys.stdin.isatty():
            seconds = time.perf_counter() - started
            rate = f"{answer.tokens} tokens, {answer.tokens / seconds:.1f} per second, {answer.finish_reason}"
            console.note(console.paint(rate, "dim", sys.stderr))


def read_line_function() -> Callable[[], str | None]:
    """Reads lines: with editing and a history on a terminal, plainly from a pipe."""
    if not sys.stdin.isatty():
        return lambda: sys.stdin.readline() or None
    history = env.HOME.read() / "chat_history"
    try:
        import readline
    except ImportError:  # Python built without it: lines are read without editing
        pass
    else:
        import atexit

        if history.exists():
            readline.read_history_file(history)
        readline.set_history_length(1000)
        history.parent.mkdir(parents=True, exist_ok=True)
        atexit.register(readline.write_history_file, history)

    def read() -> str | None:
        try:
            return input("> ")
        except EOFError:
            console.note()
            return None

    return read
