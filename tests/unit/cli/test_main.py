"""The command itself: help, versions, unknown words, errors and exit codes."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

import hardpoint
from hardpoint.cli import version as version_command
from hardpoint.cli.main import COMMANDS, main, parse
from hardpoint.errors import ConfigError, EngineError, ModelNotFound


def test_bare_command_prints_the_grouped_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"hardpoint {name}" in out
        assert command.summary in out
    assert out.index("Use a model") < out.index("Look inside")
    assert "HARDPOINT_HOME" in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hardpoint {hardpoint.__version__}\n"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help_and_a_description(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: hardpoint {name}")
    assert len(out) > 150


def test_help_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "serve"]) == 0
    assert "--max-num-seqs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("serv", "did you mean `hardpoint serve`?"),
        ("xyzzy", "--help"),
        ("serve --max-num-seq 3", "did you mean --max-num-seqs?"),
        ("serve --port x", "whole number"),
        ("bench", "KIND"),
        ("bench nothing", "invalid choice"),
        ("models rm", "NAME"),
        ("run onlymodel", "PROMPT"),
        ("version --frobnicate", "unknown option --frobnicate"),
    ],
)
def test_wrong_command_lines_exit_with_2(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert words in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("wrong flag", hint="fix it"), 2),
        (ModelNotFound("no model", hint="pull it"), 2),
        (EngineError("boom"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_become_one_message_and_a_code(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(version_command, "execute", fail)
    assert main(["version"]) == code
    err = capsys.readouterr().err
    assert "Traceback" not in err
    if isinstance(error, ConfigError | ModelNotFound):
        assert err == f"error: {error.message}\n  -> {error.hint}\n"


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise EngineError("boom")

    monkeypatch.setattr(version_command, "execute", fail)
    monkeypatch.setenv("HARDPOINT_DEBUG", "1")
    with pytest.raises(EngineError):
        main(["version"])


def test_a_wrong_environment_variable_is_fatal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HARDPOINT_LOG_LEVEL", "loud")
    assert main(["--version"]) == 2
    assert "HARDPOINT_LOG_LEVEL" in capsys.readouterr().err


def test_versions_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    import json

    assert main(["version", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["hardpoint"] == hardpoint.__version__
    assert found["versions"]["hardpoint-cpu"]
    assert found["interfaces"]["device"] == "1.1"


def test_parse_gives_module_and_flags() -> None:
    module, args = parse(["serve", "m", "--port", "1"])
    assert module.__doc__
    assert getattr(args, "server.port") == 1
    assert args.model == "m"


def test_python_dash_m_and_a_closed_pipe() -> None:
    done = subprocess.run(
        f"{sys.executable} -m hardpoint --help | head -n 1", shell=True, capture_output=True, text=True, check=True
    )
    assert "hardpoint" in done.stdout
    assert "Traceback" not in done.stderr
