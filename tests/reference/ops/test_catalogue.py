"""The catalogue: every contract is whole, its samples run on its reference, and instances are checked."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch

from hardpoint_platforms.binding import DECOMPOSED, OpTable, ask
from hardpoint_platforms.device import Device
from hardpoint_platforms.errors import UnsupportedOperation
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Altitude, Attribute, OpInstance, WeightSpec
from hardpoint_platforms.ops.provider import OpProvider, Support
from hardpoint_platforms.ops.samples import SCHEMES, run
from hardpoint_platforms.ops.table import op_table
from hardpoint_platforms.reference.platform import ReferencePlatform
from hardpoint_platforms.reference.providers import ReferenceProvider
from hardpoint_platforms.versioning import Version

pytestmark = pytest.mark.reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = [
    "activation",
    "add_norm",
    "attention",
    "conv_state",
    "embedding",
    "experts",
    "gated_activation",
    "gated_delta",
    "gated_mlp",
    "linear",
    "logits",
    "logprobs",
    "lora",
    "mla_attention",
    "moe_route",
    "norm",
    "norm_gated_mlp",
    "norm_linear",
    "rope",
    "rotary_attention",
    "sample",
    "ssm_scan",
    "verify",
]


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _tensors(part)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))


def test_names():
    assert sorted(CONTRACTS) == NAMES
    assert all(contract.name == name for name, contract in CONTRACTS.items())


@pytest.mark.parametrize("name", NAMES)
def test_contract_is_whole(name):
    contract = CONTRACTS[name]
    assert contract.reference is not None
    assert set(contract.tolerance) == set(DTYPES)
    assert contract.doc
    assert contract.signature.startswith(f"{name}(")
    assert {w.rstrip("?") for w in contract.weights} >= set(contract.wide_weights)
    assert set(contract.decomposition) <= set(CONTRACTS)
    assert bool(contract.decomposition) == (contract.altitude is Altitude.BLOCK)
    for attribute, described in contract.attributes.items():
        assert described.doc, attribute
        assert described.since <= contract.version.minor


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_samples_run(name, dtype, providers):
    cases = list(CONTRACTS[name].samples(dtype))
    assert len({case.instance.where for case in cases}) == len(cases) >= 3
    for case in cases:
        assert providers[name].supports(case.instance)
        results = list(_tensors(run(providers[name], case)))
        assert results
        if name not in (
            "attention",
            "rotary_attention",
            "mla_attention",
        ):  # their state holds whatever the sample put there
            assert all(bool((t > -1e30).all()) for t in results if t.dtype.is_floating_point), case.instance.where


@pytest.mark.parametrize("name", NAMES)
def test_samples_are_seeded(name, providers):
    for case in CONTRACTS[name].samples(torch.float32):
        first, second = (list(_tensors(run(providers[name], case))) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_every_optional_weight_and_attribute_value_is_sampled():
    """A plugin that passes the samples has seen every choice and every optional weight, given and absent."""
    for contract in CONTRACTS.values():
        instances = [case.instance for case in contract.samples(torch.float32)]
        for weight in contract.weights:
            given = {weight.rstrip("?") in instance.weights for instance in instances}
            assert given == ({True, False} if weight.endswith("?") else {True}), (contract.name, weight)
        for name, attribute in contract.attributes.items():
            seen = {instance.attrs[name] for instance in instances}
            gates = contract.name in ("gated_mlp", "norm_gated_mlp", "experts")
            shared_with_activation = gates and name in ("kind", "activation")
            if not shared_with_activation:
                assert seen >= set(attribute.choices), (contract.name, name)


@pytest.mark.parametrize(
    ("attrs", "weights", "words"),
    [
        ({"kind": "rms", "epsilon": 1.0}, None, "epsilon"),
        ({}, None, "missing ['kind']"),
        ({"kind": "batch"}, None, "kind='batch' is none of"),
        ({"kind": "rms"}, {"gain": WeightSpec((4,), torch.float32)}, "gain"),
    ],
)
def test_instance_errors(attrs, weights, words):
    with pytest.raises(ValueError) as caught:
        CONTRACTS["norm"].instance("layers.0", torch.float32, weights, **attrs)
    assert words in str(caught.value)
    assert "norm at layers.0" in str(caught.value)


def test_instance_fills_defaults_and_orders_weights():
    spec = WeightSpec((4,), torch.float32)
    made = CONTRACTS["norm"].instance("x", torch.float32, {"bias": spec, "weight": spec}, kind="ln")
    assert made.attrs == {"kind": "ln", "eps": 1e-6}
    assert list(made.weights) == ["weight", "bias"]
    assert made.wide_weights == ("weight", "bias")


class _Old(OpProvider):
    """Speaks an older contract; says yes to everything it is asked."""

    name = "old"

    def __init__(self, op: str, version: Version) -> None:
        self.op, self.version = op, version
        self.asked: list[OpInstance] = []

    def supports(self, instance: OpInstance) -> Support:
        self.asked.append(instance)
        return Support(True, "always")

    def build(self, instance: OpInstance):
        return lambda *args: "old"


def _attention(version: Version):
    old = CONTRACTS["attention"]
    attributes = {**old.attributes, "sinks": dataclasses.replace(old.attributes["sinks"], since=4)}
    attributes["chunk"] = Attribute("tokens of a chunk, or None", since=5)
    return dataclasses.replace(old, version=version, attributes=attributes)


def _instance(contract, **attrs):
    sizes = {"heads": 2, "kv_heads": 1, "head_dim": 8, "v_head_dim": 8, "scale": 1.0}
    return contract.instance("layers.3.attn", torch.float32, **sizes, **attrs)


def test_an_older_plugin_is_asked_for_what_it_can_know():
    contract, provider = _attention(Version(1, 5)), _Old("attention", Version(1, 2))
    assert contract.minor_needed(_instance(contract, window=8, sinks=False)) == 0
    assert ask(contract, provider, _instance(contract, window=8, sinks=False))
    refused = ask(contract, provider, _instance(contract, sinks=True))
    assert not refused
    assert refused.reason == "needs attention 1.4 (sinks), plugin implements 1.2"
    assert "chunk" in ask(contract, provider, _instance(contract, sinks=True, chunk=64)).reason
    assert len(provider.asked) == 1
    assert ask(contract, _Old("attention", Version(1, 4)), _instance(contract, sinks=True))


def test_another_major_is_refused():
    contract, provider = _attention(Version(2, 5)), _Old("attention", Version(1, 9))
    answer = ask(contract, provider, _instance(contract))
    assert not answer
    assert "1.9" in answer.reason
    assert "2.5" in answer.reason
    assert not provider.asked


def test_table_prefers_the_device_and_counts_fallbacks():
    contract = _attention(Version(1, 5))
    table = OpTable(
        {**CONTRACTS, "attention": contract}, [_Old("attention", Version(1, 2))], [ReferenceProvider(contract)]
    )
    assert table.bind(_instance(contract)).provider.name == "old"
    assert table.bind(_instance(contract, sinks=True)).provider.name == "reference"
    own, fallback = table.bindings
    assert (own.fallback, own.refused) == (False, ())
    assert fallback.fallback
    assert [r.provider for r in fallback.refused] == ["old"]
    with pytest.raises(UnsupportedOperation, match="no op contract named"):
        table.contract("conv7d")


def test_reference_device_binds_everything_and_shares_one_planner():
    device: Device = ReferencePlatform().open(0, {})
    table = op_table(device)
    for contract in CONTRACTS.values():
        for case in contract.samples(torch.float32):
            bound = table.claim(case.instance)
            assert (bound is None) == (contract.altitude is Altitude.BLOCK)
    assert len(table.planners) == 1
    decomposed = [b for b in table.bindings if b.provider == DECOMPOSED]
    assert {b.instance.op: b.reason for b in decomposed} == {
        "gated_mlp": "into linear, gated_activation, linear",
        "norm_linear": "into add_norm, linear",
        "norm_gated_mlp": "into add_norm, gated_mlp",
        "rotary_attention": "into norm, rope, attention",
    }


def test_dequantizing_is_said_in_the_reason(providers):
    spec = WeightSpec((8, 256), torch.float32, SCHEMES["q4_k"])
    instance = CONTRACTS["linear"].instance("mlp", torch.float32, {"weight": spec}, in_features=256, out_features=8)
    assert "q4_k dequantized at load" in providers["linear"].supports(instance).reason


def test_default_pack_keeps_wide_weights_wide():
    table = torch.rand(10, 8)
    contract = CONTRACTS["rope"]
    instance = contract.instance("rope", torch.bfloat16, {"table": WeightSpec((10, 8), torch.float32)}, rotary_dim=8)
    (packed,) = _Old("rope", Version(1, 0)).pack(instance, {"table": table})
    assert torch.equal(packed, table)


def test_public_names_are_lazy_and_match_the_stub():
    code = (
        "import sys, hardpoint_platforms as spi\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
        "assert spi.PluginError and 'torch' not in sys.modules\n"
        "print(*spi.__all__, sep='\\n')\n"
    )
    names = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    import hardpoint_platforms

    with open(hardpoint_platforms.__file__ + "i", encoding="utf-8") as stub:
        listed = [line.split(" as ")[1].strip(",\n ") for line in stub if " as " in line]
    assert sorted(listed) == names
    assert all(getattr(hardpoint_platforms, name) is not None for name in names)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = hardpoint_platforms.no_such_name
