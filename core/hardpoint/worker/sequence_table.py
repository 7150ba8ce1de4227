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
from hardpoint_platforms.capabilities import ExecutionMode
from hardpoint_platforms.device import Device

#: The range of a logit bias; what lies outside is clamped.
MAX_BIAS = 100.0
#: Temperatures and repetition penalties beyond this, or below its inverse, act as this: fp32 would overflow.
MAX_FACTOR = 1e15
#: Tokens of the smallest size that sequences are padded to where shapes are fixed.
_SMALLEST = 64


class SequenceTable:
    """Owns the rows. `enter` and `release` follow the scheduler's plans."""

    def __init__(self, device: Device, rows: int, max_len: int, vocab_size: int) -> None:
        self._device = device
        self.vocab_size = vocab_size
        self.max_len = max_len
        #: int32 [rows, max_len + 1]; the last column takes draws that nobody wants. Routines replace it.
        self.tokens = device.zeros((rows, max_len + 1), torch.int32)
        #: The same memory where the host may use it. In each of its ops torch lets go of the interpreter, which the
        #: scheduler's thread then takes: of one client's step on a processor that was half a millisecond.
        self._shared = self.tokens.numpy() if device.capabilities().host_tensors else None
        #: Whether what runs on the device has fixed shapes: what varies is padded.
        self.static = device.capabilities().mode is ExecutionMode.COMPILE
        self._enter_row = device.routine(_enter_row, replaces=(0,))
        self._read = device.routine(_read)
        self._store = device.routine(_store, replaces=(0,))
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
        self._enter_tokens(row, sequence.tokens)
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

    def read(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Tokens int64 at these places, int64 of one shape on the device."""
        if self._shared is not None:
            return torch.from_numpy(self._shared[rows.numpy(), positions.numpy()].astype(np.int64))
        return self._read(self.tokens, rows, positions)  # type: ignore[no-any-return]

    def store(self, places: tuple[torch.Tensor, torch.Tensor], token_ids: torch.Tensor) -> None:
        """Write int64 [R] drawn tokens to (rows, positions), int64 [R] each on the device."""
        if self._shared is not None:
            rows, positions = places
            self._shared[rows.numpy(), positions.numpy()] = token_ids.numpy()
            return
        self.tokens = self._store(self.tokens, *places, token_ids)

    def rehearse(self) -> None:
        """Enter an empty row in every size that a sequence may be padded to: what compiles does so now."""
        size = _SMALLEST if self.static else self.max_len + 1
        while size < self.max_len + 1:
            self._enter_tokens(0, np.zeros(size, np.int32))
            size *= 2
        self._enter_tokens(0, np.zeros(self.max_len + 1, np.int32))

    def _enter_tokens(self, row: int, tokens: npt.NDArray[np.int32]) -> None:
        if self.static:
            size = _SMALLEST
            while size < len(tokens):
                size *= 2
            padded = np.zeros(min(size, self.max_len + 1), np.int32)
            padded[: len(tokens)] = tokens
            tokens = padded
        there = self._device.upload([torch.tensor([row]), torch.from_numpy(tokens)])
        self.tokens = self._enter_row(self.tokens, *there)

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


def _enter_row(tokens: torch.Tensor, row: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The table with `values` [n] at the beginning of `row` [1]."""
    at = torch.arange(values.shape[0], device=values.device)
    return tokens.index_put_((row.expand(values.shape[0]), at), values)


def _read(tokens: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return tokens[rows, positions].long()


def _store(tokens: torch.Tensor, rows: torch.Tensor, at: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    return tokens.index_put_((rows, at), token_ids.to(torch.int32))


def bitmask(token_ids: tuple[int, ...], vocab_size: int) -> npt.NDArray[np.int32]:
    """int32 [ceil(vocab_size / 32)]: bit b of word w set where token 32 * w + b is in `token_ids`."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
