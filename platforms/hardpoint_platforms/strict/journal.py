"""Which op of the step runs, and which line called it: what errors name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType

import torch

from hardpoint_platforms.ops.contract import OpInstance

_TORCH = str(Path(torch.__file__).parent)
_HERE = Path(__file__).parent
#: The device's own machinery: never the culprit. The ops in `static` may be.
_MACHINERY = tuple(str(_HERE / name) for name in ("journal.py", "watch.py", "providers.py", "program.py", "state.py"))


@dataclass
class Call:
    """A running op and the storages that were made inside it."""

    name: str
    made: set[int] = field(default_factory=set)


class Journal:
    """The stack of running ops of one device. Used by one thread at a time."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._last = ""

    @property
    def call(self) -> Call | None:
        """The innermost running op, None outside of any."""
        return self._calls[-1] if self._calls else None

    @contextmanager
    def inside(self, instance: OpInstance) -> Iterator[None]:
        """An op runs."""
        self._calls.append(Call(name_of(instance)))
        try:
            yield
        except Exception:
            # the program above names the op that failed, though this call is over by then
            self._last = self._last or self._calls[-1].name
            raise
        finally:
            self._calls.pop()

    def fresh(self) -> None:
        """A step starts."""
        self._calls.clear()
        self._last = ""

    def where(self, error: BaseException | None = None) -> str:
        """ "FILE:LINE in op PLACE" of the line that runs, or of the one that raised `error`."""
        line = _raised(error.__traceback__) if error is not None else _running(sys._getframe(1))
        name = self._last if error is not None else (self._calls[-1].name if self._calls else "")
        return f"{line} in {name}" if name else f"{line} in the step, outside any op"


def name_of(instance: OpInstance) -> str:
    """ "attention at layers.3"."""
    return f"{instance.op} at {instance.where}"


def _foreign(file: str) -> bool:
    return not (file.startswith((_TORCH, "<")) or file in _MACHINERY or file.endswith("contextlib.py"))


def _running(frame: FrameType | None) -> str:
    while frame is not None:
        if _foreign(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def _raised(trace: TracebackType | None) -> str:
    found = "?"
    while trace is not None:
        if _foreign(trace.tb_frame.f_code.co_filename):
            found = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found
