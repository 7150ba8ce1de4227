"""Kernels that Triton compiles while requests wait: each is a stall of up to a second, so they are counted and told."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from triton import knobs

log = logging.getLogger(__name__)


class LateCompiles:
    """Counts by kernel, from `watch` on. Triton's hook is one per process: whoever set it before is still called."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._before: Any = None
        self._watching = False

    def watch(self) -> None:
        """Start counting; a second call changes nothing."""
        if not self._watching:
            self._watching = True
            self._before = knobs.runtime.jit_post_compile_hook
            knobs.runtime.jit_post_compile_hook = self._compiled

    def close(self) -> None:
        """Stop counting."""
        if self._watching:
            self._watching = False
            knobs.runtime.jit_post_compile_hook = self._before

    def _compiled(self, *positional: Any, **named: Any) -> Any:
        name = getattr(named.get("fn"), "name", "a kernel")
        self.counts[name] += 1
        log.warning(
            "compiled %s while serving (%d such stalls so far): its shape did not occur in the warm-up",
            name,
            self.counts.total(),
        )
        return self._before(*positional, **named) if self._before is not None else None
