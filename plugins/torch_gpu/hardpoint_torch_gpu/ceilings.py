"""What the GPU reaches in the simplest loops: streaming reads, and large matrix products of each dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hardpoint_platforms.ceilings import Ceilings

_BYTES, _SIZE, _ROUNDS = 1 << 30, 8192, 5


def measure(device: torch.device) -> Ceilings:
    """In a few tenths of a second."""
    source = torch.zeros(_BYTES // 8, dtype=torch.int64, device=device)
    read = _seconds(source.sum)
    rates = {}
    for dtype in (torch.bfloat16, torch.float16):
        a, b = (torch.randn(_SIZE, _SIZE, dtype=torch.float32, device=device).to(dtype) for _ in range(2))
        rates[str(dtype).removeprefix("torch.")] = _SIZE**3 / _seconds(lambda a=a, b=b: a @ b)  # type: ignore[misc]
    return Ceilings(_BYTES / read, rates)


def _seconds(work: Callable[[], object]) -> float:
    """The shortest of a few runs."""
    work()
    times: list[float] = []
    for _ in range(_ROUNDS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return min(times)
