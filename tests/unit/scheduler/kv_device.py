"""A device that keeps, for every slot of every page, which prefix ends there, and checks each plan against it.

The content of a slot is a rolling hash over all tokens up to it, so that a wrong token, a wrong place, or the right
token after a wrong prefix is seen at once. A drawn token is a function of the whole prefix and the request's seed:
a request must come to the same tokens alone and in any crowd, preempted or not.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from hardpoint.request.sampling import SamplingParams
from hardpoint.scheduler.plan import RowLogprobs, StepPlan, StepResult
from hardpoint.scheduler.settings import SchedulerSettings


def root(salt: str) -> int:
    """The hash before the first token."""
    return zlib.crc32(salt.encode())


def roll(digest: int, token: int) -> int:
    """The hash after one more token."""
    return hash((digest, token))


def draw(digest: int, seed: int, vocab: int) -> int:
    """The token that follows a prefix."""
    return hash((digest, seed, 1)) % vocab


def solo(prompt: Sequence[int], params: SamplingParams, salt: str, vocab: int, most: int) -> tuple[list[int], str]:
    """What a request comes to alone: tokens and finish reason. most: output tokens it may have."""
    digest = root(salt)
    for token in prompt:
        digest = roll(digest, int(token))
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(params.eos_token_ids))
    output: list[int] = []
    while len(output) < most:
        output.append(draw(digest, params.seed or 0, vocab))
        if output[-1] in stops and len(output) > params.min_tokens:
            return output, "stop"
        digest = roll(digest, output[-1])
    return output, "length"


class _Row:
    def __init__(self, tokens: Sequence[int], salt: str, prompt_length: int, params: SamplingParams) -> None:
        self.tokens: list[int] = []
        self.digests: list[int] = []
        self.salt, self.prompt_length, self.params = salt, prompt_length, params
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> None:
        self.digests.append(roll(self.digests[-1] if self.digests else root(self.salt), token))
        self.tokens.append(token)


class KvDevice:
    """Runs plans. salts: by request id; poisoned: ids whose values are not finite from the first draw on."""

    def __init__(
        self,
        settings: SchedulerSettings,
        windows: tuple[int | None, ...],
        page_tokens: int,
        num_pages: int,
        *,
        vocab: int = 7,
        salts: Mapping[str, str] | None = None,
        poisoned: frozenset[str] = frozenset(),
    ) -> None:
        self.settings, self.windows, self.page_tokens, self.vocab = settings, windows, page_tokens, vocab
        self.slots = np.zeros((num_pages, page_tokens), np.int64)
        self.rows: dict[int, _Row] = {}
        self.names: dict[int, str] = {}
        self.salts, self.poisoned = salts or {}, poisoned
        self.last_step = 0

    def run(self, plan: StepPlan) -> StepResult:
        """Check a plan, write its keys, read all that its queries see, draw."""
        assert plan.step == self.last_step + 1
        self.last_step = plan.step
        for row in plan.released:
            self.names.pop(row)
            del self.rows[row]
        for new in plan.new:
            assert new.row not in self.rows, "a row was given away before it was released"
            assert new.params.seed is not None
            assert 0 <= new.row < self.settings.max_num_seqs
            salt = self.salts.get(new.request_id, "")
            self.rows[new.row] = _Row(new.tokens.tolist(), salt, new.prompt_length, new.params)
            self.names[new.row] = new.request_id
        self._check_limits(plan)
        work = list(
            zip(
                plan.rows.tolist(),
                plan.query_lengths.tolist(),
                plan.computed.tolist(),
                plan.samples.tolist(),
                strict=True,
            )
        )
        for index, (row, query, computed, samples) in enumerate(work):
            self._write(plan, index, row, computed, computed + query, samples)
        tokens, logprobs, scored, bad = [], {}, {}, []
        for index, (row, query, computed, samples) in enumerate(work):
            sound = not (samples and self.names[row] in self.poisoned)
            if sound:
                self._read(plan, index, row, computed, computed + query)
            else:
                bad.append(index)
            tokens.append(self._sample(index, row, computed + query, samples, logprobs))
            self._score(index, row, computed, computed + query, scored)
        return StepResult(plan.step, np.array(tokens, np.int64), logprobs, scored, tuple(bad))

    def _check_limits(self, plan: StepPlan) -> None:
        settings, limits = self.settings, self.settings.limits
        query = plan.query_lengths
        many = int((query > 1).sum())
        assert len(plan.rows) == len(set(plan.rows.tolist())) > 0
        assert (query > 0).all()
        assert plan.num_tokens <= settings.budget
        assert len(plan.rows) <= settings.max_rows
        assert (query[: len(query) - many] == 1).all(), "decodes first"
        assert limits.mixed or many in (0, len(query)), "mixed step"
        assert many <= settings.prefill_slots
        for row, tokens, computed in zip(plan.rows.tolist(), query.tolist(), plan.computed.tolist(), strict=True):
            known = len(self.rows[row].tokens)
            if computed + tokens < known:
                assert tokens % limits.prefill_chunk_multiple == 0
                assert settings.chunked_prefill or known > settings.budget, "a prompt was cut"

    def _write(self, plan: StepPlan, index: int, row: int, start: int, end: int, samples: bool) -> None:
        state = self.rows[row]
        assert end <= len(state.tokens), "computes a token that does not exist"
        positions = np.arange(start, end)
        value = np.array(state.digests[start:end], np.int64)
        if samples and self.names[row] in self.poisoned:
            value = value ^ 0x5555
        for group, table in enumerate(plan.page_tables):
            pages = table[index, positions // self.page_tokens]
            assert pages.all(), "writes to page 0"
            self.slots[pages, positions % self.page_tokens] = value ^ group

    def _read(self, plan: StepPlan, index: int, row: int, start: int, end: int) -> None:
        expected = np.array(self.rows[row].digests[:end], np.int64)
        for group, (table, window) in enumerate(zip(plan.page_tables, self.windows, strict=True)):
            first = 0 if window is None else max(0, start - window + 1)
            positions = np.arange(first, end)
            pages = table[index, positions // self.page_tokens]
            found = self.slots[pages, positions % self.page_tokens]
            wrong = np.flatnonzero(found != (expected[first:] ^ group))
            assert not len(wrong), f"{self.names[row]}: group {group}, position {first + wrong[0]} holds another prefix"

    def _sample(self, index: int, row: int, end: int, samples: bool, logprobs: dict[int, RowLogprobs]) -> int:
        if not samples:
            return -1
        state = self.rows[row]
        assert end == len(state.tokens), "draws before it has caught up"
        token = draw(state.digests[-1], state.params.seed or 0, self.vocab)
        state.push(token)
        if state.params.logprobs is not None:
            logprobs[index] = mark(np.array([token]), np.array([end]))
        return token

    def _score(self, index: int, row: int, start: int, end: int, scored: dict[int, RowLogprobs]) -> None:
        state = self.rows[row]
        if state.params.prompt_logprobs is not None and start < state.prompt_length:
            positions = np.arange(start + 1, min(end, state.prompt_length - 1) + 1)
            scored[index] = mark(np.array(state.tokens)[positions], positions)


def mark(tokens: np.ndarray, positions: np.ndarray) -> RowLogprobs:
    """Log-probabilities that can be recognised: minus the position, and a rival that is the next token id."""
    ids = np.stack([tokens, tokens + 1, tokens + 2], axis=1).astype(np.int64).reshape(-1, 3)
    values = np.repeat(-positions.astype(np.float32)[:, None], 3, axis=1).reshape(-1, 3)
    return RowLogprobs(ids, values, positions.astype(np.int64))
