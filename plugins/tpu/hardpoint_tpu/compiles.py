"""Counts what XLA compiles, so that a compile that holds up requests does not go unseen."""

from __future__ import annotations

import logging

import jax

#: JAX tells a duration under this name for each program that it compiles or takes from the cache on disk.
_EVENT = "/jax/core/compile/backend_compile_duration"
#: Late compiles that are told; the others are counted.
_TOLD = 3
_log = logging.getLogger("hardpoint.tpu")


class Compiles:
    """Listens from its making to `close`. JAX tells the whole process: one opened device listens at a time."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        #: Programs that were compiled after `seal`.
        self.late = 0
        self._sealed, self._listening = False, True
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def seal(self) -> None:
        """Everything is compiled; what comes from here on makes a request wait, and is told."""
        self._sealed = True

    def unseal(self) -> None:
        """Programs are built again (another engine on the same device)."""
        self._sealed = False

    def close(self) -> None:
        """Stop listening. A second call does nothing."""
        if self._listening:
            self._listening = False
            jax.monitoring.unregister_event_duration_listener(self._heard)

    def _heard(self, event: str, duration: float, **_: object) -> None:
        if event != _EVENT:
            return
        self.count += 1
        self.seconds += duration
        if self._sealed:
            self.late += 1
            if self.late <= _TOLD:
                told = "XLA compiled something for %.2f s while requests waited: a shape that was not prepared"
                _log.warning(told, duration)
