"""Sizes that are recorded while serving: the most needed are recorded before it, the others as they are wanted.

    start     one decode, the largest number of decodes, the largest step with prompts: recorded
    idle      no request is served: the next one is recorded, until none waits
    step      its own size is not recorded: the smallest recorded one that holds it serves; its own is wanted
    next step the wanted size is recorded before it is launched, or, where none is, the next of the others

A size that waits fits no step (`LateBucket`), so that the core pads to a larger one as it always does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from hardpoint_platforms.program import Bucket, SamplingShape

#: Shares of the time that recording may take while requests are served: of sizes that steps want, and of the others.
WANTED, OTHERS = 0.1, 0.02
#: Steps with prompts in a row after which one of them waits for a recording: their requests wait for a first token.
PATIENCE = 16


@dataclass(frozen=True)
class LateBucket(Bucket):
    """A bucket whose program may be put off. Equal to any other of its sizes."""

    backlog: Backlog | None = field(default=None, compare=False, repr=False)

    def fits(self, tokens: int, requests: int, query: int, sampling: SamplingShape) -> bool:
        """As every bucket, but nothing while its program waits."""
        if not super().fits(tokens, requests, query, sampling):
            return False
        return self.backlog is None or self.backlog.serves(self)


class Backlog:
    """What waits to be recorded, in order. Used by the thread that launches steps, after the one that prepared."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._waiting: dict[Bucket, None] = {}
        #: Sizes that could not be recorded: larger ones serve for good.
        self._never: set[Bucket] = set()
        self._wanted: Bucket | None = None
        #: When the last recording ended, and the seconds it took.
        self._last = (0.0, 0.0)
        self._prompts_in_a_row = 0
        #: Recorded while serving, and the seconds that took: of all, and of the longest.
        self.recorded, self.seconds, self.longest = 0, 0.0, 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, bucket: Bucket) -> None:
        """It waits from now on."""
        self._waiting[bucket] = None

    def drop(self, buckets: Iterable[Bucket]) -> None:
        """They wait no more, and serve as they are."""
        for bucket in buckets:
            self._waiting.pop(bucket, None)

    def give_up(self, buckets: Iterable[Bucket], seconds: float) -> None:
        """They wait no more, and never serve: recording one failed, which took so many seconds."""
        self._never.update(bucket for bucket in buckets if bucket in self._waiting)
        self.drop(self._never)
        self._last = self._clock(), seconds

    def in_order(self, order: Sequence[Bucket]) -> None:
        """Serving begins. Those that wait are recorded in this order where nobody wants another."""
        self._wanted = None
        self._waiting = dict.fromkeys(bucket for bucket in order if bucket in self._waiting)

    def serves(self, bucket: Bucket) -> bool:
        """Whether it may run; the first of a step that may not is wanted."""
        if bucket in self._waiting:
            self._wanted = self._wanted or bucket
            return False
        return bucket not in self._never

    def next(self) -> Bucket | None:
        """What to record where nobody waits for a step."""
        return next(iter(self._waiting), None)

    def turn(self, prompts: bool) -> Bucket | None:
        """Before each step: what to record now. `prompts`: whether a request of the step waits for its first token."""
        wanted, self._wanted = self._wanted, None
        self._prompts_in_a_row = self._prompts_in_a_row + 1 if prompts else 0
        if not self._waiting or 0 < self._prompts_in_a_row < PATIENCE:
            return None
        chosen, share = (wanted, WANTED) if wanted in self._waiting else (next(iter(self._waiting)), OTHERS)
        if not self.rested(share):
            return None
        self._prompts_in_a_row = 0
        return chosen

    def rested(self, share: float) -> bool:
        """Whether enough time went by since the last recording for this share of the time."""
        ended, seconds = self._last
        return self._clock() >= ended + seconds * (1 / share - 1)

    def done(self, bucket: Bucket, seconds: float) -> None:
        """It was recorded, in so many seconds, and serves from now on."""
        self.drop((bucket,))
        self.recorded += 1
        self.seconds, self.longest = self.seconds + seconds, max(self.longest, seconds)
        self._last = self._clock(), seconds


def halving(sizes: Sequence[int]) -> list[int]:
    """Sorted sizes without the first and the last, each between the widest gap that those before it leave."""
    found: list[int] = []
    gaps = [(0, len(sizes) - 1)]
    while gaps:
        low, high = gaps.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            found.append(sizes[middle])
            gaps += [(low, middle), (middle, high)]
    return found
