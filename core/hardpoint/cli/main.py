"""The command `hardpoint`: finds the sub-command, imports it alone, and turns errors into a message and an exit code.

Exit codes: 0 done, 1 failed, 2 a wrong command line or setting, 130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import Protocol, cast

from hardpoint import env
from hardpoint.cli import console
from hardpoint.config.arguments import Parser
from hardpoint.errors import ConfigError, ModelNotFound
from hardpoint_platforms.errors import HardpointError


@dataclass(frozen=True)
class Command:
    """A sub-command; its module is `hardpoint.cli.NAME`."""

    name: str
    summary: str


class CommandModule(Protocol):
    """What the module of a sub-command has. Its docstring is the description in --help."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare its flags. Cheap: nothing heavy is imported for --help."""

    def execute(self, args: argparse.Namespace) -> int:
        """Do it. Returns the exit code; raises HardpointError."""


GROUPS: tuple[tuple[str, tuple[Command, ...]], ...] = (
    (
        "Use a model",
        (
            Command("serve", "an OpenAI-compatible server"),
            Command("chat", "talk to a model in the terminal"),
            Command("run", "one prompt, one answer"),
        ),
    ),
    (
        "Get models",
        (
            Command("pull", "download a model and check it"),
            Command("models", "list or remove pulled models"),
        ),
    ),
    (
        "Look inside",
        (
            Command("doctor", "is every device plugin in order?"),
            Command("explain", "which provider runs each op of a model, and why"),
            Command("bench", "measure a server, the engine or its parts"),
            Command("plan", "would a model fit on devices that you do not have? compiles its programs for them"),
            Command("simulate", "how chips that you do not have would serve your traffic"),
            Command("conformance", "does a device plugin keep the interface, up to which level?"),
            Command("plugin", "start a device plugin of your own"),
            Command("version", "versions of everything that matters"),
        ),
    ),
)
COMMANDS = {command.name: command for _, commands in GROUPS for command in commands}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (sys.argv without the program) and return the exit code."""
    try:
        env.check()
        logging.basicConfig(
            level=env.LOG_LEVEL.read().upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except HardpointError as error:
        if _debugging():
            raise
        console.show_error(error)
        return 2 if isinstance(error, ConfigError | ModelNotFound) else 1
    except KeyboardInterrupt:
        console.note("interrupted")
        return 130
    except BrokenPipeError:
        # the reader of our output left (`hardpoint explain | head`): that is no error of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def parse(argv: Sequence[str]) -> tuple[CommandModule, argparse.Namespace]:
    """The module and parsed flags of a command line that starts with a sub-command. Raises ConfigError."""
    name = argv[0]
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1)
        raise ConfigError(
            f"hardpoint has no command {name!r}",
            hint=f"did you mean `hardpoint {near[0]}`?" if near else "`hardpoint --help` lists the commands",
        )
    module = cast(CommandModule, import_module(f"hardpoint.cli.{name}"))
    parser = Parser(prog=f"hardpoint {name}", description=(module.__doc__ or "").strip())
    module.add_arguments(parser)
    return module, parser.parse_args(argv[1:])


def overview() -> str:
    """The grouped help of bare `hardpoint`."""
    lines = [f"{console.paint('hardpoint', 'bold')}: serve large language models on any accelerator", ""]
    for title, commands in GROUPS:
        lines.append(console.paint(title, "bold"))
        lines += [f"  hardpoint {command.name:<11} {command.summary}" for command in commands]
        lines.append("")
    lines.append(console.paint("Environment", "bold"))
    lines += [f"  {variable.name:<19} {variable.doc}" for variable in env.VARIABLES]
    lines += [
        "",
        "`hardpoint COMMAND --help` shows the options of a command. First steps:",
        "  hardpoint pull smollm2 && hardpoint serve",
    ]
    return "\n".join(lines)


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        if len(argv) > 1 and argv[0] == "help":
            return _run([argv[1], "--help"])
        print(overview())
        return 0
    if argv[0] in ("-V", "--version"):
        import hardpoint

        print(f"hardpoint {hardpoint.__version__}")
        return 0
    try:
        module, args = parse(argv)
    except SystemExit as done:  # argparse printed --help
        return int(done.code or 0)
    return module.execute(args)


def _debugging() -> bool:
    try:
        return env.DEBUG.read()
    except ConfigError:
        return False
