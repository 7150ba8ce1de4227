"""Plugins and cores of different days, as wheels in one environment: what fits runs, what does not says how to mend it.

Two environments: a plugin of today beside a core and an SPI of tomorrow, and plugins of tomorrow beside those of today.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fresh import Environment, Wheelhouse
from releases import DEVICE, newer_spi_and_core, plugin, tiny_llama

from hardpoint_platforms.versioning import offers

pytestmark = pytest.mark.packaging

#: Greedy text of a model on each of the devices given, in one process.
GENERATE = """
import json, sys
from hardpoint import LLM, SamplingParams
model, *devices = sys.argv[1:]
said = {}
for device in devices:
    with LLM(model, device=device, num_kv_pages=64, max_model_len=128) as llm:
        outputs = llm.generate(["abcdefg"], SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False)
        said[device] = list(outputs[0].outputs[0].token_ids)
print(json.dumps(said))
"""
#: What a request for each platform brings, and whose packages were imported.
ASK = """
import json, sys
from hardpoint_platforms.discovery import discover
from hardpoint_platforms.errors import PluginError
from hardpoint_platforms.selection import select
registry, answers = discover(), {}
for name in sys.argv[1:]:
    try:
        answers[name] = ["", str(select(name, registry).info), ""]
    except PluginError as error:
        answers[name] = [error.cause, error.message, error.hint]
imported = [name for name in sys.argv[1:] if name.replace("-", "_") + "_hardpoint" in sys.modules]
print(json.dumps([answers, imported]))
"""
DOCTOR = "from hardpoint.cli.main import main; print('exit code', main(['doctor']))"
#: What this release offers of `device`, and what it does not.
OFFERED, NEWER = offers()["device"], f"1.{DEVICE.minor + 2}-1.{DEVICE.minor + 4}"
#: Name -> what its manifest says, version of the plugin, how its refusal begins, and what it ends with.
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "newer-minor": (
        {"version": "1.4.0", "interfaces": {"device": NEWER}},
        f"newer-minor-hardpoint 1.4.0: it speaks device {NEWER}, "
        f"this release offers {OFFERED} (hardpoint-platforms 0.1.0)",
        "(or an older newer-minor-hardpoint than 1.4.0)",
    ),
    "newer-major": (
        {"version": "3.0.0", "interfaces": {"platform": "2.0-2.1", "device": "2.0"}},
        "newer-major-hardpoint 3.0.0: it speaks platform 2.0-2.1, this release offers 1.0; "
        f"it speaks device 2.0, this release offers {OFFERED} (hardpoint-platforms 0.1.0)",
        "(or an older newer-major-hardpoint than 3.0.0)",
    ),
    "newer-manifest": (
        {"version": "4.0.0", "manifest": "2.0"},
        "newer-manifest-hardpoint 4.0.0: its manifest has format 2.0, this release reads 1.0",
        "(or an older newer-manifest-hardpoint than 4.0.0)",
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tomorrow(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """SPI and core of release 0.9 with a plugin that was written against today's."""
    sources, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheels")
    newer_spi_and_core(sources, out)
    plugin("older", sources, out)
    made = Environment(tmp_path_factory.mktemp("tomorrow"))
    made.install(*out.glob("*.whl"))
    return made


@pytest.fixture(scope="module")
def today(tmp_path_factory: pytest.TempPathFactory, wheelhouse: Wheelhouse) -> Environment:
    """SPI, core and processor plugin as they are, with plugins of tomorrow."""
    sources, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheels")
    for name, (facts, _, _) in REFUSED.items():
        plugin(name, sources, out, importable=False, **facts)
    plugin("reaching", sources, out, "3.0.0", {"platform": "1.0-2.3", "device": "1.0-2.3", "ops": "1.0-1.8"})
    made = Environment(tmp_path_factory.mktemp("today"))
    made.install(*wheelhouse.wheels(), *out.glob("*.whl"))
    return made


def test_an_older_plugin_takes_what_it_knows_and_leaves_the_rest(tomorrow: Environment, model: Path) -> None:
    rows = json.loads(tomorrow.hardpoint("explain", model, "--device", "older", "--json"))
    linears = [row for row in rows if row["op"] == "linear"]
    new = [row for row in linears if row["attributes"]["streamed"]]
    old = [row for row in linears if not row["attributes"]["streamed"]]
    assert len(new) == 2
    assert len(old) >= 4
    assert {row["provider"] for row in old} == {"older linear"}
    assert {row["provider"] for row in new} == {"reference"}
    for row in new:
        refusal = {"provider": "older linear", "reason": "needs linear 1.1 (streamed), plugin implements 1.0"}
        assert row["refused"] == [refusal]
        assert row["fallback"]


def test_an_older_plugin_serves_the_newer_core(tomorrow: Environment, model: Path) -> None:
    said = json.loads(tomorrow.python("-c", GENERATE, model, "older", "reference"))
    assert len(said["older"]) == 12
    assert said["older"] == said["reference"]


def test_a_release_of_the_next_major_still_takes_it(tomorrow: Environment) -> None:
    answers, _ = json.loads(tomorrow.python("-c", ASK, "older"))
    assert answers["older"] == ["", "older:0", ""]
    offered = "from hardpoint_platforms.versioning import offers; print(offers()['platform'], offers()['device'])"
    assert tomorrow.python("-c", offered).split() == ["1.0-2.0", f"1.0-1.{DEVICE.minor + 1}"]


def test_newer_plugins_are_refused_before_they_are_imported(today: Environment) -> None:
    answers, imported = json.loads(today.python("-c", ASK, *REFUSED, "reaching", "cpu", "reference", "auto"))
    for name, (_, told, mend) in REFUSED.items():
        cause, message, hint = answers[name]
        assert cause == "version"
        assert message.startswith(f"platform plugin {name!r}: {told}")
        assert hint.startswith("pip install --upgrade hardpoint-platforms hardpoint ")
        assert hint.endswith(mend)
    assert answers["reaching"] == ["", "reaching:0", ""]
    assert answers["cpu"] == ["", "cpu:0", ""]
    assert answers["reference"] == ["", "reference:0", ""]
    assert imported == ["reaching"]
    # A manifest that cannot be read may be an accelerator's, and `auto` does not fall past a broken one in silence.
    cause, message, hint = answers["auto"]
    assert cause == "version"
    assert REFUSED["newer-manifest"][1] in message
    assert hint.endswith("(or insist on the host: --device cpu)")


def test_doctor_shows_each_as_one_red_line(today: Environment) -> None:
    lines = today.python("-c", DOCTOR).splitlines()
    assert lines[-1] == "exit code 1"
    failed = [line for line in lines if "FAIL" in line]
    assert sorted(line.split()[1] for line in failed) == sorted(REFUSED)
    for line in failed:
        below = lines[lines.index(line) + 1 : lines.index(line) + 3]
        assert below[0].lstrip().startswith(f"platform plugin {line.split()[1]!r}: {REFUSED[line.split()[1]][1]}")
        assert below[1].lstrip().startswith("-> pip install --upgrade hardpoint-platforms hardpoint")
    passed = {line.split()[1] for line in lines if line.startswith("PASS")}
    assert {"cpu", "reference", "reaching"} <= passed


def test_a_newer_plugin_that_reaches_down_serves(today: Environment, model: Path) -> None:
    said = json.loads(today.python("-c", GENERATE, model, "reaching", "reference"))
    assert said["reaching"] == said["reference"]
    assert len(said["reaching"]) == 12
