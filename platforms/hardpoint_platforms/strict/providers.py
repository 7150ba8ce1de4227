"""Every contract's kernel behind a guard that names it and lets no state handle live twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Altitude, Kernel, OpContract, OpInstance, Packed, Weight
from hardpoint_platforms.ops.provider import AttentionPlanner, OpProvider, Support
from hardpoint_platforms.reference.providers import ReferenceProvider
from hardpoint_platforms.strict.journal import Journal, name_of
from hardpoint_platforms.strict.ledger import Ledger
from hardpoint_platforms.strict.state import handle_of, poison
from hardpoint_platforms.strict.static.attention import build_attention, build_mla_attention
from hardpoint_platforms.strict.static.moe import build_experts
from hardpoint_platforms.strict.static.plan import StaticPlanner
from hardpoint_platforms.strict.static.sampling import build_sample, build_verify
from hardpoint_platforms.strict.static.state_space import build_conv_state, build_gated_delta, build_ssm_scan

#: Contracts whose reference is not static, and what stands for it.
STATIC: Mapping[str, Callable[[OpInstance], Kernel]] = {
    "attention": build_attention,
    "mla_attention": build_mla_attention,
    "experts": build_experts,
    "sample": build_sample,
    "verify": build_verify,
    "conv_state": build_conv_state,
    "ssm_scan": build_ssm_scan,
    "gated_delta": build_gated_delta,
}
#: Where the state stands among a kernel's arguments.
STATE_AT = {"attention": 3, "mla_attention": 4, "conv_state": 1, "ssm_scan": 4, "gated_delta": 5}


class StrictProvider(ReferenceProvider):
    """One op: the contract's reference where that is static, else the static form of it."""

    name = "strict"

    def __init__(
        self, contract: OpContract, planner: AttentionPlanner | None, journal: Journal, ledger: Ledger
    ) -> None:
        super().__init__(contract, planner)
        self._journal, self._ledger = journal, ledger

    def supports(self, instance: OpInstance) -> Support:
        answer = super().supports(instance)
        return Support(True, f"{answer.reason}, static shapes") if answer else answer

    def pack(self, instance: OpInstance, weights: Mapping[str, Weight]) -> Packed:
        return tuple(self._ledger.hold(part) for part in super().pack(instance, weights))

    def build(self, instance: OpInstance) -> Kernel:
        kernel = STATIC[self.op](instance) if self.op in STATIC else super().build(instance)
        journal = self._journal

        def guarded(*arguments: Any) -> Any:
            with journal.inside(instance):
                return kernel(*arguments)

        return _stateful(guarded, name_of(instance), STATE_AT[self.op]) if self.op in STATE_AT else guarded


def _stateful(kernel: Kernel, who: str, at: int) -> Kernel:
    """A kernel of trees as one of handles; what it replaced in the tree is overwritten."""

    def stateful(*arguments: Any) -> Any:
        handle = handle_of(arguments[at], who)
        before = handle.take(who)
        out, after = kernel(*arguments[:at], before, *arguments[at + 1 :])
        poison(before, after)
        return out, handle.next(after)

    return stateful


def strict_providers(device: torch.device, journal: Journal, ledger: Ledger) -> tuple[OpProvider, ...]:
    """One per composite and primitive; those that keep state share a planner."""
    planner = StaticPlanner(device)
    return tuple(
        StrictProvider(contract, planner if contract.name in STATE_AT else None, journal, ledger)
        for contract in CONTRACTS.values()
        if contract.altitude is not Altitude.BLOCK
    )
