"""Which of several kernels is fastest here, measured once and kept on disk for every later start.

A way must win by a margin, so that two that are alike do not change places from one machine to the next.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import triton

log = logging.getLogger(__name__)

#: Way of doing something: makes one call.
Way = Callable[[], object]
#: Share of the first way's time that another must save to be taken.
MARGIN = 0.02
#: Calls in a queue, and queues, of which the median counts.
_CALLS, _RUNS = 8, 7
#: Bytes written between two calls: more than any cache holds.
_FLUSH = 256 << 20


class Measurements:
    """Answers by question. Owns one file, which is read at once and written after each new answer."""

    def __init__(self, path: Path | None = None, seconds: Callable[[Way], float] | None = None) -> None:
        """path: None to keep nothing; seconds: times a way, None to measure nothing and use what is on disk alone."""
        self._path, self._seconds = path, seconds
        self._known: dict[str, dict[str, float]] = _read(path)

    def fastest(self, question: str, ways: Mapping[str, Way], head_start: float = 0.0) -> str:
        """The name of the fastest of `ways`; the first one where nothing was measured.

        head_start: seconds that the first one saves in a step and not alone.
        """
        names = list(ways)
        known = self._known.get(question, {})
        if self._seconds is not None and not known.keys() >= set(names):
            known = {name: round(self._seconds(way) * 1e6, 2) for name, way in ways.items()}
            self._known[question] = known
            log.info("%s: %s microseconds", question, ", ".join(f"{name} {time:g}" for name, time in known.items()))
            self._write()
        if not known.keys() >= set(names):
            return names[0]
        best = min(names, key=known.__getitem__)
        return best if known[best] < known[names[0]] * (1 - MARGIN) - head_start * 1e6 else names[0]

    def knows(self, question: str) -> bool:
        """Whether there is an answer, or one can be had."""
        return question in self._known or self._seconds is not None

    def _write(self) -> None:
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part = self._path.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(self._known, indent=1, sort_keys=True))
            part.replace(self._path)
        except OSError as error:
            log.warning("what was measured cannot be kept in %s: %s", self._path, error)


def _read(path: Path | None) -> dict[str, dict[str, float]]:
    """What the file holds; nothing where there is none, or where it is damaged."""
    try:
        known = json.loads(path.read_text()) if path is not None else {}
        return {str(q): {str(n): float(t) for n, t in times.items()} for q, times in known.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        log.warning("%s cannot be read and is measured anew: %s", path, error)
        return {}


def kept(name: str) -> Path:
    """The folder of this name for what is found out once and kept on disk."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "hardpoint" / name


def file_for(device: torch.device) -> Path:
    """Where the answers for a GPU are kept: for one kind of GPU, one torch and one Triton."""
    name = torch.cuda.get_device_name(device).replace(" ", "-").replace("/", "-")
    return kept("measured") / f"{name}-torch{torch.__version__}-triton{triton.__version__}.json"


class GpuTimer:
    """Seconds of one call on a GPU: what a queue of calls takes longer than the same queue without them.

    Between two calls the GPU writes more than its cache holds: the data is read from memory, as in a step, and the host
    is always ahead.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, way: Way) -> float:
        """The median of several queues."""
        spoil = torch.empty(_FLUSH, dtype=torch.uint8, device=self._device)
        self._queue(spoil, way)  # compiles
        times = sorted(self._queue(spoil, way) - self._queue(spoil, None) for _ in range(_RUNS))
        return max(times[_RUNS // 2], 0.0) / _CALLS

    def _queue(self, spoil: torch.Tensor, way: Way | None) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self._device)
        begin.record()
        for _ in range(_CALLS):
            spoil.zero_()
            if way is not None:
                way()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
