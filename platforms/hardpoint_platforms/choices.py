"""Overruling the usual choice of a provider, which is the first that takes an op."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class KernelChoice:
    """Ops that providers of a certain name alone may take.

    Attributes:
        op: contract name, with * and ? as in file names.
        where: place in the model ("layers.3.*"), likewise.
        provider: words that the provider's name must have in it.
    """

    op: str
    where: str
    provider: str

    def covers(self, op: str, where: str) -> bool:
        """Whether it is about an op at a place."""
        return fnmatchcase(op, self.op) and fnmatchcase(where, self.where)

    def allows(self, provider: str) -> bool:
        """Whether a provider of this name may take what is covered."""
        return self.provider in provider

    def __str__(self) -> str:
        return f"{self.op}[{self.where}]={self.provider}"
