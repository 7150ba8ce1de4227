"""The engine's groups: traces notice broken limits, tiny models notice a wrong kernel."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from hardpoint.conformance import scheduling, tiny
from hardpoint.conformance.scheduling import Forbidden, play
from hardpoint.scheduler.settings import StepLimits
from hardpoint_platforms.capabilities import BatchLimits
from hardpoint_platforms.conformance.mutants.catalogue import FAULTS, subject_of
from hardpoint_platforms.conformance.mutants.platform import SOUND
from hardpoint_platforms.conformance.runner import Selection, conduct
from hardpoint_platforms.conformance.verdict import Report, Status

pytestmark = pytest.mark.reference

HARD = BatchLimits(
    max_tokens=48, max_requests=4, mixed=False, max_prefill_requests=1, prefill_chunk_multiple=4,
    token_buckets=(4, 16, 32), request_buckets=(1, 2, 4),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("limits", [BatchLimits(), HARD, BatchLimits(max_prefill_requests=1, max_requests=2)])
def test_the_scheduler_obeys(limits: BatchLimits) -> None:
    assert sum(play(limits, random.Random(seed)) for seed in range(150)) > 1000


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (BatchLimits(mixed=False), "mixed is False"),
        (BatchLimits(max_prefill_requests=1), "prefills in one step"),
        (BatchLimits(prefill_chunk_multiple=8), "not a multiple of 8"),
        (BatchLimits(max_tokens=3), "tokens in one step"),
        (BatchLimits(request_buckets=(1,)), "requests in one step"),
    ],
)
def test_a_scheduler_that_ignores_the_limits_is_noticed(
    limits: BatchLimits, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling, "StepLimits", lambda **declared: StepLimits())
    with pytest.raises(Forbidden, match=words):
        _play_many(limits)


def _play_many(limits: BatchLimits) -> None:
    for seed in range(200):
        play(limits, random.Random(seed))


def _models(name: str, family: str) -> Report:
    fault = next((fault for fault in FAULTS if fault.name == name), SOUND)
    return conduct(subject_of(fault), [tiny.GROUP], Selection(cases=(f"models/{family}/*",)))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v2"])
def test_a_sound_device_serves_the_crowd(family: str) -> None:
    (verdict,) = _models("", family).verdicts
    assert verdict.status is Status.PASS, verdict.message


@pytest.mark.parametrize(
    ("fault", "family"),
    [
        ("a stale page is read", "llama"),
        ("mask is off by one in decode", "llama"),
        ("window is one token too wide", "gemma3_text"),
        ("rope pairs neighbours where halves are meant", "qwen3"),
        ("routing ignores groups", "deepseek_v2"),
        ("replays read the page tables of the capture", "llama"),
        ("one request's first page for all", "llama"),
    ],
)
def test_a_faulty_device_is_noticed(fault: str, family: str) -> None:
    (verdict,) = _models(fault, family).failures()
    assert "mutant-hardpoint 0" in verdict.message


def test_the_crowd_is_a_crowd() -> None:
    """Requests push each other out and share what begins alike; otherwise the group would prove little."""
    device = subject_of(SOUND).device
    crowd = tiny.Crowd(device, "llama", torch.float32, torch.float32, 16)
    messages = tiny.crowd(1)
    answers = crowd.serve(messages)
    assert len(answers) == len(messages) - 1
    assert all(len(answer.tokens) == tiny.OUTPUT == len(answer.leads) for answer in answers.values())
    assert crowd.preemptions > 0
    assert crowd.hits > 0
