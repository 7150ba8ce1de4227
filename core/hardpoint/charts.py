"""Pictures by matplotlib, which is an optional extra."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from hardpoint.errors import ConfigError


def need_matplotlib(instead: str = "") -> Any:
    """matplotlib's figure module. Raises ConfigError where it is not installed: the pip command, and what is to be had
    `instead`."""
    try:
        import_module("matplotlib").use("Agg")
        return import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(
            f"--plot draws with matplotlib, which cannot be imported: {error}",
            hint="pip install 'hardpoint[plot]'" + (f"   ({instead})" if instead else ""),
        ) from None


def figure(width: float, height: float) -> Any:
    """An empty figure, sizes in inches. Raises ConfigError without matplotlib."""
    return need_matplotlib().Figure(figsize=(width, height), layout="constrained")


def save(drawn: Any, path: Path) -> None:
    """Write a figure as a PNG. Raises ConfigError where the file cannot be written."""
    try:
        drawn.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise ConfigError(f"--plot {path}: cannot be written: {error.strerror}") from None
