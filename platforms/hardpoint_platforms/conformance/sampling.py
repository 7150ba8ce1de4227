"""Group `sampling`: greedy is exact, draws follow their distribution, rows are independent, seeds carry over.

The draw is canonical: the generator's number for (seed, position), and the token in whose interval it lies. It is held
against float64, with a margin at the borders of intervals where kernels that sum in another order or precision may
choose the neighbour; few draws come near one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from hardpoint_platforms.batch import LogitBias, Penalties, SampleResult, SamplingInputs
from hardpoint_platforms.conformance.chances import SIGMAS, Floats, chances, deviation, strays, uniform
from hardpoint_platforms.conformance.checks import Check, Group, Measure, Wrong
from hardpoint_platforms.conformance.comparison import require_close, require_equal
from hardpoint_platforms.conformance.execution import execute
from hardpoint_platforms.conformance.ladder import level_of
from hardpoint_platforms.conformance.subject import Subject, oracle
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import OpInstance, Sample
from hardpoint_platforms.ops.samples import Source
from hardpoint_platforms.ops.sampling import SAMPLE, sampling_inputs
from hardpoint_platforms.reference.platform import ReferenceDevice
from hardpoint_platforms.trees import mapped

DRAWS = 3000
VOCAB = 24
#: Share of draws that may fall to the neighbour at a border. Of 24 tokens, 0.3% of draws come as near as `BORDER`.
_FEW = 0.01
#: Seeds and positions at the ends of their range.
_SEEDS = (0, 1, -1, (1 << 63) - 1, -(1 << 63), 1 << 32, 7)
_POSITIONS = (0, 1, 2, (1 << 31) - 1, 4095, 131071, 9)

#: name -> what the draws of one distribution are made with.
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature one": {"filters": False},
    "temperature low": {"temperature": 0.4, "filters": False},
    "temperature high": {"temperature": 3.0, "filters": False},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.2},
    "all filters": {"temperature": 1.7, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    "allowed tokens": {"allowed": True, "filters": False},
    "bias": {"bias": True},
    "penalties": {"penalties": True, "temperature": 0.9},
}


def checks(subject: Subject) -> Iterator[Check]:
    """Level 3 for `sample`, level 6 for `verify`."""
    for contract in ("sample", "verify"):
        for case in CONTRACTS[contract].samples(torch.float32):
            yield _check(contract, f"sample {case.instance.where}", partial(_sample_case, case), required=True)
    for name, settings in SETTINGS.items():
        yield _check("sample", f"distribution {name}", partial(_distribution, settings))
        yield _check("sample", f"draws are the canonical ones {name}", partial(_canonical, settings), required=True)
    for title, body in (
        ("draws are the canonical ones of any seed", _canonical_ends),
        ("draws are the canonical ones of many tokens", _canonical_wide),
        ("greedy takes the first of equals", _greedy_ties),
        ("a row alone draws what it draws in a batch", _independent),
        ("positions are independent", _positions),
        ("a broken row harms nobody", _broken_row),
        ("a row without choice", _no_choice),
    ):
        yield _check("sample", title, body)
    yield _check("verify", "accepted and rejected drafts keep the distribution", _verify_distribution)
    yield _check("verify", "without probabilities the tokens are those of sample", _verify_certain)


def _check(contract: str, name: str, body: Callable[[Subject, int], Measure], required: bool = False) -> Check:
    return Check("sampling", contract, name, level_of(contract), body, dtype="float32", required=required)


def instance() -> OpInstance:
    """The one instance that the engine asks for."""
    return SAMPLE.instance("conformance", torch.float32)


def draw(subject: Subject, logits: torch.Tensor, inputs: SamplingInputs) -> tuple[SampleResult, Any]:
    """The device's draws on the host, and its kernel."""
    provider = subject.claim(instance())
    outcome = execute(subject.device, provider, Sample(instance(), {}, lambda: (logits.clone(), inputs)))
    found = outcome.result
    if not isinstance(found, SampleResult):
        raise Wrong(f"returns {type(found).__name__}, not a SampleResult", subject_code=outcome.kernel)
    ids = found.token_ids
    if ids.dtype != torch.int64 or ids.shape != logits.shape[:1]:
        told = f"token_ids are {ids.dtype} {list(ids.shape)}, the contract says int64 [{len(logits)}]"
        raise Wrong(told, subject_code=outcome.kernel)
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < logits.shape[1]):
        raise Wrong("draws a token outside the vocabulary", subject_code=outcome.kernel)
    return found, outcome.kernel


def _sample_case(case: Sample, subject: Subject, seed: int) -> Measure:
    """The contract's samples: rows with one possible token exactly, others within what is possible."""
    op = case.instance.op
    provider = subject.claim(case.instance)
    found = execute(subject.device, provider, case)
    wanted = execute(ReferenceDevice(), oracle(op), case)
    if op == "verify":
        _judge_verified(case, found.result, wanted.result, found.kernel)
        return Measure(seconds=found.seconds, reference_seconds=wanted.seconds)
    logits, inputs = case.make()
    drawn, _ = draw(subject, logits, inputs)
    for row, token in enumerate(drawn.token_ids.tolist()):
        possible = chances(logits[row].double().numpy(), inputs, row)
        if possible[token] == 0.0:
            sure = f", only {int(possible.argmax())} is" if (possible > 0).sum() == 1 else ""
            raise Wrong(f"row {row} draws token {token}, which is not possible{sure}", subject_code=found.kernel)
    _require_canonical(_each(logits, inputs), inputs, drawn, found.kernel, few=1)
    if inputs.num_logprobs is not None:
        _judge_logprobs(logits, drawn, inputs.num_logprobs, found.kernel)
    return Measure(seconds=found.seconds, reference_seconds=wanted.seconds)


def _judge_logprobs(logits: torch.Tensor, drawn: SampleResult, count: int, kernel: Any) -> None:
    if drawn.logprobs is None:
        raise Wrong("log-probabilities were asked for and are not there", subject_code=kernel)
    score = CONTRACTS["logprobs"].instance("conformance", torch.float32)
    wanted = oracle("logprobs").build(score)(logits, drawn.token_ids, count)
    require_close(drawn.logprobs, wanted, SAMPLE.tolerance[torch.float32], kernel, "logprobs")


def _judge_verified(case: Sample, found: Any, wanted: Any, kernel: Any) -> None:
    logits, drafts, lengths, _, inputs = case.make()
    if bool((inputs.temperature == 0).all()):
        require_close(found, wanted, SAMPLE.tolerance[torch.float32], kernel)
        return
    depth = drafts.shape[1]
    if found.token_ids.shape != wanted.token_ids.shape or found.counts.shape != lengths.shape:
        raise Wrong("token_ids or counts have another shape than the contract's", subject_code=kernel)
    for row, (tokens, count) in enumerate(zip(found.token_ids.tolist(), found.counts.tolist(), strict=True)):
        if not 1 <= count <= int(lengths[row]) + 1:
            raise Wrong(f"row {row} has {count} tokens of a draft of {int(lengths[row])}", subject_code=kernel)
        if tokens[: count - 1] != drafts[row, : count - 1].tolist() or set(tokens[count:]) - {-1}:
            raise Wrong(f"row {row}: accepted tokens are not the draft's, or no -1 behind them", subject_code=kernel)
        place = row * (depth + 1) + count - 1
        flat = logits.flatten(0, 1)
        if chances(flat[place].double().numpy(), inputs, place)[tokens[count - 1]] == 0.0:
            raise Wrong(f"row {row} ends in token {tokens[count - 1]}, which is not possible", subject_code=kernel)


def settings_inputs(rows: int, settings: dict[str, Any], seed: int) -> SamplingInputs:
    """Inputs of `rows` draws from one distribution, each with a seed of its own."""
    given = dict(settings)
    source = Source(seed)
    if given.pop("allowed", False):
        word = int(source.integers(1, 1 << 24, 1)) | 5
        given["allowed"] = torch.full((rows, 1), word, dtype=torch.int32)
    if given.pop("bias", False):
        every = torch.arange(rows)
        given["bias"] = LogitBias(
            torch.cat((every, every)),
            torch.cat((torch.full((rows,), 2), torch.full((rows,), 5))),
            torch.cat((torch.full((rows,), 1.5), torch.full((rows,), float("-inf")))),
        )
    if given.pop("penalties", False):
        history = source.integers(0, VOCAB, 1, 10).expand(rows, 10).clone()
        history[:, 8:] = VOCAB
        given["penalties"] = Penalties(
            history,
            torch.full((rows,), 4),
            torch.full((rows,), 0.5),
            torch.full((rows,), 0.25),
            torch.full((rows,), 1.3),
        )
    seeds = source.integers(0, 1 << 40, rows)
    return dataclasses.replace(sampling_inputs(rows, **given), seeds=seeds, positions=torch.full((rows,), 11))


def _logits(seed: int) -> torch.Tensor:
    return Source(seed).normal(VOCAB, scale=1.6)


def _distribution(settings: dict[str, Any], subject: Subject, seed: int) -> Measure:
    row = _logits(seed)
    inputs = settings_inputs(DRAWS, settings, seed)
    drawn, kernel = draw(subject, row.expand(DRAWS, VOCAB).clone(), inputs)
    wanted = chances(row.double().numpy(), inputs, 0)
    return _require_fit(drawn.token_ids, wanted, kernel)


def _require_fit(tokens: torch.Tensor, wanted: Floats, kernel: Any) -> Measure:
    counts = torch.bincount(tokens, minlength=len(wanted)).numpy()
    off = deviation(counts, wanted)
    if off > SIGMAS:
        if off == float("inf"):
            token = int(np.flatnonzero((counts > 0) & (wanted == 0.0))[0])
            told = f"draws token {token}, which has no probability"
        else:
            token = int(np.abs(counts / counts.sum() - wanted).argmax())
            share = counts[token] / counts.sum()
            told = f"draws do not follow the distribution ({off:.0f} sigma): token {token} comes in {share:.1%} of "
            told += f"{counts.sum()} draws instead of {wanted[token]:.1%}"
        raise Wrong(told, subject_code=kernel)
    return Measure(f"{max(off, 0.0):.1f} sigma over {counts.sum()} draws")


def _greedy_ties(subject: Subject, seed: int) -> Measure:
    logits = Source(seed).normal(6, VOCAB)
    for row in range(6):
        places = [row, row + 7, row + 13]
        logits[row, places] = 9.0
    wanted = torch.arange(6)
    for options in ({"all_greedy": True}, {"all_greedy": False}):
        drawn, kernel = draw(subject, logits, sampling_inputs(6, temperature=0.0, **options))
        require_equal(drawn.token_ids, wanted, "greedy tokens among equals", kernel)
    return Measure()


def _independent(subject: Subject, seed: int) -> Measure:
    source = Source(seed)
    logits = source.normal(16, 40, scale=1.5)
    inputs = sampling_inputs(
        16, temperature=[0.0, 1.0, 0.7, 2.0] * 4, top_k=[0, 5, 0, 20] * 4, top_p=[1.0, 0.9, 0.8, 1.0] * 4,
        seeds=source.integers(0, 1 << 50, 16).tolist(), positions=source.integers(0, 9999, 16).tolist(),
    )  # fmt: skip
    together, kernel = draw(subject, logits, inputs)
    again, _ = draw(subject, logits, inputs)
    require_equal(again.token_ids, together.token_ids, "the same draws a second time", kernel)
    turned, _ = draw(subject, logits.flip(0), mapped(inputs, lambda x: x.flip(0)))
    require_equal(turned.token_ids.flip(0), together.token_ids, "draws of the rows in another order", kernel)
    for row in range(16):
        alone, _ = draw(subject, logits[row : row + 1], mapped(inputs, partial(_one_row, row)))
        if int(alone.token_ids[0]) != int(together.token_ids[row]):
            told = f"row {row} draws {int(alone.token_ids[0])} alone and {int(together.token_ids[row])} in a batch"
            raise Wrong(told, subject_code=kernel)
    return Measure()


def _one_row(row: int, x: torch.Tensor) -> torch.Tensor:
    return x[row : row + 1]


def _positions(subject: Subject, seed: int) -> Measure:
    """One seed, many positions: the text of one request. Neighbours must not depend on each other."""
    row = _logits(seed)
    inputs = sampling_inputs(DRAWS, seeds=seed % (1 << 40), positions=list(range(DRAWS)), filters=False)
    drawn, kernel = draw(subject, row.expand(DRAWS, VOCAB).clone(), inputs)
    wanted = chances(row.double().numpy(), inputs, 0)
    measure = _require_fit(drawn.token_ids, wanted, kernel)
    few = np.argsort(-wanted)[:3]
    follows = drawn.token_ids[1:][torch.isin(drawn.token_ids[:-1], torch.from_numpy(few.copy()))]
    _require_fit(follows, wanted, kernel)
    return measure


def _canonical(settings: dict[str, Any], subject: Subject, seed: int) -> Measure:
    row = _logits(seed)
    inputs = settings_inputs(DRAWS, settings, seed)
    drawn, kernel = draw(subject, row.expand(DRAWS, VOCAB).clone(), inputs)
    one = chances(row.double().numpy(), inputs, 0)
    return _require_canonical(iter([one] * DRAWS), inputs, drawn, kernel)


def _canonical_ends(subject: Subject, seed: int) -> Measure:
    """The generator's arithmetic wraps around in 64 bits, and positions are counted, not mixed up with seeds."""
    pairs = [(one, at) for one in _SEEDS for at in _POSITIONS]
    logits = Source(seed).normal(len(pairs), VOCAB, scale=0.3)
    inputs = sampling_inputs(
        len(pairs), seeds=[one for one, _ in pairs], positions=[at for _, at in pairs], filters=False
    )
    drawn, kernel = draw(subject, logits, inputs)
    return _require_canonical(_each(logits, inputs), inputs, drawn, kernel, few=1)


def _canonical_wide(subject: Subject, seed: int) -> Measure:
    """So many tokens that the order in which weights are summed shows."""
    source, rows = Source(seed), 16
    logits = source.normal(rows, 20011, scale=2.0)
    inputs = sampling_inputs(
        rows, temperature=[0.7, 1.0, 1.5, 1.0] * 4, top_k=[0, 0, 0, 900] * 4, top_p=[1.0, 1.0, 0.9, 1.0] * 4,
        seeds=source.integers(0, 1 << 62, rows).tolist(), positions=source.integers(0, 9999, rows).tolist(),
    )  # fmt: skip
    drawn, kernel = draw(subject, logits, inputs)
    return _require_canonical(_each(logits, inputs), inputs, drawn, kernel, few=rows)


def _each(logits: torch.Tensor, inputs: SamplingInputs) -> Iterator[Floats]:
    return (chances(row.double().numpy(), inputs, place) for place, row in enumerate(logits))


def _require_canonical(
    probabilities: Iterator[Floats], inputs: SamplingInputs, drawn: SampleResult, kernel: Any, few: int | None = None
) -> Measure:
    """Every draw lies where the canonical number says, but for rounding; at most `few` (1% if None) need that."""
    tokens, count = drawn.token_ids.tolist(), len(drawn.token_ids)
    seeds, positions = inputs.seeds.tolist(), inputs.positions.tolist()
    u = uniform(seeds, positions)
    different, strange = strays(probabilities, u, tokens)
    if strange:
        row, right, (low, high) = strange[0]
        raise Wrong(
            f"{len(strange)} of {count} draws are not the canonical ones, so a seed gives other texts here than on "
            f"other platforms: row {row} (seed {seeds[row]}, position {positions[row]}) draws token {tokens[row]}, "
            f"whose interval is {low:.6f} to {high:.6f}; the canonical number {u[row]:.6f} is token {right}'s",
            subject_code=kernel,
        )
    if different > (_FEW * count if few is None else few):
        raise Wrong(
            f"{different} of {count} draws are the neighbour of the canonical token: more than rounding at the borders "
            "of intervals explains",
            subject_code=kernel,
        )
    return Measure(f"{different} of {count} draws differ by rounding")


def _broken_row(subject: Subject, seed: int) -> Measure:
    logits = Source(seed).normal(5, 40)
    inputs = sampling_inputs(5, temperature=[1.0, 0.0, 1.0, 0.0, 1.0], num_logprobs=3, seeds=list(range(5)))
    sound, kernel = draw(subject, logits, inputs)
    for value in (float("nan"), float("inf")):
        broken = logits.clone()
        broken[2, 7] = value
        found, _ = draw(subject, broken, inputs)
        others = [0, 1, 3, 4]
        require_equal(found.token_ids[others], sound.token_ids[others], f"neighbours of a row with {value}", kernel)
        if found.finite is not None:
            wanted = torch.tensor([True, True, False, True, True])
            require_equal(found.finite, wanted, f"finite, with {value} in row 2", kernel)
    return Measure()


def _no_choice(subject: Subject, seed: int) -> Measure:
    """Hot, but with one token left: by top-k, by the mask, by top-p."""
    logits = Source(seed).normal(3, VOCAB)
    allowed = torch.full((3, 1), (1 << VOCAB) - 1, dtype=torch.int32)
    allowed[1] = 1 << 9
    inputs = sampling_inputs(3, temperature=50.0, top_k=[1, 0, 0], top_p=[1.0, 1.0, 1e-9], allowed=allowed)
    drawn, kernel = draw(subject, logits, inputs)
    wanted = torch.tensor([int(logits[0].argmax()), 9, int(logits[2].argmax())])
    require_equal(drawn.token_ids, wanted, "tokens of rows without a choice", kernel)
    return Measure()


def _verify(subject: Subject, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    asked = CONTRACTS["verify"].instance("conformance", torch.float32)
    provider = subject.claim(asked)
    outcome = execute(subject.device, provider, Sample(asked, {}, lambda: arguments))
    return outcome.result, outcome.kernel


def _verify_distribution(subject: Subject, seed: int) -> Measure:
    """Drafts drawn from another distribution: the first token must still follow the target's."""
    target, source = _logits(seed), Source(seed + 1)
    draft = source.normal(VOCAB, scale=1.6).softmax(-1)
    drafts = torch.multinomial(draft, DRAWS, replacement=True, generator=torch.Generator().manual_seed(seed))
    inputs = sampling_inputs(2 * DRAWS, seeds=source.integers(0, 1 << 40, 2 * DRAWS).tolist(), filters=False)
    arguments = (
        target.expand(DRAWS, 2, VOCAB).clone(),
        drafts[:, None],
        torch.ones(DRAWS, dtype=torch.int64),
        draft.expand(DRAWS, 1, VOCAB).clone(),
        inputs,
    )
    found, kernel = _verify(subject, arguments)
    return _require_fit(found.token_ids[:, 0], chances(target.double().numpy(), inputs, 0), kernel)


def _verify_certain(subject: Subject, seed: int) -> Measure:
    source = Source(seed)
    rows, depth = 12, 3
    logits = source.normal(rows, depth + 1, VOCAB, scale=2.0)
    inputs = sampling_inputs(
        rows * (depth + 1), seeds=source.integers(0, 1 << 40, rows * (depth + 1)).tolist(), filters=False
    )
    own, _ = draw(subject, logits.flatten(0, 1), inputs)
    own_tokens = own.token_ids.unflatten(0, (rows, depth + 1))
    drafts = own_tokens[:, :depth].clone()
    for row in range(0, rows, 2):
        drafts[row, row % depth] = (drafts[row, row % depth] + 1) % VOCAB
    found, kernel = _verify(subject, (logits, drafts, torch.full((rows,), depth), None, inputs))
    for row, (tokens, count) in enumerate(zip(found.token_ids.tolist(), found.counts.tolist(), strict=True)):
        right = row % depth + 1 if row % 2 == 0 else depth + 1
        if count != right or tokens[:count] != own_tokens[row, :count].tolist():
            raise Wrong(f"row {row} gives {tokens}, sample would draw {own_tokens[row].tolist()}", subject_code=kernel)
    return Measure()


GROUP = Group("sampling", "sampling", checks, beside=True)
