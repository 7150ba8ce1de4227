"""Group `programs`: a built program gives what the step gives, for every bucket, whatever the pages and the batch.

Programs are built, prepared and sealed as the core does it, and get only steps that their bucket and the device's
limits allow.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hardpoint_platforms.capabilities import BatchLimits
from hardpoint_platforms.conformance.checks import Check, Group, Measure, Refused, Wrong
from hardpoint_platforms.conformance.comparison import require_close, require_equal
from hardpoint_platforms.conformance.contracts import short
from hardpoint_platforms.conformance.stage import MAX_REQUESTS, MAX_TOKENS, PAGES, Stage, Step, stage
from hardpoint_platforms.conformance.state import require_pages, tree_of
from hardpoint_platforms.conformance.subject import Subject
from hardpoint_platforms.ops.samples import SUMS
from hardpoint_platforms.program import Bucket, Program, SamplingShape, StepInputs, StepOutputs
from hardpoint_platforms.state_cache import CanonicalPages
from hardpoint_platforms.trees import mapped

#: Prefill, mixed, chunks, decode, one alone, all.
STEPS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((0, 5),),
    ((0, 1), (1, 7)),
    ((0, 1), (1, 1), (2, 19)),
    ((0, 1), (1, 1), (2, 1)),
    ((2, 1),),
    ((1, 1), (3, 17)),
    ((3, 1), (2, 1), (1, 1), (0, 1)),
)
OUTLIVED: tuple[tuple[tuple[int, int], ...], ...] = (
    ((0, 5),),
    ((0, 1), (1, 4)),
    ((1, 1), (0, 1)),
    ((0, 1), (1, 1)),
)
#: Calls of `ProgramBuilder.catch_up` after which what was put off has to be done.
PIECES = 1000


def checks(subject: Subject) -> Iterator[Check]:
    """Level 3."""
    device = subject.device
    dtype = device.capabilities().compute_dtypes[0]
    buckets = device.programs().buckets(MAX_TOKENS, MAX_REQUESTS) or (Bucket(0, 0),)
    sizes: set[tuple[int, int, int]] = set()
    drawing: set[tuple[int, int, int]] = set()
    for bucket in buckets:
        size = (bucket.tokens, bucket.requests, bucket.query)
        bodies = {"replay equals eager": _replay}
        if size not in sizes:  # nothing here depends on how the step samples
            sizes.add(size)
            bodies["page tables change between replays"] = _pages_change
            bodies["preparing writes into page 0 alone"] = _prepared
        if size not in drawing and bucket.sampling is not SamplingShape.GREEDY:
            drawing.add(size)
            bodies["seeds are live"] = _seeds
        for name, body in bodies.items():
            title = f"{size_of(bucket)} {name}"
            yield Check("programs", "program", title, 3, partial(body, bucket), dtype=short(dtype))
    limits = device.capabilities().limits
    most = max(buckets, key=lambda bucket: sum(fits(bucket, limits, step) for step in OUTLIVED))
    yield Check("programs", "program", "results outlive the next step", 3, partial(_outlive, most))
    yield Check("programs", "program", "fingerprint and saving", 3, partial(_saved, buckets[0]))


def size_of(bucket: Bucket) -> str:
    """What tells a bucket from others, for people."""
    size = "any size" if not bucket.tokens else f"{bucket.tokens} tokens {bucket.requests} requests"
    query = f" of {bucket.query}" if bucket.query else ""
    return size + query + ("" if bucket.sampling is SamplingShape.ANY else f" {bucket.sampling.name.lower()}")


def fits(bucket: Bucket, limits: BatchLimits, step: Step) -> bool:
    """Whether a step is one that the core may give to a program of this bucket."""
    new = [count for _, count in step]
    several = sum(count > 1 for count in new)
    mixed = 0 < several < len(new)
    allowed = several <= (limits.max_prefill_requests or several) and (limits.mixed or not mixed)
    return allowed and bucket.fits(sum(new), len(new), max(new), bucket.sampling)


def build(one: Stage, bucket: Bucket) -> Program:
    """The program of the decoder's step, made ready and sealed. Raises Wrong where build() gives something else."""
    builder = one.device.programs()
    program = builder.build(one.decoder.step, bucket)
    if not isinstance(program, Program):
        raise Wrong(f"build() returns {type(program).__name__}, not a Program", subject_code=type(builder).build)
    with torch.inference_mode():
        program.begin(one.idle(bucket), one.state, one.decoder.weights)
        state: object = program.prepare(one.idle(bucket), one.state, one.decoder.weights)
    if state is None:
        raise Wrong("prepare() returns None, not the new state", subject_code=type(program).prepare)
    one.state = state
    builder.seal()
    for _ in range(PIECES):
        if not builder.catch_up():
            return program
    raise Wrong(f"{PIECES} calls of catch_up() leave something to do", subject_code=type(builder).catch_up)


def run(program: Program, one: Stage, inputs: StepInputs) -> StepOutputs:
    """Run a step and keep the new state."""
    with torch.inference_mode():
        outputs, one.state = program.run(inputs, one.state, one.decoder.weights)
    if not isinstance(outputs, StepOutputs):
        raise Wrong(f"run() returns {type(outputs).__name__}, not StepOutputs", subject_code=type(program).run)
    return outputs


def eager(one: Stage, inputs: StepInputs) -> StepOutputs:
    """The step function itself."""
    with torch.inference_mode():
        outputs, one.state = one.decoder.step(inputs, one.state, one.decoder.weights)
    return outputs


def _same(one: Stage, ours: StepOutputs, theirs: StepOutputs, step: Step, what: str, code: object) -> None:
    """Real rows: tokens and finite alike, log-probabilities and hidden states within the tolerance of sums."""
    host, rows, tokens = one.device.to_host, len(step), sum(count for _, count in step)
    a, b = (mapped((o.sample.token_ids, o.finite), lambda x: host(x)[:rows]) for o in (ours, theirs))
    tolerance = SUMS[one.device.capabilities().compute_dtypes[0]]
    if theirs.sample.logprobs is not None:
        if ours.sample.logprobs is None:
            raise Wrong(f"{what}: log-probabilities are missing", subject_code=code)
        top, wanted = host(ours.sample.logprobs.top)[:rows], host(theirs.sample.logprobs.top)[:rows]
        require_close(top, wanted, tolerance, code, f"{what}: top log-probabilities")
    require_equal(a[0], b[0], f"{what}: tokens", code)
    require_equal(a[1], b[1], f"{what}: finite", code)
    if theirs.hidden is not None:
        if ours.hidden is None:
            raise Wrong(f"{what}: hidden states are missing", subject_code=code)
        require_close(
            host(ours.hidden)[:tokens], host(theirs.hidden)[:tokens], tolerance, code, f"{what}: hidden states"
        )


def _compare(bucket: Bucket, subject: Subject, seed: int, steps: Sequence[Any], **sampling: Any) -> Measure:
    ours, theirs = stage(subject, seed), stage(subject, seed)
    program, ran, limits = build(ours, bucket), 0, subject.device.capabilities().limits
    for number, step in enumerate(steps):
        if not fits(bucket, limits, step):
            continue
        options = {name: value(number) if callable(value) else value for name, value in sampling.items()}
        found = run(program, ours, ours.inputs(step, bucket, **options))
        wanted = eager(theirs, theirs.inputs(step, bucket, **options))
        _same(ours, found, wanted, step, f"step {number} of {step}", type(program).run)
        ran += 1
    if not ran:
        raise Refused("no step of the test fits this bucket")
    return Measure(program.describe())


def _replay(bucket: Bucket, subject: Subject, seed: int) -> Measure:
    return _compare(bucket, subject, seed, STEPS)


def _pages_change(bucket: Bucket, subject: Subject, seed: int) -> Measure:
    """The same shapes again and again over other pages: each request alone, then again, in another order."""
    one_each = [((request, 1),) for request in (0, 1, 2, 3)]
    return _compare(bucket, subject, seed, [*one_each, *reversed(one_each), *one_each * 3])


def _seeds(bucket: Bucket, subject: Subject, seed: int) -> Measure:
    options = {"temperature": 1.2, "all_greedy": False, "seeds": lambda number: seed % 1000 + number // 3}
    return _compare(bucket, subject, seed, [((0, 1),)] * 8, **options)


def _prepared(bucket: Bucket, subject: Subject, seed: int) -> Measure:
    """The core may prepare a program while pages are in use: page 0 is all that it may change."""
    one, cache = stage(subject, seed), subject.device.state_cache()
    tree, ids = tree_of(one.layout, PAGES, seed), tuple(range(PAGES))
    one.state = cache.import_pages(one.state, ids, CanonicalPages(one.layout, ids, tree))
    build(one, bucket)
    others = tuple(tuple(part[1:] for part in layer) for layer in tree)
    require_pages(cache, one.state, one.layout, list(ids[1:]), others, "pages after prepare()")
    return Measure()


def _outlive(bucket: Bucket, subject: Subject, seed: int) -> Measure:
    """The engine launches the next step before it reads the last one's results."""
    one = stage(subject, seed)
    program, host = build(one, bucket), one.device.to_host
    kept: list[tuple[StepOutputs, torch.Tensor]] = []
    for step in OUTLIVED:
        if not fits(bucket, one.device.capabilities().limits, step):
            continue
        outputs = run(program, one, one.inputs(step, bucket))
        one.device.synchronize()
        kept.append((outputs, host(outputs.sample.token_ids).clone()))
    for number, (outputs, tokens) in enumerate(kept):
        code = type(program).run
        require_equal(host(outputs.sample.token_ids), tokens, f"tokens of step {number}, read later", code)
    return Measure()


def _saved(bucket: Bucket, subject: Subject, seed: int) -> Measure:
    one, builder = stage(subject, seed), subject.device.programs()
    print_one, print_two = builder.fingerprint(), subject.device.programs().fingerprint()
    if not isinstance(print_one, str) or print_one != print_two:
        raise Wrong("fingerprint() differs from call to call", subject_code=type(builder).fingerprint)
    program = build(one, bucket)
    limits = subject.device.capabilities().limits
    step = next((step for step in STEPS if fits(bucket, limits, step)), ((0, 1),))
    run(program, one, one.inputs(step, bucket))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program"
        if not builder.save(program, path):
            return Measure("programs are not saved")
        loaded = builder.load(path, bucket)
    if loaded is None:
        raise Wrong("save() says True, load() gives None", subject_code=type(builder).load)
    ours, theirs = stage(subject, seed), stage(subject, seed)
    found = run(loaded, ours, ours.inputs(step, bucket))
    wanted = eager(theirs, theirs.inputs(step, bucket))
    _same(ours, found, wanted, step, "a program that was loaded", type(loaded).run)
    return Measure("programs are saved and loaded")


GROUP = Group("programs", "programs", checks, beside=True)
