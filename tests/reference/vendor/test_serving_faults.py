"""A plugin whose kernels go wrong while a model is built, tried, and served: the error names whom, what and where."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint.config.engine import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from hardpoint.engine.build import BuiltEngine, build_engine, explain_model
from hardpoint.engine.lifecycle import serve_engine
from hardpoint.errors import ConfigError
from hardpoint.protocol.messages import EngineRequest, Failure, Outputs, Submit
from hardpoint.request.sampling import SamplingParams
from hardpoint_platforms.errors import OutOfDeviceMemory, PluginError
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.samples import run
from hardpoint_platforms.program import EagerBuilder
from hardpoint_platforms.reference.providers import reference_providers
from hardpoint_platforms.trial import RESULTS, fault

pytestmark = pytest.mark.reference

CASES = Path(__file__).parents[1] / "cases"
#: The plugin: norms and a rope of its own. BODY is what its norm does with the right result `y`.
CODE = """
import functools
import torch
from hardpoint_platforms.capabilities import Capabilities
from hardpoint_platforms.device import Device, DeviceInfo, MemoryInfo
from hardpoint_platforms.hookspecs import hookimpl
from hardpoint_platforms.ops.contract import Kernel
from hardpoint_platforms.ops.provider import OpProvider, Support
from hardpoint_platforms.platform import Platform, ProbeResult
from hardpoint_platforms.reference.norm import build_add_norm
from hardpoint_platforms.reference.rotary import build_rope
from hardpoint_platforms.versioning import Version

INFO = DeviceInfo("faulty", 0, "a fake chip")
CALLS = []
def noted(build, instance):
    right = build(instance)
    @functools.wraps(right)
    def kernel(*args):
        CALLS.append(instance.where)
        return right(*args)
    return kernel
class AddNorm(OpProvider):
    name, op, version = "faulty add_norm", "add_norm", Version(1, 0)
    def supports(self, instance):
        return SUPPORT
    def build(self, instance):
        right = build_add_norm(instance)
        def add_norm(x, residual, w=()):
            y, total = right(x, residual, w)
            BODY
            return y, total
        return BUILT
class Rope(OpProvider):
    name, op, version = "faulty rope", "rope", Version(1, 0)
    def supports(self, instance):
        return Support(True)
    def build(self, instance):
        return noted(build_rope, instance)
class FaultyDevice(Device):
    info, torch_device = INFO, torch.device("cpu")
    capabilities = lambda self: Capabilities(step_tokens=64)
    memory = lambda self: MemoryInfo(1 << 28, 1 << 28)
    synchronize = lambda self: None
    providers = lambda self: (AddNorm(), Rope())
class Faulty(Platform):
    probe = lambda self: ProbeResult((INFO,))
    open = lambda self, index, options: FaultyDevice()
@hookimpl
def hardpoint_platform():
    return Faulty()
"""
MANIFEST = {
    "manifest": "1.0", "name": "faulty", "vendor": "Nobody", "kind": "accelerator", "priority": 1,
    "interfaces": {"platform": "1.0", "device": "1.0"},
}  # fmt: skip
RAISES = (
    "if y.shape[0] > 20 and instance.where.startswith('layers.1.input'): "
    "raise RuntimeError('unit 3 reports 0xDEAD\\nmore of it')"
)
PLACE = r"faulty_plugin/platform\.py:\d+ in"


@pytest.fixture
def engine_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Something made of a tiny model on the plugin: engine_of(build_engine, BODY="...")."""
    sys.path.insert(0, str(CASES))
    from tiny_models import llama_config, random_weights, save_llama

    config, model = llama_config(), tmp_path / "tiny"
    save_llama(model, config, random_weights(config), None)
    package, info = tmp_path / "faulty_plugin", tmp_path / "faulty_plugin-0.3.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text("")
    (package / "hardpoint.json").write_text(json.dumps(MANIFEST))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-plugin\nVersion: 0.3\n")
    (info / "entry_points.txt").write_text("[hardpoint.platforms]\nfaulty = faulty_plugin.platform\n")
    monkeypatch.syspath_prepend(tmp_path)

    def make(builder: Callable[..., Any], **changes: str) -> Any:
        code = CODE
        for name, text in ({"BODY": "pass", "SUPPORT": "Support(True)", "BUILT": "add_norm"} | changes).items():
            code = code.replace(name, text)
        (package / "platform.py").write_text(code)
        importlib.invalidate_caches()
        return builder(
            EngineConfig(
                ModelConfig(str(model), dtype="float32", max_model_len=128),
                DeviceConfig("faulty"),
                CacheConfig(kv_cache_memory=4 << 20),
                SchedulerConfig(max_num_seqs=2, max_batch_tokens=64),
            )
        )

    yield make
    sys.path.remove(str(CASES))
    for name in [name for name in sys.modules if name.partition(".")[0] == "faulty_plugin"]:
        del sys.modules[name]


class Channel:
    """One request of 30 tokens, then nothing; keeps what comes back."""

    def __init__(self) -> None:
        params = SamplingParams(max_tokens=2, temperature=0.0)
        self._messages: list[Any] = [Submit([EngineRequest(request_id="r", prompt=[1] * 30, params=params)])]
        self.sent: list[Any] = []

    def receive(self, wait: float | None) -> list[Any]:
        messages, self._messages = self._messages, []
        return messages

    def send(self, message: Any) -> None:
        self.sent.append(message)


def test_a_kernel_that_raises_while_serving_is_named(engine_of: Callable[..., Any], capfd: Any) -> None:
    built: BuiltEngine = engine_of(build_engine, BODY=RAISES)
    channel = Channel()
    assert serve_engine(channel, lambda progress: built) == 1  # type: ignore[arg-type]
    (failure,) = [message for message in channel.sent if isinstance(message, Failure)]
    assert re.search(
        r"'faulty': faulty-plugin 0\.3: add_norm at layers\.1\.input_layernorm \(faulty add_norm on faulty:0\) "
        rf"raised RuntimeError: unit 3 reports 0xDEAD, at \S+{PLACE} add_norm$",
        failure.message,
    )
    assert (
        failure.hint == "`hardpoint conformance --device faulty --level 1` shows whether add_norm keeps to its contract"
    )
    (output,) = [one for message in channel.sent if isinstance(message, Outputs) for one in message.outputs]
    assert (output.request_id, output.finish_reason) == ("r", "error")
    assert output.error == f"{failure.message} ({failure.hint})"
    said = capfd.readouterr()
    assert "0xDEAD" in said.err  # the traceback, for the plugin's authors
    assert "report it" not in said.out + said.err


def test_an_error_is_told_even_where_nobody_can_be_named(engine_of: Callable[..., Any]) -> None:
    built: BuiltEngine = engine_of(build_engine, BODY=RAISES)
    built.engine._named = lambda error: 1 / 0  # type: ignore[assignment, return-value]
    channel = Channel()
    assert serve_engine(channel, lambda progress: built) == 1  # type: ignore[arg-type]
    (failure,) = [message for message in channel.sent if isinstance(message, Failure)]
    assert failure.message.startswith("RuntimeError: unit 3 reports 0xDEAD")


@pytest.mark.parametrize(
    "error", [OutOfDeviceMemory("2 bytes do not fit"), ConfigError("a core setting"), RuntimeError("not from a plugin")]
)
def test_errors_of_others_stay_as_they_are(engine_of: Callable[..., Any], error: Exception) -> None:
    named = engine_of(build_engine).engine.named
    with pytest.raises(type(error)) as raised:
        raise error
    assert named(raised.value) is error


def test_programs_are_asked_about_the_provider_that_was_bound(
    engine_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EagerBuilder, "holds", lambda self, provider: provider.op != "norm")
    ((_, bindings),) = engine_of(explain_model)
    assert {binding.provider for binding in bindings if binding.instance.op == "norm"} == {"reference"}
    assert {binding.instance.op for binding in bindings if not binding.held} == {"norm"}


def test_a_kernel_that_raises_in_the_trial_is_named_and_is_no_bug_of_ours(engine_of: Callable[..., Any]) -> None:
    channel = Channel()
    code = serve_engine(channel, lambda progress: engine_of(build_engine, BODY="y.view(-1, 7)"))  # type: ignore[arg-type]
    (failure,) = [message for message in channel.sent if isinstance(message, Failure)]
    assert (code, failure.kind) == (1, "PluginError")
    assert re.search(rf"add_norm at layers\.0\.\S+ .* raised RuntimeError: .*{PLACE} add_norm$", failure.message)
    assert "report it" not in str(failure.hint)


@pytest.mark.parametrize(
    ("body", "came"),
    [
        ("y = y.double()", r"float64 \[5, 64\] as its value 0, the contract says float32 \[5, 64\]"),
        ("y = y[:-1]", r"float32 \[4, 64\] as its value 0, the contract says float32 \[5, 64\]"),
        ("total = None", r"None \(NoneType\) as its value 1, the contract says float32 \[5, 64\]"),
        ("return y", r"float32 \[5, 64\], the contract says 2 values"),
    ],
)
def test_a_result_of_the_wrong_form_is_refused_before_serving(
    engine_of: Callable[..., Any], body: str, came: str
) -> None:
    with pytest.raises(PluginError) as caught:
        engine_of(build_engine, BODY=body)
    assert re.search(
        rf"faulty-plugin 0\.3: add_norm at layers\.0\.post_attention_layernorm \(faulty add_norm\) returned {came}, "
        rf"at \S+{PLACE} AddNorm\.build",
        caught.value.message,
    )
    assert "--device faulty --level 1" in caught.value.hint


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"SUPPORT": "True"}, r"AddNorm\.supports\(\) for add_norm at layers\.0\.\S+ returned True, not a Support"),
        ({"SUPPORT": "1 / 0"}, r"AddNorm\.supports\(\) .* raised ZeroDivisionError: division by zero"),
        ({"BUILT": "None"}, r"AddNorm\.build\(\) for add_norm at layers\.0\.\S+ returned None, not a kernel"),
        ({"BUILT": "add_nrom"}, r"AddNorm\.build\(\) .* raised NameError: .*add_nrom"),
    ],
)
def test_a_provider_that_fails_to_bind_is_named(
    engine_of: Callable[..., Any], changes: dict[str, str], told: str
) -> None:
    with pytest.raises(PluginError, match=rf"faulty-plugin 0\.3: {told}.*, at \S+{PLACE} "):
        engine_of(explain_model, **changes)


def test_serving_kernels_are_the_providers_own(engine_of: Callable[..., Any]) -> None:
    """The model that serves calls what build() returned, and each kind ran once per size in the trial."""
    built = engine_of(build_engine)
    worker = built.engine._executor._worker
    (part,) = worker.placed
    ropes = [bound for bound in part.bound.ops.bound if bound.instance.op == "rope"]
    assert {layer._attention._rope for layer in part.bound.model._layers} == {bound.kernel for bound in ropes}
    calls = sys.modules["faulty_plugin.platform"].CALLS
    assert len(calls) == 2 + 3 * 2  # the trial's prefill and decode; the warm-up's and its mixed step, both layers
    built.engine.close()


def test_the_table_of_forms_agrees_with_every_reference() -> None:
    providers = {provider.op: provider for provider in reference_providers()}
    seen = set()
    for op in RESULTS:
        if op not in providers:
            continue
        for sample in CONTRACTS[op].samples(torch.float32):
            args, result = sample.make(), run(providers[op], sample)
            assert fault(sample.instance, args, result) == "", sample.instance.where
            for index, form in enumerate(forms(RESULTS[op](sample.instance, args))):
                if isinstance(form, int):
                    assert isinstance(args[form], tuple), (op, index)  # the state
            seen.add(op)
    assert {"sample", "logprobs", "verify"} | set(RESULTS) == set(CONTRACTS)
    assert seen == set(RESULTS) - {"gated_mlp"}


def forms(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
