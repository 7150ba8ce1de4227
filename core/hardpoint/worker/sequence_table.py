"""Rows of running sequences on the worker: their tokens, on the device, and how each is sampled, on the host.

The token table stays on the device: a step reads its input tokens from it and writes what it drew back into it, so the
next step can start before the host has seen a single id.

    row r:  | prompt ........ | generated .... | next |   unused          | dump |
            0                 prompt_length           known                 max_len
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from hardpoint.request.sampling import SamplingParams
from hardpoint.scheduler.plan import NewSequence
from hardpoint_platforms.device import Device

#: The range of a logit bias; what lies outside is clamped.
MAX_BIAS = 100.0
#: Temperatures and repetition penalties beyond this, or below its inverse, act as this: fp32 would overflow.
MAX_FACTOR = 1e15


class SequenceTable:
    """Owns the rows. `enter` and `release` follow the scheduler's plans."""

    def __init__(self, device: Device, rows: int, max_len: int, vocab_size: int) -> None:
        self._device = device
        self.vocab_size = vocab_size
        self.max_len = max_len
        #: int32 [rows, max_len + 1]; the last column takes draws that nobody wants.
        self.tokens = device.zeros((rows, max_len + 1), torch.int32)
        self.params: list[SamplingParams | None] = [None] * rows
        self.prompt_lengths = np.zeros(rows, np.int64)
        self.temperature = np.zeros(rows, np.float32)
        self.top_k = np.zeros(rows, np.int64)
        self.top_p = np.ones(rows, np.float32)
        self.min_p = np.zeros(rows, np.float32)
        self.seeds = np.zeros(rows, np.int64)
        self.presence = np.zeros(rows, np.float32)
        self.frequency = np.zeros(rows, np.float32)
        self.repetition = np.ones(rows, np.float32)
        self.logprobs = np.full(rows, -1, np.int64)
        self.prompt_logprobs = np.full(rows, -1, np.int64)
        self.has_penalties = np.zeros(rows, np.bool_)
        self.has_filters = np.zeros(rows, np.bool_)
        #: Rows whose logits are biased, and the entries that hold for their whole life: (token ids, values).
        self.bias: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]] = {}
        self.min_tokens: dict[int, tuple[int, npt.NDArray[np.int64]]] = {}
        self.bad_words: dict[int, tuple[tuple[int, ...], ...]] = {}
        self.allowed: dict[int, npt.NDArray[np.int32]] = {}
        #: Changes with every enter and release, so that batches can keep what they built for equal rows.
        self.version = 0

    def enter(self, sequence: NewSequence) -> None:
        """Put a sequence into its row."""
        row, params = sequence.row, sequence.params
        length = len(sequence.tokens)
        self.tokens[row, :length] = self._device.to_device(torch.from_numpy(sequence.tokens))
        self.params[row] = params
        self.prompt_lengths[row] = sequence.prompt_length
        self.temperature[row] = 0.0 if params.greedy else min(params.temperature, MAX_FACTOR)
        self.top_k[row] = max(params.top_k, 0)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seeds[row] = params.seed or 0
        self.presence[row] = params.presence_penalty
        self.frequency[row] = params.frequency_penalty
        self.repetition[row] = min(max(params.repetition_penalty, 1 / MAX_FACTOR), MAX_FACTOR)
        self.logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self.prompt_logprobs[row] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        self.has_penalties[row] = params.has_penalties
        self.has_filters[row] = not params.greedy and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)
        self._enter_constraints(row, params)
        self.version += 1

    def release(self, row: int) -> None:
        """Empty a row."""
        self.params[row] = None
        for entries in (self.bias, self.min_tokens, self.bad_words, self.allowed):
            entries.pop(row, None)
        self.version += 1

    def _enter_constraints(self, row: int, params: SamplingParams) -> None:
        if params.logit_bias:
            ids = np.fromiter(params.logit_bias.keys(), np.int64)
            values = np.clip(np.fromiter(params.logit_bias.values(), np.float64), -MAX_BIAS, MAX_BIAS)
            self.bias[row] = (ids, values.astype(np.float32))
        if params.min_tokens > 0:
            ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(params.eos_token_ids))
            drawable = sorted(end for end in ends if end < self.vocab_size)
            if drawable:
                self.min_tokens[row] = (params.min_tokens, np.array(drawable, np.int64))
        # tokenizers may have tokens that the model has no row for: these are never drawn
        words = tuple(word for word in params.bad_words_ids if max(word) < self.vocab_size)
        if words:
            self.bad_words[row] = words
        if params.allowed_token_ids is not None:
            self.allowed[row] = bitmask(params.allowed_token_ids, self.vocab_size)


def bitmask(token_ids: tuple[int, ...], vocab_size: int) -> npt.NDArray[np.int32]:
    """int32 [ceil(vocab_size / 32)]: bit b of word w set where token 32 * w + b is in `token_ids`."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
