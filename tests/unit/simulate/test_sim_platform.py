"""The platform `sim`: shapes as the reference's, time as its formula says, whole engines on virtual time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hardpoint.config.engine import CacheConfig, EngineConfig, ModelConfig
from hardpoint.engine import build, devices
from hardpoint.protocol.messages import EngineRequest
from hardpoint.request.sampling import SamplingParams
from hardpoint_platforms.device import Device
from hardpoint_platforms.errors import DeviceUnavailable
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Sample, WeightSpec
from hardpoint_platforms.ops.samples import run
from hardpoint_platforms.ops.table import op_table
from hardpoint_platforms.reference.providers import reference_providers
from hardpoint_platforms.sim.platform import SimPlatform

pytestmark = pytest.mark.reference

OPTIONS = {"teraflops": 1.0, "gigabytes_per_second": 100.0, "launch_microseconds": 2.0, "memory_mib": 512}


@pytest.fixture
def device() -> Device:
    return SimPlatform().open(0, OPTIONS)


def samples() -> Iterator[tuple[str, Sample]]:
    device = SimPlatform().open(0, OPTIONS)
    for provider in device.providers():
        for number, case in enumerate(CONTRACTS[provider.op].samples(torch.float32)):
            yield f"{provider.op}-{number}", case


CASES = dict(samples())


def looks(value: Any) -> Any:
    """Shapes and dtypes of results."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, tuple):
        return tuple(looks(part) for part in value)
    if hasattr(value, "token_ids"):
        return looks(value.token_ids), value.logprobs is not None and looks(value.logprobs)
    if hasattr(value, "chosen"):
        return tuple(looks(part) for part in (value.chosen, value.rank, value.top_ids, value.top))
    return type(value)


@pytest.mark.parametrize("name", CASES)
def test_results_look_like_the_references(name: str, device: Device) -> None:
    case = CASES[name]
    ours = next(provider for provider in device.providers() if provider.op == case.instance.op)
    theirs = next(provider for provider in reference_providers() if provider.op == case.instance.op)
    before = device.clock().now()
    assert looks(run(ours, case)) == looks(run(theirs, case))
    assert device.clock().now() >= before + 2e-6


def test_a_product_takes_its_bytes_or_its_operations(device: Device) -> None:
    weights = {"weight": WeightSpec((2000, 1000), torch.float32)}
    instance = CONTRACTS["linear"].instance(
        "here", torch.float32, weights, in_features=1000, out_features=2000, bias=False
    )
    provider = next(provider for provider in device.providers() if provider.op == "linear")
    kernel = provider.build(instance)
    packed = provider.pack(instance, {"weight": torch.ones(2000, 1000)})
    assert sum(provider.packed_bytes(packed).values()) == 8_000_000
    for rows, seconds in ((1, (8e6 + 12e3) / 1e11), (1000, 2 * 1000 * 1000 * 2000 / 1e12)):
        before = device.clock().now()
        assert kernel(torch.zeros(rows, 1000), packed).shape == (rows, 2000)
        assert device.clock().now() - before == pytest.approx(seconds + 2e-6)


def test_the_clock_passes_only_by_work(device: Device) -> None:
    clock = device.clock()
    assert clock.now() == 0.0 == device.clock().now()
    clock.sleep(1.5)
    assert clock.now() == 1.5
    assert SimPlatform().open(0, OPTIONS).clock().now() == 0.0
    with pytest.raises(DeviceUnavailable, match="sim:1"):
        SimPlatform().open(1, OPTIONS)


def test_what_it_leaves_to_the_reference_is_known(device: Device) -> None:
    ours = {provider.op for provider in device.providers()}
    blocks = {"gated_mlp", "norm_linear", "norm_gated_mlp", "rotary_attention"}
    assert set(CONTRACTS) - ours == blocks | {"lora", "conv_state", "gated_delta", "ssm_scan", "verify"}
    assert op_table(device) is not None


def serve(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], float]:
    """Tokens and virtual seconds of three requests on a model whose weights no file holds."""
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 500,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    device = SimPlatform().open(0, OPTIONS)
    monkeypatch.setattr(devices, "select", lambda name, registry: SimpleNamespace(reason="asked for"))
    monkeypatch.setattr(devices, "open_device", lambda *_: device)
    made = build.build_engine(
        EngineConfig(ModelConfig(str(folder), load_format="dummy"), cache=CacheConfig(kv_cache_memory=1 << 20))
    )
    engine, tokens = made.engine, []
    assert made.info.fallbacks == []
    for number in range(3):
        params = SamplingParams(max_tokens=20, ignore_eos=True, seed=number)
        engine.add(EngineRequest(request_id=str(number), prompt=[1 + number] * 30, params=params))
    while engine.has_work:
        tokens += [token for output in engine.step().outputs for token in output.token_ids]
    engine.close()
    return tokens, device.clock().now()


def test_an_engine_runs_on_virtual_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (one, first), (two, second) = serve(tmp_path, monkeypatch), serve(tmp_path, monkeypatch)
    assert len(one) == 60
    assert (one, first) == (two, second)
    assert len(set(one)) > 30
    assert max(one) < 500
    # about 22 steps, the warm-up among them, of 3 x 9 ops and a few more at 2 microseconds and their bytes
    assert 22 * 25 * 2e-6 < first < 0.1
