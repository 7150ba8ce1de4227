"""Hardpoint serves large language models on any accelerator.

    from hardpoint import LLM, SamplingParams

The names are imported when first used, so that `import hardpoint` costs nothing and needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hardpoint.llm import LLM
    from hardpoint.request.sampling import SamplingParams

    __version__: str

__all__ = ["LLM", "SamplingParams", "__version__"]

_HOMES = {"LLM": "hardpoint.llm", "SamplingParams": "hardpoint.request.sampling"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("hardpoint")
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'hardpoint' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
