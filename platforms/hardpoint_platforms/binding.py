"""Choosing once, at build time: for each op instance every provider is asked, one is bound, every refusal is kept."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hardpoint_platforms.choices import KernelChoice
from hardpoint_platforms.errors import HardpointError, PluginError, UnsupportedOperation
from hardpoint_platforms.ops.contract import Altitude, Kernel, OpContract, OpInstance
from hardpoint_platforms.ops.provider import AttentionPlanner, OpProvider, Support

if TYPE_CHECKING:
    from collections.abc import Mapping

#: In the place of a provider: nobody takes the block, the ops that stand for it are bound.
DECOMPOSED = "(decomposed)"
#: An op's name and its place in the model.
Place = tuple[str, str]


@dataclass(frozen=True)
class Refusal:
    """A provider that was asked and said no."""

    provider: str
    reason: str


@dataclass(frozen=True)
class Binding:
    """One choice, as `explain` prints it.

    `fallback` is True where the reference was taken, `held` is False where the device's programs do not hold the op.
    """

    instance: OpInstance
    altitude: Altitude
    provider: str
    reason: str
    refused: tuple[Refusal, ...]
    fallback: bool
    held: bool = True


@dataclass(frozen=True)
class BoundOp:
    """A chosen provider and its kernel.

    `plan_index` is the place of this op's plan among the step's plans (attention only, else -1).
    """

    kernel: Kernel
    provider: OpProvider
    instance: OpInstance
    plan_index: int = -1


class OpTable:
    """Binds the op instances of one model on one device.

    The table is filled while the model is built and read-only afterwards.
    """

    def __init__(
        self,
        contracts: Mapping[str, OpContract],
        providers: Sequence[OpProvider],
        fallbacks: Sequence[OpProvider],
        choices: Sequence[KernelChoice] = (),
    ) -> None:
        """`providers` are the device's own, best first; `fallbacks` the reference's, asked last.

        `choices` overrule that order; of several for one op the last counts.
        """
        self._contracts = contracts
        self._own = _by_op(providers)
        self._fallbacks = _by_op(fallbacks)
        self._choices = tuple(choices)
        #: Those of `choices` that some op was bound by.
        self.followed: set[KernelChoice] = set()
        self._planners: list[AttentionPlanner] = []
        self._bindings: list[Binding] = []
        self._claims: list[BoundOp | None] = []

    @property
    def bindings(self) -> tuple[Binding, ...]:
        """Every choice so far, in the order of building."""
        return tuple(self._bindings)

    @property
    def claims(self) -> tuple[BoundOp | None, ...]:
        """The answer to each question so far, in order; None where nobody took the instance."""
        return tuple(self._claims)

    @property
    def bound(self) -> tuple[BoundOp, ...]:
        """Every bound op so far, in the order of building."""
        return tuple(bound for bound in self._claims if bound is not None)

    @property
    def has_own_providers(self) -> bool:
        """Whether the device brings any op of its own; if not, running on the reference is what it is for."""
        return bool(self._own)

    @property
    def planners(self) -> tuple[AttentionPlanner, ...]:
        """Distinct planners of the bound attention ops; the step's plans come in this order."""
        return tuple(self._planners)

    def contract(self, op: str) -> OpContract:
        """The contract named `op`. Raises UnsupportedOperation for an unknown name."""
        try:
            return self._contracts[op]
        except KeyError:
            raise UnsupportedOperation(f"there is no op contract named {op!r}") from None

    def bind(self, instance: OpInstance) -> BoundOp:
        """Choose a provider. Raises UnsupportedOperation, with every refusal, if nobody takes the instance."""
        bound = self.claim(instance)
        if bound is None:
            self._claims.pop()
            refused = self._bindings.pop().refused
            reasons = "; ".join(f"{r.provider}: {r.reason}" for r in refused) or "no provider implements it"
            raise UnsupportedOperation(f"nobody takes {instance.op} at {instance.where}: {reasons}")
        return bound

    def claim(self, instance: OpInstance, parts: Sequence[Place] = ()) -> BoundOp | None:
        """Like `bind`, but None where nobody takes the instance: the caller decomposes a block then.

        parts: the ops that would stand for a block, with their places. What was chosen for one of them holds for the
        block too: a provider takes it only if its name has the words that are asked of that part.
        Raises PluginError where a provider fails to answer or to build.
        """
        self._claims.append(self._choose(instance, parts))
        return self._claims[-1]

    def _choose(self, instance: OpInstance, parts: Sequence[Place]) -> BoundOp | None:
        contract = self.contract(instance.op)
        refused: list[Refusal] = []
        places = ((instance.op, instance.where), *parts)
        choices = tuple(dict.fromkeys(choice for choice in itertools.starmap(self._choice, places) if choice))
        for fallback, candidates in ((False, self._own), (True, self._fallbacks)):
            for provider in candidates.get(instance.op, ()):
                against = next((choice for choice in choices if not choice.allows(provider.name)), None)
                if against is not None:
                    refused.append(Refusal(provider.name, f"--kernel {against}"))
                    continue
                answer = _asked(contract, provider, instance)
                if answer:
                    self._record(contract, instance, provider.name, answer.reason, refused, fallback)
                    return BoundOp(_built(provider, instance), provider, instance, self._plan_index(provider))
                refused.append(Refusal(provider.name, answer.reason))
        into = ", ".join(contract.decomposition)
        self._record(contract, instance, DECOMPOSED, f"into {into}" if into else "", refused, False)
        return None

    def _choice(self, op: str, where: str) -> KernelChoice | None:
        """What overrules the usual order here."""
        for choice in reversed(self._choices):
            if choice.covers(op, where):
                self.followed.add(choice)
                return choice
        return None

    def _record(
        self,
        contract: OpContract,
        instance: OpInstance,
        provider: str,
        reason: str,
        refused: list[Refusal],
        fallback: bool,
    ) -> None:
        self._bindings.append(Binding(instance, contract.altitude, provider, reason, tuple(refused), fallback))

    def _plan_index(self, provider: OpProvider) -> int:
        planner = provider.planner()
        if planner is None:
            return -1
        for index, known in enumerate(self._planners):
            if known is planner:
                return index
        self._planners.append(planner)
        return len(self._planners) - 1


def ask(contract: OpContract, provider: OpProvider, instance: OpInstance) -> Support:
    """The provider's answer, after the version check that spares it instances it cannot know."""
    needed = contract.minor_needed(instance)
    if provider.version.major != contract.version.major:
        return Support(False, f"implements {contract.name} {provider.version}, the core asks {contract.version}")
    if needed > provider.version.minor:
        new = [n for n, a in contract.attributes.items() if a.since == needed]
        return Support(
            False,
            f"needs {contract.name} {contract.version.major}.{needed} ({', '.join(new)}), "
            f"plugin implements {provider.version}",
        )
    return provider.supports(instance)


def _asked(contract: OpContract, provider: OpProvider, instance: OpInstance) -> Support:
    with _naming(provider, instance, "supports"):
        answer: object = ask(contract, provider, instance)
    if isinstance(answer, Support):
        return answer
    raise _fault(provider, instance, "supports", f"returned {answer!r:.60}, not a Support")


def _built(provider: OpProvider, instance: OpInstance) -> Kernel:
    with _naming(provider, instance, "build"):
        kernel: object = provider.build(instance)
    if callable(kernel):
        return kernel
    raise _fault(provider, instance, "build", f"returned {kernel!r:.60}, not a kernel")


@contextmanager
def _naming(provider: OpProvider, instance: OpInstance, method: str) -> Iterator[None]:
    """What a provider raises that is no error of ours gets the provider's name and line."""
    try:
        yield
    except HardpointError:
        raise
    except Exception as error:
        raise _fault(provider, instance, method, f"raised {type(error).__name__}: {error}", error) from error


def _fault(
    provider: OpProvider, instance: OpInstance, method: str, told: str, error: Exception | None = None
) -> PluginError:
    from hardpoint_platforms import guarding

    plugin = guarding.plugin_of_provider(provider)
    place = guarding.place_of_error(error, plugin) if error is not None else ""
    place = place or guarding.place_of_code(getattr(type(provider), method))
    asked = f"{type(provider).__name__}.{method}() for {guarding.named_op(instance)} {told}"
    hint = guarding.advice(plugin, instance.op)
    return plugin.error("validation", f"{asked}{f', at {place}' if place else ''}", hint)


def _by_op(providers: Iterable[OpProvider]) -> dict[str, list[OpProvider]]:
    table: dict[str, list[OpProvider]] = {}
    for provider in providers:
        table.setdefault(provider.op, []).append(provider)
    return table
