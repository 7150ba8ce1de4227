"""Every fault of the stranger's plugin is caught by the contract it breaks, and told with distribution and line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.reference

HERE = Path(__file__).parent
PLUGIN = HERE.parents[1] / "vendor" / "acme_npu"

#: fault -> group and cases of the kit, contract that must fail, words of the message, and the place that is named.
CASES: dict[str, tuple[str, str, str, str, str]] = {
    "mask_off_by_one": ("attention", "*/prefill-plain-*/float32", "attention", "is off by", "in Attention.build"),
    "stale_page_table": ("programs", "*/4-*-page-tables-change-*", "program", "step 1 of", "in CapturedProgram.run"),
    "slot_off_by_one": ("attention", "*/decode-plain-*/float32", "attention", "off by", "in Attention.build"),
    "half_softmax": ("attention", "*/prefill-plain-*kv-float32/float32", "attention", "off by", "in Attention.build"),
    "padding_leaks": ("attention", "*/decode-plain-*/float32", "attention", "off by 60", "in Attention.build"),
    "rng_per_batch": ("sampling", "*/a-row-alone-*", "sample", "", "in Sample.build"),
    "oom_swallowed": ("memory", "*/running-out-*", "accounting", "2.50 bytes returns a tensor", "in AcmeDevice.zeros"),
    "memory_leaks": ("memory", "*/1000-cycles-*", "accounting", "MiB behind", "in AcmeDevice.zeros"),
    "wrong_dtype": ("ops", "ops/norm/rms-5-64*/float32", "norm", "float64, the contract says", "in Norm.build"),
    "wrong_shape": ("ops", "ops/logits/plain/float32", "logits", "has the shape", "in Logits.build"),
    "kernel_raises": ("ops", "ops/rope/16-of-16-*-False-tail-False/float32", "rope", "0xDEAD", "in rope"),
    "claims_page_size": ("attention", "*/decode-plain-*-page-24-*", "attention", "off by|out of bounds", "write_rows"),
    "claims_dtype": ("ops", "ops/linear/6x48*/float16", "linear", "no float16", "in linear"),
    "missing_method": ("load", "*/opens-and-is-valid", "device", "abstract methods build", "<genexpr>"),
    # The loader raises it; its message has the line of the method.
    "wrong_signature": ("load", "*/opens-and-is-valid", "device", r"Norm.supports.* is at .*providers\.py:\d+", ""),
    "permuted_heads": ("state", "*/keys-and-values-page-16-export-*", "state_cache", "off by", "export_pages"),
    "neighbour_scale": ("ops", "*/quantized-linear/q4_0/*", "quantized linear", "of its length", "in Linear.build"),
    "results_die": ("programs", "*/results-outlive-*", "program", "read later", "in CapturedProgram.run"),
    "kernel_hangs": ("ops", "ops/gated_activation/*silu*/float32", "gated_activation", "hangs", "in sleep"),
}  # fmt: skip
#: Hangs come last: their threads stay.
HANGS = {"kernel_hangs": 1.5}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The plugin as if it were installed: its folder and its metadata on the path of another process."""
    site = tmp_path_factory.mktemp("site")
    info = site / "acme_npu_hardpoint-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-npu-hardpoint\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[hardpoint.platforms]\nacme = acme_npu.platform\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(site), str(PLUGIN)))}


@pytest.fixture(scope="module")
def verdicts(environment: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    """fault -> verdicts of its cases; "ok:" and the fault -> those of the same cases without it."""
    skip = ("claims_page_size", "claims_dtype")  # what they claim is not checked where it is not claimed
    sound = [["", group, case, None] for fault, (group, case, *_) in CASES.items() if fault not in skip]
    wrong = [[fault, group, case, HANGS.get(fault)] for fault, (group, case, *_) in CASES.items()]
    said = subprocess.run(
        [sys.executable, str(HERE / "run_faults.py"), json.dumps([*sound, *wrong])],
        capture_output=True, text=True, env=environment, timeout=500, check=False,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr[-3000:]
    found: dict[str, list[dict[str, Any]]] = {}
    named = [f"ok:{fault}" for fault in CASES if fault not in skip] + list(CASES)
    for name, line in zip(named, said.stdout.splitlines(), strict=True):
        found[name] = json.loads(line)["verdicts"]
    return found


def test_the_table_names_every_fault() -> None:
    text = (PLUGIN / "acme_npu" / "faults.py").read_text(encoding="utf-8")
    assert set(re.findall(r'^    "(\w+)": "', text, re.MULTILINE)) == set(CASES)


@pytest.mark.parametrize("fault", CASES)
def test_a_fault_is_caught_and_named(fault: str, verdicts: dict[str, list[dict[str, Any]]]) -> None:
    _, _, contract, words, where = CASES[fault]
    failed = [verdict for verdict in verdicts[fault] if verdict["status"] == "fail"]
    assert failed, [verdict["message"] for verdict in verdicts[fault]]
    for verdict in failed:
        assert verdict["contract"] == contract
        assert verdict["message"].startswith(f"acme-npu-hardpoint 0.1.0: {contract} ")
    assert any(re.search(words, verdict["message"]) for verdict in failed), failed[0]["message"]
    places = [verdict["blame"] for verdict in failed]
    assert all(re.search(rf"\.py:\d+ .*{where}", place) for place in places), places


@pytest.mark.parametrize(
    ("fault", "file"), [("wrong_dtype", "pointwise"), ("wrong_shape", "dense"), ("rng_per_batch", "sampling")]
)
def test_a_kernel_behind_a_wrapper_is_blamed_in_its_own_file(
    fault: str, file: str, verdicts: dict[str, list[dict[str, Any]]]
) -> None:
    failed = [verdict for verdict in verdicts[fault] if verdict["status"] == "fail"]
    assert all(f"/acme_npu/ops/{file}.py:" in verdict["blame"] for verdict in failed)


@pytest.mark.parametrize("fault", [fault for fault in CASES if not fault.startswith("claims_")])
def test_the_same_cases_pass_without_it(fault: str, verdicts: dict[str, list[dict[str, Any]]]) -> None:
    sound = verdicts[f"ok:{fault}"]
    assert sound
    assert {verdict["status"] for verdict in sound} == {"pass"}, sound
