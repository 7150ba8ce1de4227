"""The ladder: what each level asks for, which level a set of verdicts adds up to, and what the next one lacks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from hardpoint_platforms.conformance.verdict import Status, Verdict


@dataclass(frozen=True)
class Level:
    """One rung.

    Attributes:
        number, title; writes: what the vendor writes for it; works: what works then.
        contracts: of which the device's own kernels must pass at least one sample in its first compute dtype.
        blocks: contracts that are looked at first here, and not asked for.
        interfaces: (group, contract) pairs of which at least one check must pass.
    """

    number: int
    title: str
    writes: str
    works: str
    contracts: tuple[str, ...] = ()
    blocks: tuple[str, ...] = field(default=(), kw_only=True)
    interfaces: tuple[tuple[str, str], ...] = ()


LEVELS: tuple[Level, ...] = (
    Level(
        0,
        "memory",
        "manifest, probe, Device: allocate, copy, synchronize",
        "every model, each op on its reference: correct and slow",
        interfaces=(("load", "device"), ("memory", "copies")),
    ),
    Level(
        1,
        "primitives",
        "providers of the ops around attention",
        "everything but attention runs on the device's own kernels, op by op",
        ("embedding", "linear", "norm", "add_norm", "rope", "gated_activation", "logits"),
    ),
    Level(
        2,
        "attention and state",
        "an attention provider with its planner, and the paged state where the default does not do",
        "the real decode path: prefix cache, preemption, swap",
        ("attention",),
        (("state", "state_cache"),),
        blocks=("rotary_attention",),
    ),
    Level(
        3,
        "programs and sampling",
        "a ProgramBuilder (capture or compile; eager counts where nothing is gained) and sampling on the device",
        "production latency on one device",
        ("sample", "logprobs"),
        (("programs", "program"),),
    ),
    Level(
        4,
        "collectives",
        "a Communicator, where gloo over the host is too slow",
        "tensor, pipeline and data parallel",
        interfaces=(("collectives", "communicator"),),
    ),
    Level(
        5,
        "large models",
        "quantized weights, experts, latent attention, recurrent state",
        "mixtures of experts, latent attention and hybrid models",
        ("moe_route", "experts", "mla_attention", "conv_state", "ssm_scan", "gated_delta", "quantized linear"),
    ),
    Level(
        6,
        "exchange and extensions",
        "verification of drafts, adapters, faster page transfer",
        "speculative decoding, adapters, prefill and decode on different devices",
        ("verify", "lora"),
        (("transfer", "kv_transfer"),),
    ),
)
HIGHEST = LEVELS[-1].number
#: Contracts of no level of their own are checked with the primitives wherever they are claimed.
_LEVEL_OF = {contract: level.number for level in LEVELS for contract in level.contracts}


def level_of(contract: str) -> int:
    """The level at which a contract, or an interface ("program"), is looked at first."""
    part = (level.number for level in LEVELS for _, name in level.interfaces if name == contract)
    block = (level.number for level in LEVELS if contract in level.blocks)
    return _LEVEL_OF.get(contract) or next(chain(block, part), 1)


def is_required(contract: str) -> bool:
    """Whether some level asks for own kernels of the contract."""
    return contract in _LEVEL_OF


def lacks(level: Level, verdicts: Sequence[Verdict]) -> list[str]:
    """What keeps a device from this level, given that it has all those below; empty if it has reached it."""
    here = [verdict for verdict in verdicts if verdict.level == level.number]
    told = []
    failed = [verdict for verdict in here if verdict.status is Status.FAIL]
    if failed:
        names = ", ".join(dict.fromkeys(f"{verdict.group}/{verdict.contract}" for verdict in failed))
        told.append(f"mend the {len(failed)} failed checks of {names}")
    refused = [name for name in level.contracts if not _claimed(name, here)]
    if refused:
        told.append("write a provider of " + ", ".join(f"{name} ({_reason(name, here)})" for name in refused))
    for group, contract in level.interfaces:
        mine = [v for v in here if v.group == group and v.contract == contract]
        if not any(v.status is Status.PASS for v in mine) and not any(v.status is Status.FAIL for v in mine):
            reason = next((v.message for v in mine), "it was not run")
            told.append(f"have {group}/{contract} pass at least once ({reason})")
    return told


def reached(verdicts: Sequence[Verdict], asked: int) -> tuple[int, str]:
    """The level reached, -1 for none, and what to do next."""
    for level in LEVELS[: asked + 1]:
        missing = lacks(level, verdicts)
        if missing:
            return level.number - 1, f"for L{level.number} ({level.title}): " + "; ".join(missing)
    if asked < HIGHEST:
        above = LEVELS[asked + 1]
        return asked, f"try L{above.number} ({above.title}): {above.writes}"
    return asked, "nothing is left to do; keep this run as a record of the release"


def _claimed(contract: str, verdicts: Iterable[Verdict]) -> bool:
    """A failed one counts: it is told as a failure, not as a missing provider."""
    settled = (Status.PASS, Status.FAIL)
    return any(v.contract == contract and v.required and v.status in settled for v in verdicts)


def _reason(contract: str, verdicts: Iterable[Verdict]) -> str:
    reasons = [v.message for v in verdicts if v.contract == contract and v.required]
    return reasons[0] if reasons else "it was not run"
