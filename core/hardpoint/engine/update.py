"""From a step's result to requests and outputs: notes drawn tokens, decides who has ended and why.

Stop strings are the front end's: it sees text, the engine sees tokens.
"""

from __future__ import annotations

from hardpoint.errors import EngineError
from hardpoint.protocol.messages import TokenLogprobs, TokenOutput
from hardpoint.request.request import Request, Status
from hardpoint.scheduler.plan import RowLogprobs, StepPlan, StepResult
from hardpoint.scheduler.scheduler import Scheduler

_BAD_VALUES = "the model produced values that are not finite for this request"


def apply(scheduler: Scheduler, plan: StepPlan, result: StepResult, now: float) -> list[TokenOutput]:
    """Note what a step brought. Call it with results in the order of their plans. now: seconds, engine's clock.

    Results of requests that have ended meanwhile are dropped. Raises EngineError for a result that does not fit the
    plan.
    """
    if result.step != plan.step or len(result.tokens) != len(plan.rows):
        raise EngineError(f"result of step {result.step} does not fit the plan of step {plan.step}")
    requests = scheduler.complete(plan, result.bad_rows)
    tokens, samples = result.tokens.tolist(), plan.samples.tolist()
    scored, bad = result.prompt_logprobs, frozenset(result.bad_rows)
    outputs: list[TokenOutput] = []
    drawn, over = 0, Status.FINISHED
    for index, (request, token, sampled) in enumerate(zip(requests, tokens, samples, strict=True)):
        if request.status is over:
            continue
        output = request.output
        if sampled and output and request.plain and not bad and token not in request.stop_ids:
            # the common case: a decode that goes on
            output.append(token)
            drawn += 1
            if len(output) < request.max_output:
                outputs.append(TokenOutput(request_id=request.id, token_ids=[token]))
            else:
                scheduler.finish(request, "length", now)
                outputs.append(ended(request, [token]))
            continue
        if index in bad:
            request.error = _BAD_VALUES
            scheduler.finish(request, "error", now, forget=True)
            outputs.append(ended(request))
            continue
        if index in scored:
            _collect(request, int(plan.computed[index]), scored[index])
        if sampled:
            output.append(token)
            drawn += 1
            outputs.append(_drawn(scheduler, request, token, result.logprobs.get(index), now))
        elif request.max_output <= 0 and int(plan.computed[index] + plan.query_lengths[index]) >= request.prompt_length:
            outputs.append(_scored(scheduler, request, now))
    scheduler.generated_tokens += drawn
    return outputs


def ended(
    request: Request,
    token_ids: list[int] | None = None,
    logprobs: list[TokenLogprobs] | None = None,
    prompt_logprobs: list[TokenLogprobs | None] | None = None,
) -> TokenOutput:
    """The last output of a request that has ended (also by abort or deadline), with what its last step brought."""
    token_ids = token_ids or []
    return TokenOutput(
        request_id=request.id,
        token_ids=token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        error=request.error,
        cached_tokens=request.cached_tokens if len(request.output) == len(token_ids) else None,
        timing=request.timing(),
    )


def _drawn(scheduler: Scheduler, request: Request, token: int, logprobs: RowLogprobs | None, now: float) -> TokenOutput:
    """A token that is the first, or the last, or comes with log-probabilities."""
    count = len(request.output)
    if request.first_token is None:
        request.first_token = now
    wanted = request.params.logprobs
    own = None if wanted is None else _own_logprobs(request, logprobs, wanted)
    prompt = _whole_prompt(request)
    reason = None
    if token in request.stop_ids and count > request.params.min_tokens:
        reason = "stop"
        request.stop_reason = None if token in request.eos_ids else token
    elif count >= request.max_output:
        reason = "length"
    if reason is not None:
        scheduler.finish(request, reason, now)
        return ended(request, [token], own, prompt)
    return TokenOutput(
        request_id=request.id,
        token_ids=[token],
        logprobs=own,
        prompt_logprobs=prompt,
        cached_tokens=request.cached_tokens if count == 1 else None,
    )


def _scored(scheduler: Scheduler, request: Request, now: float) -> TokenOutput:
    """A request for no tokens, whose prompt is computed."""
    request.first_token = now
    prompt = _whole_prompt(request)
    scheduler.finish(request, "length", now)
    return ended(request, prompt_logprobs=prompt)


def _collect(request: Request, computed: int, scored: RowLogprobs) -> None:
    """Keep a chunk's prompt log-probabilities. Positions that an earlier run, before a preemption, brought are skipped.

    A chunk that starts at `computed` scores positions computed + 1 and up; `have` of the positions 1, 2 ... are there.
    """
    have = len(request.prompt_logprobs)
    if not request.wants_prompt_logprobs or have >= request.prompt_length - 1:
        return
    if computed > have:
        raise EngineError(
            f"request {request.id}: prompt log-probabilities of positions {have + 1}..{computed} are missing"
        )
    rows = _rows(scored, request.params.prompt_logprobs or 0)
    request.prompt_logprobs.extend(rows[have - computed :])


def _whole_prompt(request: Request) -> list[TokenLogprobs | None] | None:
    """All prompt log-probabilities, the first None; None itself if not asked or sent before."""
    if not request.wants_prompt_logprobs:
        return None
    found = request.prompt_logprobs
    if len(found) != request.prompt_length - 1:
        raise EngineError(
            f"request {request.id}: {len(found)} prompt log-probabilities, not {request.prompt_length - 1}"
        )
    request.prompt_logprobs_sent = True
    request.prompt_logprobs = []
    return [None, *found]


def _own_logprobs(request: Request, logprobs: RowLogprobs | None, wanted: int) -> list[TokenLogprobs]:
    if logprobs is None:
        raise EngineError(f"request {request.id}: the step brought no log-probabilities")
    return _rows(logprobs, wanted)


def _rows(logprobs: RowLogprobs, wanted: int) -> list[TokenLogprobs]:
    """One entry per position: the token itself and its `wanted` best rivals."""
    ids = logprobs.token_ids[:, : 1 + wanted].tolist()
    values = logprobs.logprobs[:, : 1 + wanted].tolist()
    return [TokenLogprobs(i, v, r) for i, v, r in zip(ids, values, logprobs.ranks.tolist(), strict=True)]
