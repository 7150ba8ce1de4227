"""What all providers of this plugin share."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from acme_npu.memory import CHIP, device_bytes
from hardpoint_platforms.ops.contract import OpInstance, Packed
from hardpoint_platforms.ops.provider import OpProvider, Support
from hardpoint_platforms.versioning import Version

#: Seconds that a hanging kernel sleeps: longer than anybody waits.
FOREVER = 3600.0


class AcmeProvider(OpProvider):
    """A provider of this plugin. `host`: its calls are driven from the host, so they split programs."""

    version = Version(1, 0)
    host = False

    def __init__(self, fault: str = "") -> None:
        self.name = f"acme {self.op}"
        self.fault = fault

    def supports(self, instance: OpInstance) -> Support:
        reason = self.refuses(instance)
        return Support(not reason, reason)

    def refuses(self, instance: OpInstance) -> str:
        """Why an instance is not taken; "" where it is."""
        return "" if instance.dtype.itemsize > 1 else f"computes no {instance.dtype}"

    def packed_bytes(self, packed: Packed) -> Mapping[Hashable, int]:
        return device_bytes(packed)

    def launched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The kernel of a function on plain tensors; what names it names the function."""

        @functools.wraps(function)
        def kernel(*args: Any) -> Any:
            return CHIP.launch(function, *args, host=self.host)

        return kernel

    def sleep(self) -> None:
        """The fault `kernel_hangs`."""
        time.sleep(FOREVER)
