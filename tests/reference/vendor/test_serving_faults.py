"""A plugin whose kernels go wrong while a model is built, tried, and served: the error names whom, what and where."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

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

RAISES = (
    "if y.shape[0] > 20 and instance.where.startswith('layers.1.input'): "
    "raise RuntimeError('unit 3 reports 0xDEAD\\nmore of it')"
)
PLACE = r"faulty_plugin/platform\.py:\d+ in"


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
    assert {layer._attention._attend._rope for layer in part.bound.model._layers} == {bound.kernel for bound in ropes}
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
    assert seen == set(RESULTS) - {"gated_mlp", "norm_linear", "norm_gated_mlp", "rotary_attention"}


def forms(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
