"""Group `models`: whole tiny models, served by the engine's own scheduler, pager and runner, against the reference.

Each family runs a crowd of requests in a small pool (preemptions, prefix hits, an abort) on the device and on the
reference. Tokens must be equal, except from a place where the reference itself hardly prefers one of two.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hardpoint.engine.update import apply
from hardpoint.kv.pager import KVPager
from hardpoint.layers.shard import Shard
from hardpoint.models.base import CausalModel, ParameterBook
from hardpoint.models.registry import build_model
from hardpoint.protocol.messages import EngineRequest, TokenOutput
from hardpoint.request.request import Request
from hardpoint.request.sampling import SamplingParams
from hardpoint.scheduler.scheduler import Scheduler
from hardpoint.scheduler.settings import SchedulerSettings, StepLimits
from hardpoint.weights.dummy import DummySource
from hardpoint.weights.source import Checkpoint
from hardpoint.worker.model_runner import ModelRunner, RunnerParts
from hardpoint.worker.stage import StageParts
from hardpoint.worker.step import make_step
from hardpoint_platforms.binding import OpTable
from hardpoint_platforms.conformance.checks import Check, Group, Measure, Wrong
from hardpoint_platforms.conformance.subject import Subject
from hardpoint_platforms.device import Device
from hardpoint_platforms.ops.table import op_table
from hardpoint_platforms.reference.platform import ReferenceDevice
from hardpoint_platforms.state_cache import CacheLayout

SMALL: dict[str, Any] = {
    "vocab_size": 113, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
_WINDOWS = ["full_attention", "sliding_attention"]
#: family -> (level at which it stands, its config besides `SMALL`).
FAMILIES: dict[str, tuple[int, dict[str, Any]]] = {
    "llama": (0, {}),
    "qwen3": (2, {"head_dim": 24, "use_sliding_window": True, "sliding_window": 8, "layer_types": _WINDOWS}),
    "gemma3_text": (
        2, {"head_dim": 24, "sliding_window": 8, "layer_types": _WINDOWS[::-1], "query_pre_attn_scalar": 20},
    ),
    "phi3": (2, {}),
    "qwen3_moe": (
        5,
        {"head_dim": 24, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2},
    ),
    "deepseek_v2": (
        5,
        {
            "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 8, "n_shared_experts": 1,
            "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
            "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 1, "routed_scaling_factor": 1.5,
        },
    ),
}  # fmt: skip
MAX_LEN, BATCH_TOKENS, ROWS, OUTPUT = 96, 24, 4, 24
#: (tokens shared with others, own tokens) of each prompt.
_PROMPTS = ((0, 1), (36, 3), (0, 14), (20, 2), (0, 9), (20, 5), (36, 15), (0, 12))
#: How far log-probabilities may be apart: by bytes of the compute dtype, and of the cache's.
_COMPUTE_SLACK, _CACHE_SLACK = {4: 2e-3, 2: 0.15}, {4: 2e-3, 2: 0.02, 1: 0.6}


@dataclass(frozen=True)
class Answer:
    """One request's tokens, the log-probability of each, and how far the second best was behind."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    leads: tuple[float, ...]


def checks(subject: Subject) -> Iterator[Check]:
    """One model per family."""
    dtype = str(subject.device.capabilities().compute_dtypes[0]).removeprefix("torch.")
    for family, (level, _) in FAMILIES.items():
        yield Check("models", family, "tokens of a crowd", level, partial(_family, family), dtype=dtype, patience=300.0)


def _family(family: str, subject: Subject, seed: int) -> Measure:
    return compare(subject.device, family, seed)


def compare(device: Device, family: str, seed: int, whole_experts: bool = False) -> Measure:
    """A crowd on the device against the same on the reference. Raises Wrong."""
    facts = device.capabilities()
    dtype, kv_dtype, page_tokens = facts.compute_dtypes[0], facts.kv_dtypes[0], facts.page_tokens[0]
    messages = crowd(seed)
    ours = Crowd(device, family, dtype, kv_dtype, page_tokens, whole_experts).serve(messages)
    theirs = Crowd(ReferenceDevice(), family, dtype, kv_dtype, page_tokens).serve(messages)
    slack = max(_COMPUTE_SLACK[dtype.itemsize], _CACHE_SLACK[kv_dtype.itemsize])
    if dtype.itemsize < torch.float32.itemsize:
        # Families differ in how much of a rounding reaches the logits: twice what the reference's own roundings do.
        wide = Crowd(ReferenceDevice(), family, torch.float32, torch.float32, page_tokens).serve(messages)
        slack = max(slack, 2 * max(_spread(theirs[name], wide[name]) for name in theirs))
    worst = max(_compare(name, ours[name], theirs[name], slack) for name in theirs)
    return Measure(f"{sum(len(a.tokens) for a in theirs.values())} tokens", error=worst, tolerance=slack)


def _compare(name: str, ours: Answer, theirs: Answer, slack: float) -> float:
    """The largest difference of log-probabilities up to where the texts may part. Raises Wrong."""
    worst = 0.0
    for place, (a, b) in enumerate(zip(ours.tokens, theirs.tokens, strict=False)):
        if a != b:
            if theirs.leads[place] > 2 * slack:
                raise Wrong(
                    f"{name}: token {place} is {a}, the reference's is {b}, which leads by {theirs.leads[place]:.3g}"
                )
            return worst
        difference = abs(ours.logprobs[place] - theirs.logprobs[place])
        if not difference <= slack:
            told = f"{name}: the log-probability of token {place} is off by {difference:.3g}, allowed is {slack:g}"
            raise Wrong(told, error=difference, tolerance=slack)
        worst = max(worst, difference)
    if len(ours.tokens) != len(theirs.tokens):
        raise Wrong(f"{name}: {len(ours.tokens)} tokens, the reference gives {len(theirs.tokens)}")
    return worst


def _spread(a: Answer, b: Answer) -> float:
    """The largest difference of log-probabilities of two answers, up to where their texts part."""
    alike = 0
    while alike < min(len(a.tokens), len(b.tokens)) and a.tokens[alike] == b.tokens[alike]:
        alike += 1
    return max((abs(a.logprobs[place] - b.logprobs[place]) for place in range(alike)), default=0.0)


def crowd(seed: int) -> list[EngineRequest]:
    """Eight greedy requests, half of which begin alike."""
    rng, vocab = random.Random(seed), SMALL["vocab_size"]
    stem = [rng.randrange(vocab) for _ in range(40)]
    return [
        EngineRequest(
            request_id=f"request {number}",
            prompt=stem[:shared] + [rng.randrange(vocab) for _ in range(own)],
            params=SamplingParams(temperature=0.0, seed=number, max_tokens=OUTPUT, ignore_eos=True, logprobs=2),
        )
        for number, (shared, own) in enumerate(_PROMPTS)
    ]


class Crowd:
    """A tiny model on one device, with a pool so small that requests push each other out.

    Attributes: preemptions, hits: of the last crowd, requests pushed out and prompt tokens found in the prefix cache.
    """

    preemptions = hits = 0

    def __init__(
        self,
        device: Device,
        family: str,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        page_tokens: int,
        whole_experts: bool = False,
    ) -> None:
        """`whole_experts`: how a device of several ranks deals them out."""
        config: Mapping[str, Any] = {"model_type": family, **SMALL, **FAMILIES[family][1]}
        checkpoint = Checkpoint(Path(), dict(config), {}, DummySource(3), "dummy")
        ops = op_table(device)

        def build(table: OpTable, rank: int) -> tuple[CausalModel, ParameterBook]:
            return build_model(checkpoint, table, dtype, MAX_LEN, shard=Shard.on(device, rank, whole_experts))

        model, book = build(ops, 0)
        books = [book, *(build(op_table(device), rank)[1] for rank in range(1, device.mesh.ranks))]
        sample = ops.bind(ops.contract("sample").instance("sampler", torch.float32))
        score = ops.bind(ops.contract("logprobs").instance("prompt scores", torch.float32))
        layout = CacheLayout(model.cache_groups, model.pool, page_tokens, kv_dtype)
        limits = device.capabilities().limits
        self.settings = SchedulerSettings(
            max_batch_tokens=max(BATCH_TOKENS, 2 * limits.prefill_chunk_multiple),
            max_num_seqs=ROWS,
            max_model_len=MAX_LEN,
            limits=StepLimits(**vars(limits)),
        )
        windows = tuple(group.window for group in model.cache_groups)
        pages = 1 + len(windows) * max(2, MAX_LEN // page_tokens)
        self._pager = KVPager(pages, page_tokens, windows, prefix_caching=True)
        self._runner = ModelRunner(
            RunnerParts(
                stages=(
                    StageParts(
                        device=device,
                        planners=ops.planners,
                        model=model,
                        dtype=dtype,
                        weights=device.load_ranks([book.load for book in books]),
                        layout=layout,
                        state=device.state_cache().allocate(layout, pages),
                        step=make_step(model, sample.kernel),
                    ),
                ),
                score=score.kernel,
                max_num_seqs=ROWS,
                max_model_len=MAX_LEN,
                max_batch_tokens=self.settings.budget,
            )
        )
        self._runner.warm_up(len(layout.groups))

    def serve(self, messages: Sequence[EngineRequest]) -> dict[str, Answer]:
        """All requests to their end, one result behind; the last request is aborted on the way."""
        scheduler = Scheduler(self.settings, self._pager)
        outputs: dict[str, list[TokenOutput]] = {message.request_id: [] for message in messages}
        for message in messages:
            scheduler.add(Request.from_message(message, 0.0))
        gone = messages[-1].request_id
        pending: deque[Any] = deque()
        tick = 0
        while scheduler.has_work:
            tick += 1
            if tick == 12:
                scheduler.abort(gone)
            plan = scheduler.schedule(float(tick))
            if plan is not None:
                pending.append((plan, self._runner.launch(plan)))
            if pending and (plan is None or len(pending) > 1):
                done, flight = pending.popleft()
                for output in apply(scheduler, done, self._runner.collect(flight), float(tick)):
                    outputs[output.request_id].append(output)
        scheduler.check_integrity()
        self.preemptions, self.hits = scheduler.preemptions, self._pager.hits
        return {name: _answer(name, parts) for name, parts in outputs.items() if name != gone}


def _answer(name: str, parts: Sequence[TokenOutput]) -> Answer:
    tokens, logprobs, leads = [], [], []
    for part in parts:
        if part.error:
            raise Wrong(f"{name}: {part.error}")
        tokens += part.token_ids
        for scores in part.logprobs or ():
            values = sorted(scores.logprobs[1:], reverse=True)
            logprobs.append(float(scores.logprobs[0]))
            leads.append(float(values[0] - values[1]))
    return Answer(tuple(tokens), tuple(logprobs), tuple(leads))


GROUP = Group("models", "whole tiny models", checks, beside=True)
