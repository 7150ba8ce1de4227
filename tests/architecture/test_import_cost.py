"""The front end and the scheduler need neither torch nor transformers, so that the command answers at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIGHT = [
    "hardpoint",
    "hardpoint.cli.main",
    "hardpoint.config.arguments",
    "hardpoint.request.validation",
    "hardpoint.request.request",
    "hardpoint.protocol.messages",
    "hardpoint.protocol.codec",
    "hardpoint.protocol.channel",
    "hardpoint.scheduler.scheduler",
    "hardpoint.kv.pager",
    "hardpoint.engine.loop",
    "hardpoint.engine.update",
    "hardpoint.frontend.client",
    "hardpoint.frontend.remote_client",
    "hardpoint.frontend.detokenizer",
    "hardpoint.frontend.stop",
    "hardpoint.frontend.tokenizer",
    "hardpoint.frontend.chat_template",
    "hardpoint.server.app",
    "hardpoint.bench.load",
    "hardpoint_platforms",
    "hardpoint_platforms.errors",
    "hardpoint_platforms.versioning",
    "hardpoint_platforms.manifest",
    "hardpoint_platforms.discovery",
]
COMMANDS = [
    "serve",
    "chat",
    "run",
    "pull",
    "models",
    "doctor",
    "explain",
    "bench",
    "plugin",
    "simulate",
    "conformance",
    "version",
]
HEAVY = ("torch", "transformers", "sympy")
#: What the process of a server imports beside the engine's.
FRONT_END = (
    "hardpoint.cli.serve",
    "hardpoint.cli.story",
    "hardpoint.frontend.remote_client",
    "hardpoint.frontend.tokenizer",
    "hardpoint.server.app",
    "hardpoint.server.serve",
)
#: What is imported before the engine process is there.
BEFORE_LAUNCH = ("hardpoint.cli.main", "hardpoint.cli.serve", "hardpoint.weights.store", "hardpoint.engine.launch")


def heavy_after(code: str, heavy: tuple[str, ...] = HEAVY) -> str:
    """Which heavy packages a fresh interpreter has loaded after `code`."""
    script = f"import sys\n{code}\nprint(*[m for m in {heavy!r} if m in sys.modules], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr.strip()


def test_the_light_half_imports_no_torch() -> None:
    code = "\n".join(
        f"import {module}\nassert not [m for m in {HEAVY!r} if m in sys.modules], '{module} loads something heavy'"
        for module in LIGHT
    )
    assert heavy_after(code) == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_no_torch(command: str) -> None:
    code = f"from hardpoint.cli.main import main\nassert main(['{command}', '--help']) == 0"
    assert heavy_after(code) == ""


def test_version_imports_next_to_nothing() -> None:
    script = (
        "import sys\nfrom hardpoint.cli.main import main\nmain(['--version'])\n"
        "print(*sorted({m.split('.')[0] for m in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    first, modules = done.stdout.splitlines()
    assert first.startswith("hardpoint ")
    assert not {"torch", "transformers", "numpy", "rich", "fastapi", "httpx", "asyncio"} & set(modules.split())


def test_the_front_end_of_a_server_needs_no_numpy() -> None:
    """numpy is a tenth of a second and 10 MB that nothing there computes with."""
    assert heavy_after("\n".join(f"import {module}" for module in FRONT_END), ("numpy", "gguf")) == ""


def test_little_is_imported_before_the_engine_is_launched() -> None:
    code = "\n".join(f"import {module}" for module in BEFORE_LAUNCH)
    assert heavy_after(code, ("asyncio", "zmq", "msgspec", "numpy", "fastapi", "filelock", "tokenizers")) == ""


def test_the_search_finds_torch() -> None:
    assert "torch" in heavy_after("import torch")
