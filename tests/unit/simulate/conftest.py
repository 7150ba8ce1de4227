"""A tiny deployment: a cost model without torch, so that these tests run anywhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hardpoint.scheduler.settings import SchedulerSettings
from hardpoint.simulate.cost import Attended, StepCost
from hardpoint.simulate.fleet import Deployment


class LinearCost(StepCost):
    """1 ms a step, 10 us a token, 100 ns a cached token read."""

    windows = (None,)

    def seconds(self, tokens: int, samples: int, attended: Attended) -> float:
        return 1e-3 + 1e-5 * tokens + 1e-7 * attended[0][1]


@pytest.fixture
def deployment() -> Callable[..., Deployment]:
    """Makes one; keywords replace its fields."""

    def make(**deltas: object) -> Deployment:
        plain: dict[str, object] = {
            "cost": LinearCost(),
            "settings": SchedulerSettings(max_batch_tokens=256, max_num_seqs=16, max_model_len=2048),
            "windows": (None,),
            "num_pages": 600,
        }
        return Deployment(**{**plain, **deltas})

    return make
