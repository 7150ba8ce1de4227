"""Makes torchax 0.0.13 fit this torch, and its tensors fit the plugin interface. Everything that leans on its insides
is here.

1. torchax lists overloads of ATen ops by name (`torch.ops.aten.x.Dimname`), and torch 2.13 dropped some of them: the
   import dies with AttributeError. They are keys of tables and nothing else, so each missing one gets a marker.
2. A torchax tensor computes only inside an environment and raises anywhere else. A device's tensors are plain tensors
   to the core and the kit, so outside of one each op now enters the environment by itself.
"""

from __future__ import annotations

import importlib.util
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

_OVERLOAD = re.compile(r"torch\.ops\.(\w+)\.(\w+)\.(\w+)")


def missing_overloads() -> list[str]:
    """Give each overload that torchax names and torch does not have a marker; returns their names, for people."""
    spec = importlib.util.find_spec("torchax")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    found: set[str] = set()
    for path in (path for folder in folders for path in Path(folder).rglob("*.py")):
        for namespace, op, overload in set(_OVERLOAD.findall(path.read_text(encoding="utf-8"))):
            packet = getattr(getattr(torch.ops, namespace), op, None)
            if packet is not None and not hasattr(packet, overload):
                setattr(packet, overload, f"torch has no {namespace}.{op}.{overload}")
                found.add(f"{namespace}.{op}.{overload}")
    return sorted(found)


def environment() -> Any:
    """A torchax environment of its own. Views are values: whoever writes through one breaks the rules of a step."""
    missing_overloads()
    from torchax import config, tensor

    tensor.Tensor.__torch_function__ = classmethod(_function)
    return tensor.Environment(config.Configuration(force_materialize_views=True, use_dlpack_for_data_conversion=False))


def _function(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """A call on torchax tensors outside of an environment: make it in the environment of the first of them."""
    env = next((leaf._env for leaf in _leaves((args, kwargs or {})) if hasattr(leaf, "_env")), None)
    # The environment's modes come before the subclass; what they hand back to torch must not come here again. In
    # inference mode torch wants views to share memory, which these do not.
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False), torch.no_grad(), env or nullcontext():
        return func(*args, **(kwargs or {}))


def _leaves(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        for part in value:
            yield from _leaves(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _leaves(part)
    else:
        yield value
