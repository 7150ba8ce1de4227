"""Drives a scheduler and a checking device step by step, for cases worked out by hand."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kv_device import KvDevice, solo

from hardpoint.engine.update import apply
from hardpoint.kv.pager import KVPager
from hardpoint.protocol.messages import TokenOutput
from hardpoint.request.request import Request
from hardpoint.request.sampling import SamplingParams
from hardpoint.scheduler.plan import StepPlan, StepResult
from hardpoint.scheduler.scheduler import Scheduler
from hardpoint.scheduler.settings import SchedulerSettings, StepLimits

VOCAB = 1000


class Driver:
    """A scheduler on a pool of `pages` usable pages. `now` counts steps."""

    def __init__(
        self,
        *,
        pages: int = 100,
        page_tokens: int = 4,
        windows: tuple[int | None, ...] = (None,),
        prefix_caching: bool = True,
        budget: int = 64,
        rows: int = 8,
        context: int = 200,
        waiting: int = 100,
        chunked: bool = True,
        policy: str = "fcfs",
        limits: StepLimits | None = None,
        poisoned: frozenset[str] = frozenset(),
    ) -> None:
        self.settings = SchedulerSettings(budget, rows, context, waiting, chunked, policy, limits or StepLimits())
        self.pager = KVPager(pages + 1, page_tokens, windows, prefix_caching)
        self.scheduler = Scheduler(self.settings, self.pager)
        self.salts: dict[str, str] = {}
        self.device = KvDevice(
            self.settings, windows, page_tokens, pages + 1, vocab=VOCAB, salts=self.salts, poisoned=poisoned
        )
        self.pending: deque[tuple[StepPlan, StepResult]] = deque()
        self.outputs: dict[str, list[TokenOutput]] = {}
        self.now = 0.0

    def add(
        self,
        name: str,
        prompt: Sequence[int] | int,
        output: int | None = 4,
        *,
        priority: int = 0,
        parent: str | None = None,
        salt: str = "",
        deadline: float | None = None,
        seed: int = 0,
        params: SamplingParams | None = None,
    ) -> Request:
        """A request; a prompt given as a number is that many tokens of its own."""
        if isinstance(prompt, int):
            start = 1000 * (1 + len(self.outputs))
            prompt = range(start, start + prompt)
        params = params or SamplingParams(max_tokens=output, seed=seed)
        self.salts[name] = salt
        self.outputs[name] = []
        request = Request(
            name,
            list(prompt),
            params,
            priority,
            self.now,
            deadline,
            salt,
            parent,  # type: ignore[arg-type]
        )
        self.scheduler.add(request)
        self.scheduler.check_integrity()
        return request

    def schedule(self) -> StepPlan | None:
        """Plan and run a step; its result waits in `pending`."""
        self.now += 1
        plan = self.scheduler.schedule(self.now)
        self.scheduler.check_integrity()
        if plan is not None:
            self.pending.append((plan, self.device.run(plan)))
        return plan

    def update(self) -> list[TokenOutput]:
        """Apply the oldest result."""
        outputs = apply(self.scheduler, *self.pending.popleft(), self.now)
        self.scheduler.check_integrity()
        for output in outputs:
            self.outputs[output.request_id].append(output)
        return outputs

    def step(self) -> StepPlan | None:
        """Plan, run, update."""
        plan = self.schedule()
        if plan is not None:
            self.update()
        return plan

    def drain(self, limit: int = 500) -> None:
        """Step until nothing is left; all pages must be back."""
        while self.scheduler.has_work:
            limit -= 1
            assert limit, "it does not end"
            if self.pending:
                self.update()
            else:
                self.step()
        assert self.pager.used_pages == 0

    def tokens(self, name: str) -> list[int]:
        """What a request has sent."""
        return [token for output in self.outputs[name] for token in output.token_ids]

    def alone(self, request: Request, most: int) -> list[int]:
        """What it comes to alone."""
        return solo(request.prompt.tolist(), request.params, request.cache_salt, VOCAB, most)[0]


def batch(plan: StepPlan | None) -> list[tuple[int, int]]:
    """(row, tokens) in batch order."""
    assert plan is not None
    return list(zip(plan.rows.tolist(), plan.query_lengths.tolist(), strict=True))
