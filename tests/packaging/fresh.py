"""Wheels built here, and a fresh environment to install them in.

The environment sees this one's site-packages for torch and other heavy things, but ours only as installed wheels.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, **options: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=600, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(folder: Path, out: Path, **variables: str) -> str:
    """With the build tools of this environment: no network. Returns what was said."""
    command = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, folder)
    return run(*command, env={**os.environ, **variables})


@dataclass(frozen=True)
class Wheelhouse:
    """Wheels that several modules install. `said`: by the build of the processor plugin, which had no compiler."""

    folder: Path
    said: str

    def wheels(self, *distributions: str) -> list[Path]:
        """Those of these distributions ("hardpoint_platforms"); all where none is named."""
        names = [f"{name}-*.whl" for name in distributions] or ["*.whl"]
        return [path for name in names for path in self.folder.glob(name)]


class Environment:
    """A virtual environment without our editable copies."""

    def __init__(self, folder: Path) -> None:
        run(sys.executable, "-m", "venv", "--without-pip", folder)
        self._folder = folder
        self._clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        own = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        # Behind the environment's own packages, and .pth files there are not read: ours come from wheels alone.
        (own / "heavy.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def python(self, *arguments: str | Path) -> str:
        return run(self._folder / "bin" / "python", *arguments, cwd=self._folder, env=self._clean)

    def hardpoint(self, *arguments: str | Path) -> str:
        return self.python("-m", "hardpoint", *arguments)

    def install(self, *wheels: Path) -> None:
        self.python("-m", "pip", "install", "--no-deps", "--no-index", "--ignore-installed", *wheels)

    def uninstall(self, distribution: str) -> None:
        self.python("-m", "pip", "uninstall", "-y", distribution)
