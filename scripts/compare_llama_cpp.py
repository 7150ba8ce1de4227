"""Servers in turns under the same load; see `compare_llama_cpp` beside this file, which calls it.

Memory is the peak of what all processes of a server hold together, each page counted once (their summed PSS): looked
at while it starts and after every load. Both servers keep what they have touched, so that nothing is missed between.
What they hold depends on their caches: ours keeps the keys and values of every prompt until the cache is full,
llama.cpp's those of its slots.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import psutil

from hardpoint.bench.datasets import PromptSettings
from hardpoint.bench.load import Target
from hardpoint.bench.serving import ServingSettings, run
from hardpoint.weights.store.folder import resolve

#: The server inside xllamacpp: model, port, slots, threads.
LLAMA = """
import sys, time, xllamacpp as x
p = x.CommonParams()
p.model.path, p.port, p.n_parallel = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
p.n_ctx = p.n_parallel * 1024
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = int(sys.argv[4])
server = x.Server(p)
while True:
    time.sleep(3600)
"""
SLOTS = 32
IN, OUT, LONG = 128, 64, 512


@dataclass(frozen=True)
class Contestant:
    """A way to start a server: command for (port)."""

    name: str
    command: Callable[[int], list[str]]
    environment: dict[str, str]


class Running:
    """A started server; a context that ends it."""

    def __init__(self, who: Contestant, model: str, log: Path, *, watch_memory: bool = False) -> None:
        """`watch_memory`: look at it while the server starts too, which slows the start."""
        self.name, self._model, self._watch_memory = who.name, model, watch_memory
        self.port = _free_port()
        self.log = log
        self.started = time.perf_counter()
        #: Bytes that all its processes held together at most, at the moments of `look_at_memory`.
        self.peak_memory = 0
        with log.open("w") as out:
            self._process = subprocess.Popen(
                who.command(self.port),
                stdout=out,
                stderr=subprocess.STDOUT,
                env=_usual_environment() | who.environment,
                start_new_session=True,
            )
        self.to_first_token = 0.0

    def __enter__(self) -> Running:
        try:
            self.to_first_token = self._first_token(self._watch_memory)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGINT)
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def settings(self, clients: int, requests: int, input_len: int, output_len: int, seed: int) -> ServingSettings:
        """A load of random prompts, none of which comes twice."""
        return ServingSettings(
            Target("127.0.0.1", self.port),
            model=self._model,
            requests=requests,
            warmup=0,
            concurrency=clients,
            output_len=output_len,
            prompts=PromptSettings(input_len=input_len, vocab_size=40_000, seed=seed),
        )

    def look_at_memory(self) -> None:
        """Note what all its processes hold together now."""
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._process.pid)
            total = sum(_proportional_bytes(process.pid) for process in (root, *root.children(recursive=True)))
            self.peak_memory = max(self.peak_memory, total)

    def _first_token(self, watch_memory: bool) -> float:
        """Seconds from the start of the process to the first token of a short prompt."""
        while time.perf_counter() - self.started < 600:
            if self._process.poll() is not None:
                sys.exit(f"{self.name} ended at once:\n{self.log.read_text()[-2000:]}")
            if watch_memory:
                self.look_at_memory()
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                    pass
                record = run(self.settings(1, 1, 8, 2, seed=99))[0]
                if record.error is None:
                    return record.events[0] + (time.perf_counter() - self.started - record.end)
            except OSError:
                pass
            time.sleep(0.01)
        sys.exit(f"{self.name} does not answer:\n{self.log.read_text()[-2000:]}")


def _proportional_bytes(pid: int) -> int:
    """Bytes of a process's memory, a page that n processes share as an nth; 0 for one that has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def _usual_environment() -> dict[str, str]:
    """As a user's: Python keeps the bytecode of what it imports; without, each start compiles anew for a second."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure(server: Running, clients: int, seed: int) -> float:
    """Tokens per second: of one client while it decodes, of several altogether; prompts' for clients 0."""
    if clients == 0:
        (record,) = run(server.settings(1, 1, LONG, 1, seed))
        _check(server, record.error)
        return LONG / record.events[0]
    records = run(server.settings(clients, clients, IN, OUT, seed))
    for record in records:
        _check(server, record.error)
    if clients == 1:
        return (OUT - 1) / (records[0].events[-1] - records[0].events[0])
    return clients * OUT / max(record.end for record in records)


def _check(server: Running, error: str | None) -> None:
    if error is not None:
        sys.exit(f"{server.name}: {error}")


def requantize(source: Path, target: Path) -> None:
    """The model with its matrices of 4 bits as Q4_0, for which llama.cpp has its fastest kernels here."""
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue
        nested = field.types[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=field.types[-1] if nested else None)
    for tensor in reader.tensors:
        data, kind = tensor.data, tensor.tensor_type
        if kind == gguf.GGMLQuantizationType.Q4_1:
            plain = gguf.quants.dequantize(data, kind)
            kind = gguf.GGMLQuantizationType.Q4_0
            data = gguf.quants.quantize(plain, kind)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def contestants(arguments: argparse.Namespace, folder: Path) -> list[Contestant]:
    """Ours, llama.cpp on the same file, and on its best case."""
    model, threads = resolve(arguments.model), str(arguments.threads)
    file = model if model.is_file() else next(model.glob("*.gguf"))

    def llama(name: str, path: Path) -> Contestant:
        own = arguments.llama_server
        flags = ["-np", str(SLOTS), "-c", str(SLOTS * 1024), "-t", threads]
        return Contestant(
            name,
            lambda port: (
                [own, "-m", str(path), "--port", str(port), *flags]
                if own
                else [sys.executable, "-c", LLAMA, str(path), str(port), str(SLOTS), threads]
            ),
            {} if own else {"PYTHONPATH": os.environ["PEERS"]},
        )

    hardpoint = [str(Path(sys.executable).with_name("hardpoint")), "serve", arguments.model, "--device", "cpu"]
    ours = Contestant(
        "hardpoint",
        lambda port: [*hardpoint, "--port", str(port), "--max-model-len", "1024", "--threads", threads],
        {},
    )
    found = [ours, llama(f"llama.cpp, {file.stem.rpartition('.')[2] or 'same file'}", file)]
    if "Q4_1" in file.name:
        best = folder / "best.Q4_0.gguf"
        requantize(file, best)
        found.append(llama("llama.cpp, as Q4_0", best))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Hardpoint beside llama.cpp")
    parser.add_argument("--model", default="smollm2", help="a pulled model (a GGUF file)")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--llama-server", help="a llama-server instead of the packaged one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        everybody = contestants(arguments, folder)
        starts = {
            who.name: [_start_once(who, arguments.model, folder) for _ in range(arguments.rounds)] for who in everybody
        }
        rows: dict[str, list[list[float]]] = {}
        with ExitStack() as stack:
            servers = [
                stack.enter_context(Running(who, arguments.model, folder / f"{n}.log", watch_memory=True))
                for n, who in enumerate(everybody)
            ]
            loads = [(f"{c} client{'s' if c > 1 else ''}, output tok/s", c) for c in arguments.clients]
            for server in servers:
                measure(server, 1, seed=1)  # warm
            for turn in range(arguments.rounds):
                order = servers if turn % 2 == 0 else servers[::-1]
                for label, clients in (*loads, (f"prefill {LONG}, tok/s", 0)):
                    results = {server.name: measure(server, clients, 1000 * turn + clients) for server in order}
                    for server in servers:
                        server.look_at_memory()
                    rows.setdefault(label, []).append([results[server.name] for server in servers])
                    print(f"  round {turn + 1}: {label}: {results}", file=sys.stderr)
            memory = [server.peak_memory / 1e9 for server in servers]
    _print(arguments, [who.name for who in everybody], rows, list(starts.values()), memory)


def _start_once(who: Contestant, model: str, folder: Path) -> float:
    with Running(who, model, folder / "start.log") as server:
        return server.to_first_token


def _print(
    arguments: argparse.Namespace,
    names: Sequence[str],
    rows: dict[str, list[list[float]]],
    starts: Sequence[Sequence[float]],
    memory: Sequence[float],
) -> None:
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{arguments.model}, {IN} in / {OUT} out, streamed over HTTP, {arguments.threads} threads, {date.today()}, ")
    print(f"{platform.machine()}, medians of {arguments.rounds} rounds in turns, load average {load}\n")
    print(f"| | {' | '.join(names)} | {' | '.join(f'against {name}' for name in names[1:])} |")
    print("|---" * (2 * len(names)) + "|")
    for label, rounds in rows.items():
        medians = [statistics.median(column) for column in zip(*rounds, strict=True)]
        ratios = [statistics.median(row[0] / row[n] for row in rounds) for n in range(1, len(names))]
        numbers = " | ".join(f"{value:.0f}" for value in medians)
        print(f"| {label} | {numbers} | {' | '.join(f'{ratio:.2f}x' for ratio in ratios)} |")
    blank = " | " * (len(names) - 1)
    print(f"| start to first token, s | {' | '.join(f'{statistics.median(s):.2f}' for s in starts)} |{blank}")
    print(f"| peak memory, GB | {' | '.join(f'{value:.2f}' for value in memory)} |{blank}")
    print("\n" + json.dumps({"rows": rows, "starts": starts, "memory": memory}), file=sys.stderr)


if __name__ == "__main__":
    main()
