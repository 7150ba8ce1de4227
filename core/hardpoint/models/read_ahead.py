"""Reading weights on other threads, a little ahead of whoever packs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

from hardpoint.models.pieces import Pieces
from hardpoint_platforms.ops.contract import Weight

Load = Callable[[], Weight | Pieces]

#: Numbers that wait for their packing at most, beside the weight that is asked for.
_AHEAD = 1 << 25
_READERS = 2


class ReadAhead:
    """Calls loads in the given order, each once; a context, which waits for its threads.

    Reading is mostly numpy's rearranging of codes and the file's page faults, during which other threads run.
    """

    def __init__(self, loads: Iterable[tuple[Load, int]], *, join: bool) -> None:
        """`loads`: what is asked for later, in about that order, with the numbers in each.

        join: whether pieces are joined here, too; else by whoever moves them.
        """
        self._coming = deque(dict(loads).items())
        self._join = join
        self._read: dict[Load, tuple[Future[Weight | Pieces], int]] = {}
        self._waiting = 0
        # One torch thread each: waking others takes longer than the short passes over most weights.
        self._pool = ThreadPoolExecutor(_READERS, "hardpoint-read", torch.set_num_threads, (1,))

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def __call__(self, load: Load) -> Weight | Pieces:
        """The weight, which is then forgotten here. Raises what the load raises; KeyError if it was not announced."""
        while self._coming and (self._waiting < _AHEAD or load not in self._read):
            other, elements = self._coming.popleft()
            self._read[other] = (self._pool.submit(self._get, other), elements)
            self._waiting += elements
        future, elements = self._read.pop(load)
        self._waiting -= elements
        return future.result()

    def _get(self, load: Load) -> Weight | Pieces:
        weight = load()
        return weight.join() if self._join and isinstance(weight, Pieces) else weight
