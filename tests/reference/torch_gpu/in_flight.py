"""Products of Hopper's tensor cores that still read registers when these are written: found in PTX.

`wgmma` may take its left operand from registers, and it runs on while the program does. PTX ISA, "Asynchronous
warpgroup level matrix instructions": such registers must not be written before `wgmma.wait_group` has waited for it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

Registers = frozenset[str]

_PRODUCT = re.compile(r"wgmma\.mma_async\S* \{[^}]*\}, (?:\{([^}]*)\})?")
_WAIT = re.compile(r"wgmma\.wait_group\S* (\d+);")
_BRANCH = re.compile(r"(@\S+ )?bra(?:\.uni)? (\$\w+);")
_WRITE = re.compile(r"(?:@\S+ )?([a-z][\w.:]*) (\{[^}]*\}|[^,]*),")
#: What begins with these has no register for its result.
_NO_RESULT = ("st.", "red.", "cp.", "bar", "fence", "wgmma", "mbarrier", "prefetch", "call")
#: Groups of products that may be under way: more are as many as this.
_MOST_GROUPS = 32


@dataclass(frozen=True)
class _Under:
    """Products under way.

    Attributes:
        groups: the registers that each committed one reads, the oldest first.
        loose: those of products that are in no group yet.
    """

    groups: tuple[Registers, ...] = ()
    loose: Registers = frozenset()

    def after(self, line: str) -> _Under:
        if product := _PRODUCT.match(line):
            return _Under(self.groups, self.loose | _registers(product[1] or ""))
        if line.startswith("wgmma.commit_group"):
            return _Under((*self.groups, self.loose)[-_MOST_GROUPS:])
        if wait := _WAIT.match(line):
            return _Under(self.groups[max(len(self.groups) - int(wait[1]), 0) :], self.loose)
        return self

    @property
    def reads(self) -> Registers:
        return self.loose.union(*self.groups)


@dataclass
class _Reader:
    """Walks every way through a kernel, with what is under way on it."""

    lines: list[str]
    written: dict[str, None] = field(default_factory=dict)
    carried: dict[str, None] = field(default_factory=dict)

    def walk(self) -> None:
        labels = {line[:-1]: at for at, line in enumerate(self.lines) if re.fullmatch(r"\$\w+:", line)}
        seen: set[tuple[int, _Under]] = set()
        starts = [(0, _Under())]
        while starts:
            at, under = starts.pop()
            while at < len(self.lines) and (at, under) not in seen:
                line = self.lines[at]
                if line.endswith(":"):
                    seen.add((at, under))
                under = under.after(line)
                self._look(line, under)
                branch = _BRANCH.match(line)
                if branch:
                    goal = labels[branch[2]]
                    self._look_back(goal, at, under)
                    starts.append((goal, under))
                if line.startswith(("ret;", "exit;", "trap;")) or (branch and not branch[1]):
                    break
                at += 1

    def _look(self, line: str, under: _Under) -> None:
        if under.reads & _written(line):
            self.written[f"{line} writes what a product under way reads"] = None

    def _look_back(self, goal: int, at: int, under: _Under) -> None:
        """A loop goes on, from `at` to `goal`: of what products under way read it may make nothing anew."""
        if goal < at and under.reads:
            anew = frozenset[str]().union(*map(_written, self.lines[goal:at]))
            if under.reads & anew:
                self.carried[f"a product that reads registers is under way at {self.lines[at]}"] = None


def in_flight(ptx: str, over_turns: bool = True) -> tuple[str, ...]:
    """What is wrong with a kernel, a line each: writes of registers that a product under way reads.

    Without `over_turns` also products that are under way from one turn of a loop to the next while they read what each
    turn makes, even where the next one waits before it does. Triton 3.9 copies the registers and waits between the
    copies; of such a kernel 3.6 makes one that writes too early, and so this is seen where only 3.9 is.
    """
    lines = [re.sub(r"\s+", " ", line.partition("//")[0]).strip() for line in ptx.splitlines()]
    reader = _Reader([line for line in lines if line and not line.startswith(".")])
    if any(map(_PRODUCT.match, reader.lines)):
        reader.walk()
    return (*reader.written, *(() if over_turns else reader.carried))


def _registers(text: str) -> Registers:
    return frozenset(re.findall(r"%\w+", text))


def _written(line: str) -> Registers:
    write = _WRITE.match(line)
    return frozenset() if write is None or write[1].startswith(_NO_RESULT) else _registers(write[2])
