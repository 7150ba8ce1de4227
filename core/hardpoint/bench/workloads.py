"""Seeded workloads of token ids, which every engine that is compared gets alike. Greedy, ends of text ignored.

a      1 request, 128 tokens in, 256 out
b      256 requests, 128 in, 128 out
c      512 requests of unlike lengths, log-normal, about 220 in and 180 out
d      32 prompts of 2,048 tokens, 1 out
sN     N requests, 128 in, 128 out
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hardpoint.errors import ConfigError

#: The first is what people with one question have, the others what servers have.
USUAL = ("a", "b", "c", "d", "s8", "s32", "s64", "s128", "s512")


@dataclass(frozen=True)
class Workload:
    """Prompts, and how many tokens each gets."""

    prompts: tuple[list[int], ...]
    outputs: tuple[int, ...]

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        """Of all requests."""
        return sum(self.outputs)


def workload(name: str, vocabulary: int, seed: int = 0, longest: int = 1 << 30) -> Workload:
    """By its name above. Lengths are cut so that prompt and output together stay within `longest`.

    Raises ConfigError for an unknown name.
    """
    random = np.random.default_rng([seed, sum(map(ord, name))])

    def lengths(count: int, mean: float, sigma: float, most: int) -> list[int]:
        drawn = random.lognormal(math.log(mean) - sigma * sigma / 2, sigma, count)
        return [int(length) for length in np.clip(np.rint(drawn), 4, most)]

    if name == "a":
        plan = [(128, 256)]
    elif name == "b":
        plan = [(128, 128)] * 256
    elif name == "c":
        plan = list(zip(lengths(512, 220, 0.9, 2048), lengths(512, 180, 0.7, 1024), strict=True))
    elif name == "d":
        plan = [(2048, 1)] * 32
    elif name[:1] == "s" and name[1:].isdecimal() and 0 < int(name[1:]) < 1 << 16:
        plan = [(128, 128)] * int(name[1:])
    else:
        raise ConfigError(f"there is no workload {name!r}", hint="a, b, c, d, or sN with N requests, such as s64")
    plan = [(min(into, longest // 2), min(out, longest - min(into, longest // 2))) for into, out in plan]
    prompts = tuple(random.integers(0, vocabulary, into).tolist() for into, _ in plan)
    return Workload(prompts, tuple(out for _, out in plan))
