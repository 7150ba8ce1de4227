"""Names of dtypes, and which one a model runs in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hardpoint.errors import ConfigError
from hardpoint_platforms.capabilities import Capabilities

_NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ALIASES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}


def named_dtype(name: str, flag: str) -> torch.dtype:
    """The dtype called `name`. Raises ConfigError naming `flag`."""
    dtype = _NAMES.get(_ALIASES.get(name, name))
    if dtype is None:
        raise ConfigError(f"{flag} {name!r}: choose one of auto, {', '.join(_NAMES)}")
    return dtype


def choose_dtype(wanted: str, model_config: Mapping[str, Any], capabilities: Capabilities) -> torch.dtype:
    """What activations run in.

    "auto" takes the device's first dtype, or the model's own where the device lists it and it is as wide.
    Raises ConfigError for a dtype that the device does not compute in.
    """
    offered = capabilities.compute_dtypes
    if wanted != "auto":
        dtype = named_dtype(wanted, "--dtype")
        if dtype not in offered:
            names = ", ".join(str(d).removeprefix("torch.") for d in offered)
            raise ConfigError(f"--dtype {wanted}: this device computes in {names}")
        return dtype
    own = _NAMES.get(str(model_config.get("torch_dtype") or model_config.get("dtype") or "").removeprefix("torch."))
    return own if own in offered and own.itemsize == offered[0].itemsize else offered[0]
