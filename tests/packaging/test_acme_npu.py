"""The stranger's plugin (tests/vendor/acme_npu) as a wheel beside the core's wheels, in a fresh environment."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from fresh import CHECKOUT, Environment, Wheelhouse, build_wheel

from hardpoint_platforms.conformance.ladder import reached
from hardpoint_platforms.conformance.verdict import Status, Verdict

pytestmark = pytest.mark.packaging

SOURCE = CHECKOUT / "tests" / "vendor" / "acme_npu"
#: Little memory and few programs, so that starting is quick.
SMALL = (
    "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "2", "--max-batch-tokens", "64",
    "--kv-cache-memory", "32MiB",
)  # fmt: skip
#: Every check but nine tenths of the scheduler's random traces: they do not meet the device, would take half of the
#: time, and are in tests/unit/scheduler too.
CASES = ("[!s]*", "s[!c]*", "scheduler/*/traces-0-*")
QUESTION = "What is the capital of France?"
#: Opens the stranger's device, then a rival's that wants the same backend of torch.
RIVALS = """
import sys
sys.path.insert(0, sys.argv[1])
from hardpoint_platforms.discovery import discover
from hardpoint_platforms.errors import HardpointError
from hardpoint_platforms.selection import close_device, open_device, select
registry = discover()
print(registry.entry("acme").manifest.process_exclusive)
acme = open_device(select("acme", registry))
try:
    open_device(select("rival", registry))
except HardpointError as error:
    print(error)
close_device(acme)
print(open_device(select("rival", registry)).info)
"""
RIVAL = """
from hardpoint_platforms.device import DeviceInfo
from hardpoint_platforms.hookspecs import hookimpl
from hardpoint_platforms.platform import Platform, ProbeResult
from hardpoint_platforms.reference.platform import ReferenceDevice
class Device(ReferenceDevice):
    info = DeviceInfo("rival", 0, "a rival")
class Rival(Platform):
    def probe(self):
        return ProbeResult((Device.info,))
    def open(self, index, options):
        return Device()
@hookimpl
def hardpoint_platform():
    return Rival()
"""


#: A tiny model on each of the ways given: {name: arguments of LLM}.
TRIED = """
import json, sys
from hardpoint import LLM, SamplingParams
from hardpoint_platforms.errors import HardpointError
model, said = sys.argv[1], {}
for name, options in json.loads(sys.argv[2]).items():
    try:
        with LLM(model, dtype="float32", max_model_len=256, max_num_seqs=2, max_batch_tokens=64,
                 kv_cache_memory="32MiB", **options) as llm:
            outputs = llm.generate(["abcdefg"], SamplingParams(temperature=0.0, max_tokens=9), use_tqdm=False)
            said[name] = {"tokens": list(outputs[0].outputs[0].token_ids), "device": llm.info.device}
    except HardpointError as error:
        said[name] = {"error": str(error), "kind": type(error).__name__}
print(json.dumps(said))
"""
FAULTS = ("missing_method", "wrong_signature", "kernel_raises", "wrong_dtype", "wrong_shape")
WAYS: dict[str, dict[str, Any]] = {
    "acme": {"device": "acme"},
    "reference": {"device": "reference"},
    "acme last": {"placement": "layers[0:1]=reference,layers[1:2]=acme"},
    "acme first": {"placement": "layers[0:1]=acme,layers[1:2]=reference"},
    **{fault: {"device": "acme", "device_options": {"fault": fault}} for fault in FAULTS},
}


class Servers(Environment):
    """An environment that also starts processes which stay."""

    def start(self, log: Path, *arguments: str | Path) -> subprocess.Popen[bytes]:
        command = [str(self._folder / "bin" / "python"), *map(str, arguments)]
        with log.open("wb") as out:
            return subprocess.Popen(command, stdout=out, stderr=out, cwd=self._folder, env=self._clean)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, wheelhouse: Wheelhouse) -> Servers:
    """Core, SPI and the stranger, all from wheels; one thread per process, since cores may be few. Doctor passes only
    where every plugin that is announced is there, so the processor's is, too."""
    out = tmp_path_factory.mktemp("wheels")
    source = tmp_path_factory.mktemp("source") / "acme_npu"
    shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
    build_wheel(source, out)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    made = Servers(tmp_path_factory.mktemp("fresh"))
    made.install(*wheelhouse.wheels(), *out.glob("*.whl"))
    return made


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny Llama with heads of 12 numbers, which the chip's lanes of 8 do not take."""
    sys.path.insert(0, str(CHECKOUT / "tests" / "reference" / "cases"))
    from tiny_models import llama_config, random_weights, save_llama

    config, folder = llama_config(head_dim=12), tmp_path_factory.mktemp("model") / "tiny"
    save_llama(folder, config, random_weights(config), None)
    return folder


@pytest.fixture(scope="module")
def told(environment: Environment, tiny_folder: Path) -> dict[str, Any]:
    """What one process says of the tiny model in each way of `WAYS`: tokens and devices, or the error."""
    said: dict[str, Any] = json.loads(environment.python("-c", TRIED, tiny_folder, json.dumps(WAYS)))
    return said


def generated(environment: Environment, model: Path, device: str, *flags: str) -> str:
    said = environment.hardpoint("run", model, QUESTION, "--device", device, "--temperature", "0", *SMALL, *flags)
    return said.strip()


def test_it_leans_on_wheels_alone(environment: Environment) -> None:
    where = environment.python("-c", "import acme_npu, hardpoint; print(acme_npu.__file__, hardpoint.__file__)")
    assert str(CHECKOUT) not in where


def test_doctor_lists_it(environment: Environment) -> None:
    told = json.loads(environment.hardpoint("doctor", "--json"))
    (mine,) = [row for row in told["platforms"] if row["platform"] == "acme"]
    assert (mine["status"], mine["distribution"], mine["kind"]) == ("PASS", "acme-npu-hardpoint", "accelerator")
    assert "through 'acme linear'" in mine["devices"][0]["computed"]


def test_explain_shows_providers_and_refusals(environment: Environment, tiny_folder: Path) -> None:
    rows = json.loads(environment.hardpoint("explain", tiny_folder, "--device", "acme", "--json"))
    assert {row["provider"] for row in rows if row["op"] == "linear"} == {"acme linear"}
    attention = [row for row in rows if row["op"] == "attention"]
    assert {row["provider"] for row in attention} == {"reference"}
    assert "head_dim 12 is not a multiple of 8" in json.dumps(attention)


def test_what_it_refuses_runs_on_its_memory(told: dict[str, Any]) -> None:
    """The reference reads and writes the chip's blocked pages."""
    assert len(told["acme"]["tokens"]) == 9
    assert told["acme"]["tokens"] == told["reference"]["tokens"]


def test_layers_on_it_and_on_others_give_the_same_tokens(told: dict[str, Any]) -> None:
    """The model is cut between the stranger and the reference, either one first."""
    assert told["acme last"]["device"] == "reference:0 (layers 0-0) + acme:0 (layers 1-1)"
    assert told["acme first"]["device"] == "acme:0 (layers 0-0) + reference:0 (layers 1-1)"
    assert told["acme last"]["tokens"] == told["acme first"]["tokens"] == told["reference"]["tokens"]


def test_one_process_has_one_of_its_kind(environment: Environment, tmp_path: Path) -> None:
    (tmp_path / "rival").mkdir()
    (tmp_path / "rival" / "__init__.py").write_text(RIVAL)
    manifest = json.loads((SOURCE / "acme_npu" / "hardpoint.json").read_text())
    manifest |= {"name": "rival", "vendor": "Rival", "options_schema": {}}
    (tmp_path / "rival" / "hardpoint.json").write_text(json.dumps(manifest))
    info = tmp_path / "rival-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rival\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hardpoint.platforms]\nrival = rival\n")
    said = environment.python("-c", RIVALS, tmp_path)
    tokens, refused, *_, opened = said.strip().splitlines()
    assert tokens == "('torch-privateuse1',)"
    assert "platform 'rival' (rival) needs 'torch-privateuse1' for itself" in refused
    assert "acme-npu-hardpoint" in refused
    assert opened == "rival:0"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("missing_method", r"acme-npu-hardpoint 0\.1\.0: opening acme:0 failed.*abstract class Rope"),
        ("wrong_signature", r"acme-npu-hardpoint 0\.1\.0: Norm\.supports\(self\) cannot take the core's call"),
        (
            "kernel_raises",
            r"acme-npu-hardpoint 0\.1\.0: rope at \S+ \(acme rope on acme:0\) raised RuntimeError: acme firmware.*"
            r"pointwise\.py:\d+ in rope.*--device acme --level 1",
        ),
        (
            "wrong_dtype",
            r"acme-npu-hardpoint 0\.1\.0: norm at \S+ \(acme norm\) returned float64 .*pointwise\.py:\d+ in",
        ),
        (
            "wrong_shape",
            r"acme-npu-hardpoint 0\.1\.0: logits at \S+ .*the contract says float32 \[\d, 300\].*dense\.py",
        ),
    ],
)
def test_a_wrong_plugin_is_named_when_it_serves(told: dict[str, Any], fault: str, words: str) -> None:
    assert re.search(words, told[fault]["error"], re.DOTALL), told[fault]
    assert told[fault]["kind"] == "PluginError"


def test_the_command_names_it_and_fails(environment: Environment, tiny_folder: Path) -> None:
    with pytest.raises(AssertionError) as caught:
        generated(environment, tiny_folder, "acme", "--raw", "--max-tokens", "2", "--option", "fault=kernel_raises")
    assert re.search(r"acme-npu-hardpoint 0\.1\.0: rope at \S+ .*acme firmware", str(caught.value), re.DOTALL)
    assert "please report it" not in str(caught.value)


def test_a_kernel_that_hangs_ends_the_server_by_name(environment: Servers, tiny_folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    flags = ("--device", "acme", "--port", "0", "--option", "fault=kernel_hangs", "--startup-timeout", "8", *SMALL)
    server = environment.start(log, "-m", "hardpoint", "serve", tiny_folder, *flags)
    try:
        assert server.wait(120) not in (0, None)
    finally:
        server.kill()
    said = " ".join(log.read_text(errors="replace").split())
    assert re.search(
        r"error: platform plugin 'acme': acme-npu-hardpoint 0\.1\.0: gated_activation at layers\.0\.mlp\.act_fn "
        r"\(acme gated_activation on acme:0\) does not come back: no progress for 8 s in phase 'trial of the ops' of "
        r"starting, at \S+acme_npu/ops/provider\.py:\d+ in sleep",
        said,
    ), said


def test_its_own_tests_pass(environment: Environment) -> None:
    said = environment.python("-m", "pytest", "-p", "no:cacheprovider", "-rs", SOURCE)
    assert " passed" in said
    assert "skipped" not in said


def test_it_reaches_level_5(environment: Environment) -> None:
    cases = [word for case in CASES for word in ("--case", case)]
    told = json.loads(environment.hardpoint("conformance", "--device", "acme", "--level", "5", *cases, "--json"))
    verdicts = [Verdict(**row | {"status": Status(row["status"])}) for row in told["verdicts"]]
    failed = [verdict.case for verdict in verdicts if verdict.status is Status.FAIL]
    level, advice = reached(verdicts, 5)
    assert (failed, level, told["distribution"]) == ([], 5, "acme-npu-hardpoint"), advice
    reasons = {verdict.message for verdict in verdicts if verdict.status is Status.REFUSED}
    assert any("two levels are not read" in reason for reason in reasons)


@pytest.mark.real_model
def test_a_real_model_gives_the_references_tokens(environment: Environment, smollm2_path: Path) -> None:
    texts = [generated(environment, smollm2_path, device, "--max-tokens", "8") for device in ("acme", "reference")]
    assert "Paris" in texts[0]
    assert texts[0] == texts[1]


@pytest.mark.real_model
def test_it_serves_a_real_model(environment: Servers, smollm2_path: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    flags = ("--device", "acme", "--port", "0", *SMALL)
    server = environment.start(log, "-m", "hardpoint", "serve", smollm2_path, *flags)
    try:
        url = _url(server, log)
        body = {"model": "any", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        body["model"] = _answer(f"{url}/v1/models")["data"][0]["id"]
        text = _answer(f"{url}/v1/completions", body)["choices"][0]["text"]
    finally:
        server.terminate()
        server.wait(60)
    assert "Paris" in text


def _url(server: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + 300
    while time.monotonic() < end and server.poll() is None:
        found = re.search(r"^\s*serving\s+(http://\S+)/v1\s*$", log.read_text(errors="replace"), re.MULTILINE)
        if found is not None:
            return found.group(1)
        time.sleep(0.2)
    raise AssertionError(log.read_text(errors="replace"))


def _answer(url: str, body: dict[str, object] | None = None) -> dict[str, object]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=300) as response:
        return json.load(response)
