"""Ranks as processes: each opens a device of the platform, joins a mesh, and does its part of what the parent asks.

    parent (group `collectives`)              child, once per rank for all meshes
    starts as many as a mesh needs            opens its device, says "ready"
    one line per rank: task, address     ->   joins the mesh if it is not in it yet, performs, compares
    one line per rank                    <-   ok, or what is wrong and where

A rank that does not answer ends all: the next task starts new ones. A child ends with its standard input.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import socket
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import asdict, dataclass
from typing import IO, Any

from hardpoint_platforms.communication import Communicator, Mesh
from hardpoint_platforms.conformance import blame
from hardpoint_platforms.conformance.checks import Refused, Unverified, Wrong
from hardpoint_platforms.conformance.subject import Subject, named
from hardpoint_platforms.errors import DeviceUnavailable, UnsupportedOperation

#: Seconds that ranks wait for each other, that they take to start, and that others get once one has failed.
JOIN, _START, _REST = 40.0, 90.0, 1.0
#: Seconds that one rank's answer is waited for before the next one's.
_LOOK = 0.01


@dataclass(frozen=True)
class Task:
    """A collective (`name`) of tensors of `dtype` on a mesh; `seed` makes the tensors."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    dtype: str
    name: str
    seed: int

    @property
    def mesh(self) -> Mesh:
        """The grid of ranks."""
        return Mesh(tuple(self.axes), tuple(self.sizes))

    @property
    def world(self) -> int:
        """Ranks of the mesh."""
        return math.prod(self.sizes)


class Ranks:
    """The parent's side. Owns the processes, which end with it."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._children: list[_Child] = []
        self._addresses: dict[Mesh, str] = {}
        weakref.finalize(self, _end_all, self._children)

    def run(self, task: Task) -> None:
        """Have every rank of the mesh perform the task. Raises Wrong, Refused or Unverified, as the first rank did."""
        own = self._subject.index
        indexes = [own, *(info.index for info in self._subject.platform.probe().devices if info.index != own)]
        try:
            while len(self._children) < task.world:
                self._children.append(_Child(self._subject, indexes[len(self._children) % len(indexes)]))
            children = self._children[: task.world]
            for child in children:
                child.wait_ready()
            address = self._addresses.setdefault(task.mesh, free_address())
            for rank, child in enumerate(children):
                child.ask({"task": asdict(task), "rank": rank, "address": address, "shared": len(indexes) < task.world})
            _collect(children)
        except BaseException as error:
            self._addresses.clear()
            if not getattr(error, "answered", False):
                _end_all(self._children)
            raise


class _Child:
    """One rank's process."""

    def __init__(self, subject: Subject, index: int) -> None:
        told = {"device": f"{subject.entry.name}:{index}", "options": dict(subject.options)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps(told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._ready = False
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        assert self._process.stdout is not None
        threading.Thread(target=_feed, args=(self._process.stdout, self._lines), daemon=True).start()

    def wait_ready(self) -> None:
        """Raises what it says instead."""
        if not self._ready:
            raise_told(self.answer(_START) or {"wrong": f"a rank's process did not start within {_START:g} s"})
            self._ready = True

    def ask(self, task: dict[str, Any]) -> None:
        """Send a task."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone: its answer says so
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()

    def answer(self, seconds: float) -> dict[str, Any] | None:
        """The next line; None if none comes in time; what its end is called where it is gone."""
        try:
            said = self._lines.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            return None
        return said or {"gone": True, "wrong": f"a rank's process ended with exit code {self._process.wait()}"}

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()


def _collect(children: list[_Child]) -> None:
    """Wait for every rank's answer; not for long once one has failed. A rank that is gone is why others fail."""
    until, failed = time.monotonic() + JOIN, list[dict[str, Any]]()
    waiting = dict(enumerate(children))
    while waiting and time.monotonic() < until:
        for rank, child in list(waiting.items()):
            said = child.answer(_LOOK)
            if said is None:
                continue
            del waiting[rank]
            if "ok" not in said:
                failed.append(said)
                until = min(until, time.monotonic() + _REST)
    if failed:
        try:
            raise_told(next((said for said in failed if "gone" in said), failed[0]))
        except Exception as error:
            # then the processes are fit for the next task, in a mesh that is joined anew
            error.answered = not waiting and not any("gone" in said for said in failed)  # type: ignore[attr-defined]
            raise
    if waiting:
        raise Wrong(f"ranks {list(waiting)} of {len(children)} do not come back within {JOIN:g} s")


def _end_all(children: list[_Child]) -> None:
    while children:
        children.pop().end()


def _feed(stream: IO[str], lines: queue.Queue[dict[str, Any]]) -> None:
    """The end of the stream becomes an empty answer."""
    with contextlib.suppress(ValueError):  # closed
        for line in stream:
            lines.put(json.loads(line))
    lines.put({})


def raise_told(said: dict[str, Any]) -> None:
    """Raise what a child told; nothing for {"ok": true}."""
    if "refused" in said:
        raise Refused(said["refused"])
    if "unverified" in said:
        raise Unverified(said["unverified"])
    if "wrong" in said:
        more = {key: said[key] for key in ("error", "tolerance") if key in said}
        raise Wrong(said["wrong"], place=said.get("place", ""), **more)


def free_address() -> str:
    """A rendezvous on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def main() -> int:
    """A child. What the plugin prints goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    told = json.loads(sys.argv[1])
    subject: Subject | None = None
    said: dict[str, Any] = {"ok": True}
    try:
        import torch

        torch.set_num_threads(1)
        subject = named(told["device"], told["options"])
        subject.device.synchronize()
    except BaseException as error:
        said = _told(error, subject, shared=False)
    _say(out, said)
    joined: dict[str, Communicator] = {}
    if subject is not None:
        for line in sys.stdin:
            _say(out, _answer(subject, joined, json.loads(line)))
    sys.stderr.flush()
    os._exit(0)  # threads of a broken communicator may never end


def _answer(subject: Subject, joined: dict[str, Communicator], asked: dict[str, Any]) -> dict[str, Any]:
    from hardpoint_platforms.conformance.collectives import perform

    task, rank, address = Task(**asked["task"]), asked["rank"], asked["address"]
    try:
        if address not in joined:
            try:
                joined[address] = subject.device.communicator(task.mesh, rank, address)
            except (DeviceUnavailable, UnsupportedOperation) as error:
                return _told(error, subject, asked["shared"])
            if joined[address].rank != rank:
                raise Wrong(f"rank {rank} says that it is rank {joined[address].rank}")
        perform(subject.device, joined[address], task)
    except BaseException as error:
        return _told(error, subject, shared=False)
    return {"ok": True}


def _told(error: BaseException, subject: Subject | None, shared: bool) -> dict[str, Any]:
    message = getattr(error, "message", str(error))
    if shared:
        return {"unverified": f"there are fewer devices than ranks, and: {message}"}
    if isinstance(error, (Refused, UnsupportedOperation)):
        return {"refused": message}
    folders = subject.folders if subject is not None else ()
    if isinstance(error, Wrong):
        place = blame.of_code(error.subject_code) if error.subject_code is not None else ""
        numbers = {"error": error.error, "tolerance": error.tolerance}
        return {"wrong": message, "place": place or blame.of_error(error, folders), **numbers}
    return {"wrong": f"{type(error).__name__}: {message}", "place": blame.of_error(error, folders)}


def _say(out: IO[str], said: dict[str, Any]) -> None:
    out.write(json.dumps(said) + "\n")
    out.flush()


if __name__ == "__main__":
    sys.exit(main())
