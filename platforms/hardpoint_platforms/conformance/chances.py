"""What a draw may come to: each token's probability by the contract's words, a test of counts against them, and the
token that the canonical random number names.

Written row by row in numpy, apart from the reference's kernels, so that the two check each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from hardpoint_platforms.batch import LogitBias, Penalties, SamplingInputs

Floats = npt.NDArray[np.float64]

#: Standard deviations of the normal quantile that a count may reach: about one run in a billion fails by chance.
SIGMAS = 6.0
#: Of the distance of u from a token's interval, as a share of all weight: single precision sums that differ in order.
BORDER = 2.0**-14
#: Expected counts below this are joined.
_FEWEST = 5.0
_WORD, _STEP = (1 << 64) - 1, 0x9E3779B97F4A7C15


def chances(logits: Floats, inputs: SamplingInputs, row: int) -> Floats:
    """float64 [V], summing to 1: the distribution that row `row` draws from. logits: float64 [V], finite."""
    x = adjusted(logits.copy(), inputs, row)
    temperature = float(inputs.temperature[row])
    if temperature <= 0.0:
        return _certain(int(np.argmax(x)), len(x))
    if not np.isfinite(x).any():
        return _certain(int(np.argmax(x)), len(x))
    weights = np.exp((x - x.max()) / temperature)
    weights[weights < float(inputs.min_p[row])] = 0.0
    order = np.lexsort((np.arange(len(weights)), -weights))
    keep = int(inputs.top_k[row])
    if 0 < keep < len(weights):
        weights[order[keep:]] = 0.0
    share = float(inputs.top_p[row])
    if share < 1.0:
        running = np.cumsum(weights[order])
        last = int(np.searchsorted(running, share * running[-1]))
        weights[order[last + 1 :]] = 0.0
    normal: Floats = weights / weights.sum()
    return normal


def uniform(seeds: list[int], positions: list[int]) -> Floats:
    """float64 in [0, 1): the canonical number of each (seed, position), in Python's integers."""
    numbers = zip(seeds, positions, strict=True)
    return np.array([(_mix(_mix(seed + _STEP) + (at + 1) * _STEP) >> 16) * 2.0**-48 for seed, at in numbers])


def _mix(x: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    x &= _WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _WORD
    return x ^ (x >> 31)


def strays(probabilities: Iterator[Floats], u: Floats, tokens: list[int]) -> tuple[int, list[tuple[int, int, Floats]]]:
    """How many draws are not the canonical token, and those among them that no rounding explains.

    probabilities: of each row; u: its canonical number; tokens: what was drawn. A stray is (row, canonical token, the
    drawn token's interval).
    """
    different, found = 0, []
    for row, (chance, number, token) in enumerate(zip(probabilities, u, tokens, strict=True)):
        until = np.cumsum(chance)
        low, high = until[token] - chance[token], until[token]
        if low <= number < high:
            continue
        different += 1
        if chance[token] == 0.0 or not low - BORDER <= number <= high + BORDER:
            right = int(np.searchsorted(until, number * until[-1], side="right"))
            found.append((row, min(right, len(chance) - 1), np.array([low, high])))
    return different, found


def adjusted(x: Floats, inputs: SamplingInputs, row: int) -> Floats:
    """Logits after mask, bias and penalties."""
    if inputs.allowed is not None:
        words = inputs.allowed[row].numpy().astype(np.int64) & 0xFFFFFFFF
        for token in range(len(x)):
            if not words[token // 32] >> (token % 32) & 1:
                x[token] = -math.inf
    if inputs.bias is not None:
        _bias(x, inputs.bias, row)
    if inputs.penalties is not None:
        _penalize(x, inputs.penalties, row)
    return x


def _bias(x: Floats, bias: LogitBias, row: int) -> None:
    entries = zip(bias.rows.tolist(), bias.tokens.tolist(), bias.values.tolist(), strict=True)
    for at, token, value in entries:
        if at == row:
            x[token] += value


def _penalize(x: Floats, penalties: Penalties, row: int) -> None:
    history = penalties.history[row].tolist()
    prompt = int(penalties.prompt_lengths[row])
    repetition = float(penalties.repetition[row])
    for token in {token for token in history if token < len(x)}:
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
        times = history[prompt:].count(token)
        x[token] -= float(penalties.frequency[row]) * times + float(penalties.presence[row]) * (times > 0)


def _certain(token: int, size: int) -> Floats:
    sure = np.zeros(size)
    sure[token] = 1.0
    return sure


def deviation(counts: npt.NDArray[np.int64], probabilities: Floats) -> float:
    """How unlikely counts are, in standard deviations of the normal distribution (Wilson and Hilferty 1931).

    Infinity where a token without probability was drawn.
    """
    if counts[probabilities == 0.0].any():
        return math.inf
    expected = probabilities * counts.sum()
    rare = expected < _FEWEST
    observed = np.append(counts[~rare], counts[rare].sum()).astype(np.float64)
    wanted = np.append(expected[~rare], expected[rare].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    if freedom < 1:
        return 0.0
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    part = 2.0 / (9.0 * freedom)
    return float(((statistic / freedom) ** (1.0 / 3.0) - (1.0 - part)) / math.sqrt(part))
