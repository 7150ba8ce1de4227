"""What `hardpoint plugin new` writes, as a stranger meets it: core out of a wheel; built, installed, served."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from fresh import Environment, Wheelhouse, build_wheel

pytestmark = pytest.mark.packaging

TESTS = ("-m", "pytest", "-p", "no:cacheprovider", "-rs")


@dataclass(frozen=True)
class Brought:
    """A new plugin, installed beside the core.

    Attributes:
        environment: where both are installed; source: what the command wrote; said: what it printed.
    """

    environment: Environment
    source: Path
    said: str


@pytest.fixture(scope="module")
def brought(tmp_path_factory: pytest.TempPathFactory, wheelhouse: Wheelhouse) -> Brought:
    out, source = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("new") / "acme"
    environment = Environment(tmp_path_factory.mktemp("fresh"))
    environment.install(*wheelhouse.wheels())
    said = environment.hardpoint("plugin", "new", "acme-npu", "--into", source)
    build_wheel(source, out)
    environment.install(*out.glob("acme_npu_hardpoint-*.whl"))
    return Brought(environment, source, said)


def test_the_command_out_of_a_wheel_has_its_templates(brought: Brought) -> None:
    assert f"wrote {brought.source / 'pyproject.toml'}" in brought.said
    assert f"pip install {brought.source}" in brought.said


def test_doctor_passes_it_and_auto_leaves_it_alone(brought: Brought) -> None:
    told = json.loads(brought.environment.hardpoint("doctor", "--json"))
    (mine,) = [row for row in told["platforms"] if row["platform"] == "acme-npu"]
    assert (mine["status"], mine["distribution"], mine["kind"]) == ("PASS", "acme-npu-hardpoint", "test")
    assert "through 'acme-npu linear'" in mine["devices"][0]["computed"]
    chosen = brought.environment.python(
        "-c",
        "from hardpoint_platforms.discovery import discover; from hardpoint_platforms.selection import select; "
        "print(select('auto', discover()).platform)",
    )
    assert chosen.strip() == "cpu"


def test_its_own_tests_pass(brought: Brought) -> None:
    said = brought.environment.python(*TESTS, brought.source)
    assert " passed" in said
    skipped = [line for line in said.splitlines() if line.startswith("SKIPPED")]
    assert skipped
    assert all("left to the reference: " in line and line.endswith("no rounded inputs") for line in skipped), skipped


def test_its_own_tests_find_a_wrong_kernel(brought: Brought) -> None:
    where = brought.environment.python("-c", "import acme_npu_hardpoint as a; print(a.__path__[0])").strip()
    assert not Path(where).is_relative_to(brought.source)
    kernel = Path(where) / "linear.py"
    right = kernel.read_text(encoding="utf-8")
    assert "y + w[1]" in right
    kernel.write_text(right.replace("y + w[1]", "y - w[1]"), encoding="utf-8")
    try:
        with pytest.raises(AssertionError, match=r"Tensor-likes are not close"):
            brought.environment.python(*TESTS, brought.source, "-k", "kernel and q8_0")
    finally:
        kernel.write_text(right, encoding="utf-8")


@pytest.mark.real_model
def test_it_serves_a_real_model_at_once(brought: Brought, smollm2_path: Path) -> None:
    said = brought.environment.hardpoint(
        "run", smollm2_path, "What is the capital of France?", "--device", "acme-npu", "--temperature", "0",
        "--max-tokens", "12",
    )  # fmt: skip
    assert "Paris" in said
    rows = json.loads(brought.environment.hardpoint("explain", smollm2_path, "--device", "acme-npu", "--json"))
    assert {row["provider"] for row in rows if row["op"] == "linear"} == {"acme-npu linear"}
    assert {row["provider"] for row in rows if row["op"] == "attention"} == {"reference"}
