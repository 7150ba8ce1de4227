"""The executor: where a plan becomes a result. In this process, or in others."""

from __future__ import annotations

from abc import ABC, abstractmethod

from hardpoint.scheduler.plan import StepPlan, StepResult


class StepHandle(ABC):
    """A step under way."""

    @abstractmethod
    def result(self) -> StepResult:
        """Wait for the step. Raises what the worker raised."""

    @abstractmethod
    def done(self) -> bool:
        """Whether `result` would return at once."""


class Executor(ABC):
    """Runs plans in order, one after another."""

    @abstractmethod
    def submit(self, plan: StepPlan) -> StepHandle:
        """Queue a step behind those submitted before. Returns at once where the device can overlap."""

    def catch_up(self) -> bool:
        """While no step is under way: do a piece of what was put off at the start, to its end; whether any is left.

        Raises what the worker raised.
        """
        return False

    @abstractmethod
    def close(self) -> None:
        """Give the device back."""
