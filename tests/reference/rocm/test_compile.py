"""Kernels compile for AMD's architectures, within what a program has there; `make rocm-aot` compiles all for all.

By the Triton that torch's builds for GPUs ask for, where `.ci/install` could have it, as AMD's users have one as old;
else by the one at hand, which pip takes beside torch's CPU build and which is newer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from spills import SPILLS, allowed

pytestmark = pytest.mark.reference

GATE = Path(__file__).with_name("compile_gate.py")
#: Where `.ci/install` puts that Triton.
PINNED = Path(sys.prefix) / "triton-pinned"
CHIPS = ("gfx942", "gfx950", "gfx1100")
#: Kernels that are known to exist: what is noted may grow, and shall not shrink unseen.
KERNELS = {
    "_decode", "_prefill", "_store", "_gemv", "_skinny", "_norm", "_rope", "_prepare", "_activate", "_pieces", "_rows",
}  # fmt: skip


#: Printed by the same process, which takes seconds to start: what is too much, and what is not.
CHECK = """
import sys
sys.path.append(sys.argv.pop())
import compile_gate
from ahead_of_time import Compiled
at, other = compile_gate.target("gfx942"), compile_gate.target("gfx1100")
for name, found, where in (("_norm", Compiled(1, 65536, 0), at), ("_norm", Compiled(1, 65537, 0), at),
                           ("_decode", Compiled(1, 0, 1), at), ("_norm", Compiled(1, 0, 1), at),
                           ("_decode", Compiled(1, 0, 1), other)):
    print("judged", repr(compile_gate.complaint(name, found, where)))
sys.exit(compile_gate.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """The gate as a process of its own, where kernels are compiled and not interpreted."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    if PINNED.is_dir():
        before = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(PINNED), *([before] if before else [])])
    return subprocess.run(
        [sys.executable, "-c", CHECK, "--turns", *CHIPS, str(GATE.parent)],
        capture_output=True,
        text=True,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))},
        check=False,
    )


def test_every_kernel_compiles_for_an_architecture_in_turn(gate: subprocess.CompletedProcess[str]) -> None:
    assert gate.returncode == 0, gate.stdout + gate.stderr
    lines = [line.split() for line in gate.stdout.splitlines() if " bytes, LDS " in line]
    assert {words[0] for words in lines} >= KERNELS
    assert {words[1].rstrip(":") for words in lines} == set(CHIPS)


def test_the_gate_knows_what_is_too_much(gate: subprocess.CompletedProcess[str]) -> None:
    assert [line for line in gate.stdout.splitlines() if line.startswith("judged")] == [
        "judged ''",
        "judged 'LDS 65537, a program of gfx942 has 65536'",
        "judged 'spills 1 registers, 0 are allowed'",
        "judged 'spills 1 registers, 0 are allowed'",
        "judged ''",
    ]


def test_it_is_the_triton_that_torch_asks_for(gate: subprocess.CompletedProcess[str]) -> None:
    """`Makefile` names it; without that folder the gate took what is at hand."""
    said = next(line for line in reversed(gate.stdout.splitlines()) if line.startswith("Triton "))
    held = sorted(PINNED.glob("triton-*.dist-info"))
    wanted = held[0].name.removesuffix(".dist-info").removeprefix("triton-") if held else version("triton")
    assert said.split()[1].rstrip(",") == wanted


@pytest.mark.parametrize(("held", "table"), [("3.7.1", (3, 7)), ("3.8.0", (3, 7)), ("3.9.0", (3, 9)),
                                                ("3.10.0+git", (3, 9)), ("3.6.0", (3, 7))])  # fmt: skip
def test_each_triton_has_its_own_allowances(held: str, table: tuple[int, int]) -> None:
    for name, (wide, narrow) in SPILLS[table].items():
        assert (allowed(held, 64, name), allowed(held, 32, name)) == (wide, narrow)
    assert allowed(held, 64, "_norm") == allowed(held, 32, "_norm") == 0
    of_one = 600 if table == (3, 7) else SPILLS[table]["_eight_bit_dot"][1]
    assert allowed(held, 32, "_eight_bit_dot", "gfx1201") == of_one
    assert allowed(held, 32, "_eight_bit_dot", "gfx1100") == SPILLS[table]["_eight_bit_dot"][1]
