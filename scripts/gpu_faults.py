"""What a server on a GPU says when things go wrong: an engine that is killed while it records graphs, a GPU that others
have filled, a kernel that never ends. In each case the server must say what happened and exit, non-zero, within a time.

    python scripts/gpu_faults.py --device cuda        needs hardpoint, hardpoint-cuda and a GPU with 40 GB
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_check import LLAMA
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

GIB = 1 << 30
#: Put in front of the engine: every graph's replay is followed by a kernel that waits, once the file is there.
HANG = """
import os, sys
if "hardpoint.engine.process" in " ".join(sys.orig_argv):
    import importlib.abc, importlib.util
    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name != "hardpoint_torch_gpu.graphs": return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            execute = spec.loader.exec_module
            def changed(module):
                execute(module)
                run = module.GraphProgram.run
                def hanging(self, *args):
                    if os.path.exists(os.environ["HANG_NOW"]):
                        import torch
                        for _ in range(1000): torch.cuda._sleep(1 << 40)
                    return run(self, *args)
                module.GraphProgram.run = hanging
            spec.loader.exec_module = changed
            return spec
    sys.meta_path.insert(0, Finder())
"""


class Server:
    """`hardpoint serve` on made-up weights. Collects what it says."""

    def __init__(self, device: str, model: Path, *flags: str, **environment: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "hardpoint", "serve", str(model), "--device", device, "--port", str(self.port)]
        command += ["--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", "2048", *flags]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | environment
        )
        self.said: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        self.said.extend(iter(self.process.stdout.readline, ""))

    def until(self, what: Callable[[], bool], seconds: float) -> bool:
        """Whether `what` came true in time, while the server lived."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            if what():
                return True
            time.sleep(0.02)
        return False

    def ready(self) -> bool:
        """Whether it takes requests."""
        try:
            return bool(urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=1).status == 200)
        except OSError:
            return False

    def verdict(self, name: str, wanted: str, seconds: float) -> bool:
        """Wait for its end; whether it failed in time and said what was wanted (a regular expression)."""
        started = time.monotonic()
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = 0
        time.sleep(0.2)
        said = "".join(self.said)
        good = code != 0 and bool(re.search(wanted, said))
        print(f"{name}: {'ok' if good else 'FAILED'}, exit code {code} after {time.monotonic() - started:.1f} s")
        for line in said.strip().splitlines()[-3 if good else -20 :]:
            print(f"    {line[:300]}")
        return good


def used() -> int:
    """Bytes of the GPU that anybody holds."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def killed_while_recording(device: str, large: Path, _: Path) -> bool:
    """SIGKILL to the engine when weights and cache are there, and graphs are being recorded."""
    before = used()
    server = Server(device, large)
    if not server.until(lambda: used() - before > 50 * GIB, 90):
        return server.verdict("killed while recording", "it should have started", 1)
    time.sleep(1.0)
    os.kill(child_of(server.process.pid), signal.SIGKILL)
    return server.verdict("killed while recording", "SIGKILL", 20) and wait_for(lambda: used() - before < 4 * GIB)


def child_of(parent: int) -> int:
    """The process id of a child."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # gone meanwhile
            continue
        if int(fields[1]) == parent:
            return int(stat.parent.name)
    raise SystemExit("the server has no engine process")


def wait_for(what: Callable[[], bool]) -> bool:
    """Whether `what` comes true within ten seconds."""
    end = time.monotonic() + 10
    while not what() and time.monotonic() < end:
        time.sleep(0.1)
    return what()


def filled_by_others(device: str, large: Path, _: Path) -> bool:
    """16 GB of weights where 8 GB are free."""
    held = torch.empty(torch.cuda.mem_get_info()[0] - 8 * GIB, dtype=torch.uint8, device="cuda")
    good = Server(device, large).verdict("filled by others", "(?i)memory", 90)
    del held
    torch.cuda.empty_cache()
    return good


def a_kernel_hangs(device: str, _: Path, small: Path) -> bool:
    """A step that never ends: the stream's client gets an error, the server ends."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(HANG)
        now = Path(folder) / "now"
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH", ""))))
        server = Server(device, small, "--step-timeout", "5", PYTHONPATH=path, HANG_NOW=str(now))
        if not server.until(server.ready, 90):
            return server.verdict("a kernel hangs", "never ready", 1)
        now.touch()
        body = json.dumps({"model": str(small), "prompt": [1, 2, 3], "max_tokens": 50, "ignore_eos": True})
        ask = urllib.request.Request(
            f"http://127.0.0.1:{server.port}/v1/completions", body.encode(), {"content-type": "application/json"}
        )
        try:
            urllib.request.urlopen(ask, timeout=60).read()
            print("    the request was answered")
            return False
        except OSError as error:
            print(f"    the client got: {error}")
        return server.verdict("a kernel hangs", "hangs", 30)


def main() -> int:
    """All three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    with tempfile.TemporaryDirectory() as folder:
        models = []
        for name, layers in (("large", 32), ("small", 2)):
            models.append(Path(folder) / name)
            models[-1].mkdir()
            (models[-1] / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": layers}))
            words = WordLevel({"[UNK]": 0} | {f"w{number}": number for number in range(1, 100)}, unk_token="[UNK]")
            Tokenizer(words).save(str(models[-1] / "tokenizer.json"))
        faults = (killed_while_recording, filled_by_others, a_kernel_hangs)
        good = [fault(device, *models) for fault in faults]  # each of them, whatever the others said
        return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
