"""AMD's own kernels (AITER): found where they are wanted, and held against the arguments that this plugin passes.

Written after AITER's source, version `WRITTEN_AFTER` (ROCm/aiter, August 2026); the functions below have had these
arguments in every release since 0.1.5. Never run by the authors: so it is off unless asked for, another argument list
is a refusal and no failure, and each function is tried before it is used (`aiter_trial.py`).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from hardpoint_rocm.architectures import Architecture

log = logging.getLogger(__name__)

WRITTEN_AFTER = "0.1.20.post1"
#: Architectures for which it has code of all of these functions.
CHIPS = ("gfx942", "gfx950")
#: Attention of prompts; products with a scale per row; with a scale per 128 by 128 block of the weight.
ATTENTION, ROWS, BLOCKS = "flash_attn_varlen_func", "gemm_a8w8_CK", "gemm_a8w8_blockscale"
_PRODUCT = ("XQ", "WQ", "x_scale", "w_scale", "dtype")
#: What is passed, all of it by name.
PASSED: Mapping[str, tuple[str, ...]] = {
    ATTENTION: (
        "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal",
        "window_size", "out",
    ),
    ROWS: _PRODUCT,
    BLOCKS: _PRODUCT,
}  # fmt: skip
#: The distribution, as its maker calls it.
_DISTRIBUTION = "amd-aiter"
_NEVER_RUN = f"written after AITER {WRITTEN_AFTER}, never run by this plugin's authors"

#: trial(name, call, float8): why a function cannot be trusted here, or "".
Trial = Callable[[str, Callable[..., torch.Tensor], torch.dtype], str]


@dataclass(frozen=True)
class AiterFunction:
    """One of its functions.

    Attributes:
        name: in the package `aiter`.
        call: takes what `PASSED` names.
        against: why it is not called, "" where it may be; `call` raises RuntimeError then.
    """

    name: str
    call: Callable[..., torch.Tensor]
    against: str


@dataclass(frozen=True)
class Aiter:
    """What there is of it.

    Attributes:
        wanted: whether it was asked for.
        reason: for people: what is used of it and what is not, and why.
        functions: all that `PASSED` names.
    """

    wanted: bool
    reason: str
    functions: Mapping[str, AiterFunction]

    @property
    def value(self) -> str:
        """For people: what it comes to."""
        used = any(not function.against for function in self.functions.values())
        return "off" if not self.wanted else "on" if used else "not used"


def held() -> str:
    """Its version; "" where it is not installed."""
    if importlib.util.find_spec("aiter") is None:
        return ""
    try:
        return version(_DISTRIBUTION)
    except PackageNotFoundError:
        return "of unknown version"


def unwanted() -> Aiter:
    """Where it was not asked for: what is told of it."""
    there = held()
    if not there:
        return _none(False, "AITER is not installed: attention and products are Triton's and torch's")
    return _none(
        False,
        f"AITER {there} is installed: `--option aiter=on` has prompts' attention and products of 8-bit numbers by it, "
        f"each tried at start; {_NEVER_RUN}: run `hardpoint conformance --device rocm --option aiter=on` first",
    )


def look_up(architecture: Architecture, trial: Trial, float8: torch.dtype) -> Aiter:
    """Where it was asked for: each function, inspected and tried, or why it is left aside.

    float8: the 8-bit floats that the chip multiplies.
    """
    there = held()
    if not there:
        return _none(True, "AITER is not installed (its maker's page, github.com/ROCm/aiter, says how)")
    if architecture.name not in CHIPS:
        return _none(True, f"{architecture.name}: AITER's kernels are for {' and '.join(CHIPS)}")
    try:
        package = importlib.import_module("aiter")
    except Exception as error:  # a broken installation is no reason not to serve
        return _none(True, f"AITER cannot be imported ({_told(error)})")
    functions = {name: _function(package, name, trial, float8) for name in PASSED}
    for function in functions.values():
        if function.against:
            log.warning("%s; Triton's kernel serves", function.against)
    told = "; ".join(function.against or f"{name} in use" for name, function in functions.items())
    return Aiter(True, f"AITER {there}: {told} ({_NEVER_RUN})", functions)


def _function(package: Any, name: str, trial: Trial, float8: torch.dtype) -> AiterFunction:
    call = getattr(package, name, None)
    if not callable(call):
        return AiterFunction(name, _uncalled, f"AITER here has no {name}")
    found = AiterFunction(name, call, unlike(name, call))
    if found.against:
        return found
    try:
        wrong = trial(name, call, float8)
    except Exception as error:  # compilers, loaders and checks of its own raise of many kinds
        wrong = f"failed when it was tried: {_told(error)}"
    return replace(found, against=f"AITER's {name} {wrong}") if wrong else found


def unlike(name: str, call: Callable[..., Any]) -> str:
    """Which argument an installed function lacks of what is passed, or wants beside it; "" where they agree."""
    known = dict(_parameters(name, call))
    if not known:
        return f"AITER's {name} does not say which arguments it takes"
    passed = PASSED[name]
    lacking = [argument for argument in passed if argument not in known]
    if lacking:
        return f"AITER's {name} takes no argument {lacking[0]!r} here (written after {WRITTEN_AFTER})"
    more = [argument for argument, needed in known.items() if needed and argument not in passed]
    return f"AITER's {name} wants an argument {more[0]!r} here (written after {WRITTEN_AFTER})" if more else ""


def _parameters(name: str, call: Callable[..., Any]) -> Iterator[tuple[str, bool]]:
    """Names of a function's arguments, and whether each must be given. AITER registers some functions as ops of torch
    and leaves a wrapper that takes anything: then the op's schema says."""
    parameters = inspect.signature(call).parameters.values()
    named = [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    if named or not parameters:
        yield from ((one.name, one.default is one.empty) for one in named)
        return
    registered = getattr(torch.ops.aiter, name, None)
    if registered is not None:
        schema = registered.default._schema
        yield from ((str(one.name), not one.has_default_value()) for one in schema.arguments)


def _none(wanted: bool, why: str) -> Aiter:
    return Aiter(wanted, why, {name: AiterFunction(name, _uncalled, why) for name in PASSED})


def _uncalled(**named: Any) -> torch.Tensor:
    raise RuntimeError("a function of AITER that was refused is called")


def _told(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
