"""`hardpoint bench compare`: engines on the same workloads and device, in turns, so that noise falls on all alike."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hardpoint.bench.contestants import Setup, first_line
from hardpoint.bench.workloads import Workload, workload
from hardpoint.charts import figure, save
from hardpoint.config.engine import ModelConfig
from hardpoint.errors import ConfigError, EngineError
from hardpoint.weights.checkpoint import open_checkpoint


@dataclass(frozen=True)
class Entry:
    """One engine: how long it took to start, and seconds of each round by workload."""

    name: str
    version: str
    start: float
    seconds: Mapping[str, list[float]] = field(default_factory=dict)


class Child:
    """An engine in a process of its own; a context that ends it."""

    def __init__(self, name: str, setup: Setup) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "hardpoint.bench.contestants", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self.opened = self._ask(first_line(setup))
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def run(self, asked: Mapping[str, Any], wanted: int) -> float:
        """Seconds of a workload, by the arguments of `workload`.

        Raises EngineError if the engine fails, or makes another number of tokens than is wanted.
        """
        told = self._ask(json.dumps(asked))
        if told["output_tokens"] != wanted:
            raise EngineError(
                f"{self.name} made {told['output_tokens']} tokens in workload {asked['name']}, not {wanted}"
            )
        return float(told["seconds"])

    def _ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EngineError(f"{self.name} ended (exit code {self._process.wait()}); see above") from None
        told = self._process.stdout.readline()
        if not told:
            raise EngineError(f"{self.name} ended (exit code {self._process.wait()}); see above")
        answer: dict[str, Any] = json.loads(told)
        if "error" in answer:
            raise EngineError(f"{self.name}: {answer['error']}")
        return answer


def compare(
    names: Sequence[str],
    setup: Setup,
    workloads: Sequence[str],
    vocabulary: int,
    *,
    rounds: int,
    on_round: Callable[[str], None] = lambda text: None,
) -> list[Entry]:
    """Open all engines, then let them take turns: a round that does not count, then `rounds` of each workload.

    Raises EngineError, ConfigError.
    """
    for name in workloads:
        workload(name, vocabulary)
    longest = setup.config.model.max_model_len or 1 << 30
    with ExitStack() as stack:
        children = []
        for name in names:
            child = stack.enter_context(Child(name, setup))
            on_round(f"{child.opened['version']}: ready in {child.opened['seconds']:.1f} s")
            children.append(child)
        entries = [
            Entry(child.name, child.opened["version"], child.opened["seconds"], {name: [] for name in workloads})
            for child in children
        ]
        for work in workloads:
            for turn in range(rounds + 1):
                taken = []
                asked = {"name": work, "vocabulary": vocabulary, "seed": turn, "longest": longest}
                wanted = workload(work, vocabulary, turn, longest).output_tokens
                order = list(zip(children, entries, strict=True))
                for child, entry in order if turn % 2 else reversed(order):
                    seconds = child.run(asked, wanted)
                    taken.append(f"{child.name} {seconds:.3f} s")
                    if turn:
                        entry.seconds[work].append(seconds)
                on_round(f"{work}, {f'round {turn}' if turn else 'warm-up'}: " + ", ".join(taken))
    return entries


def vocabulary_of(model: ModelConfig) -> int:
    """Token ids of a model, from its config. Raises HardpointError where it cannot be opened."""
    checkpoint = open_checkpoint(model)
    checkpoint.weights.close()
    values = checkpoint.config.get("text_config") or checkpoint.config
    try:
        return int(values["vocab_size"])
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"{checkpoint.path}: its config has no 'vocab_size'") from None


@dataclass(frozen=True)
class Row:
    """A workload's numbers: what is told (`what`), one per engine, more is better unless `lower`."""

    workload: str
    what: str
    numbers: tuple[float, ...]
    lower: bool


def rows(entries: Sequence[Entry], vocabulary: int, longest: int) -> list[Row]:
    """Medians over the rounds, in the unit that fits the workload."""
    found = []
    for name in entries[0].seconds:
        # Lengths alone count here, and a seed gives each round others: all of them.
        each = [
            [_number(name, workload(name, vocabulary, turn, longest), seconds) for turn, seconds in enumerate(taken, 1)]
            for taken in (entry.seconds[name] for entry in entries)
        ]
        what = {"a": "ms per output token", "d": "prompt tok/s"}.get(name, "output tok/s")
        found.append(Row(name, what, tuple(map(statistics.median, each)), lower=name == "a"))
    found.append(Row("start", "s", tuple(entry.start for entry in entries), lower=True))
    return found


def _number(name: str, work: Workload, seconds: float) -> float:
    if name == "a":
        return 1e3 * seconds / work.output_tokens
    return (work.prompt_tokens if name == "d" else work.output_tokens) / seconds


def table(entries: Sequence[Entry], found: Sequence[Row]) -> list[str]:
    """Markdown; ratios above 1 mean that the first engine is ahead."""
    first, *others = entries
    heads = ["workload", "", *(entry.name for entry in entries), *(f"against {other.name}" for other in others)]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in found:
        ratios = [ours_ahead(row, place) for place in range(1, len(entries))]
        cells = [row.workload, row.what, *map(_short, row.numbers), *(f"{ratio:.2f}x" for ratio in ratios)]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, "", *(f"{entry.name}: {entry.version}" for entry in (first, *others))]


def ours_ahead(row: Row, place: int) -> float:
    """How far the first engine is ahead of another, as a ratio."""
    ours, theirs = row.numbers[0], row.numbers[place]
    return theirs / ours if row.lower else ours / theirs


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.2f}"


def draw(path: Path, entries: Sequence[Entry], found: Sequence[Row]) -> None:
    """A PNG: bars per workload, the first engine's of height 1, higher is better. Raises ConfigError."""
    drawn = figure(12, 4)
    axis = drawn.subplots()
    width = 0.8 / len(entries)
    for place, entry in enumerate(entries):
        heights = [1.0 if not place else 1 / ours_ahead(row, place) for row in found]
        axis.bar([x + place * width for x in range(len(found))], heights, width, label=entry.version)
    axis.set(xticks=[x + 0.4 - width / 2 for x in range(len(found))], ylabel=f"speed, {entries[0].name} = 1")
    axis.set_xticklabels([f"{row.workload}\n{_short(row.numbers[0])} {row.what}" for row in found], fontsize="small")
    axis.legend()
    save(drawn, path)


def write_json(path: Path, setup: Setup, entries: Sequence[Entry], found: Sequence[Row]) -> None:
    """All rounds. Raises ConfigError where the file cannot be written."""
    plain = {
        "setup": json.loads(first_line(setup)),
        "engines": [vars(entry) for entry in entries],
        "rows": [vars(row) for row in found],
    }
    try:
        path.write_text(json.dumps(plain, indent=1))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
