"""The cost model against its formulas, written out anew, on shapes read by the real model families."""

from __future__ import annotations

import json
from math import hypot
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from hardpoint.errors import ConfigError, ModelNotFound
from hardpoint.scheduler.settings import SchedulerSettings
from hardpoint.simulate.cost import RooflineCost
from hardpoint.simulate.hardware import load_hardware
from hardpoint.simulate.memory import size_cache
from hardpoint.simulate.models import SHAPES, load_model, shape_names
from hardpoint.simulate.shape import WEIGHT_FORMATS, ModelShape

H200 = load_hardware("h200-sxm")
SETTINGS = SchedulerSettings(max_batch_tokens=8192, max_num_seqs=64, max_model_len=4096)


def model(name: str) -> ModelShape:
    return load_model(name, max_model_len=4096)[0]


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-3.1-8b", 8.03), ("llama-3.1-70b", 70.55), ("llama-3.1-405b", 405.8), ("qwen3-30b-a3b", 30.5)],
)
def test_weights_add_up(name: str, billions: float) -> None:
    assert model(name).parameters / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize("name", shape_names())
def test_every_shape_is_simulated(name: str) -> None:
    shape, weights = load_model(name, max_model_len=4096)
    cost = RooflineCost(shape, weights, H200)
    one, many = (cost.seconds(t, 1, tuple((t, t) for _ in cost.windows)) for t in (1, 512))
    assert 0 < cost.least <= one < many


def test_one_step_by_hand() -> None:
    """8B in bfloat16, 16 decodes at 1,000 cached tokens each, one chip."""
    cost = RooflineCost(model("llama-3.1-8b"), WEIGHT_FORMATS["bfloat16"], H200)
    flops, rate, rows = 989.4e12 * 0.78, 4.8e12 * 0.88, 16
    total = 0.0
    for inputs, outputs, count in (
        (4096, 6144, 32), (4096, 4096, 32), (4096, 28672, 32), (14336, 4096, 32), (4096, 128256, 1),
    ):  # fmt: skip
        moved = 2 * inputs * outputs + 2 * rows * (inputs + outputs)
        total += count * (hypot(2 * rows * inputs * outputs / flops, moved / rate) + 5e-6)
    read = rows * 1001
    total += 32 * hypot(
        2 * read * 32 * 256 / (989.4e12 * 0.53), ((read + rows) * 8 * 256 * 2 + rows * 32 * 256 * 2) / rate
    )
    passes = 32 * (8 * 4096 + 2 * (32 + 8) * 128 + 3 * 14336)
    total += (rows * 2 * passes + rows * 128256 * 4) / rate + (32 * 5 + 3) * 5e-6
    query, computed = np.ones(rows, np.int32), np.full(rows, 1000, np.int32)
    assert cost.seconds(rows, rows, cost.attended(query, computed)) == pytest.approx(total, rel=1e-9)


def test_chips_share_and_talk() -> None:
    shape = model("llama-3.1-70b")
    one, eight = (RooflineCost(shape, WEIGHT_FORMATS["bfloat16"], H200, tp=tp) for tp in (1, 8))
    assert one.weight_bytes == 8 * eight.weight_bytes == pytest.approx(2 * shape.parameters)
    assert one.parts(64, 64)["links"] == 0
    ring = 2 * 7 / 8 * 64 * 8192 * 2 / (450e9 * 0.75) + 10e-6
    gather = 7 / 8 * 64 * 128256 * 4 / (450e9 * 0.75) + 10e-6
    assert eight.parts(64, 64)["links"] == pytest.approx(160 * ring + gather)
    with pytest.raises(ConfigError, match="--tp 3"):
        RooflineCost(shape, WEIGHT_FORMATS["bfloat16"], H200, tp=3)


def test_attention_counts_as_the_mask_does() -> None:
    cost = RooflineCost(model("gemma-3-27b"), WEIGHT_FORMATS["bfloat16"], H200)
    assert set(cost.windows) == {None, 1024}
    query, computed = np.array([1, 700, 300, 5], np.int32), np.array([3000, 0, 900, 1022], np.int32)
    for window, counted in zip(cost.windows, cost.attended(query, computed), strict=True):
        pairs = read = 0
        for new, before in zip(query.tolist(), computed.tolist(), strict=True):
            reach = [range(max(0, p + 1 - (window or p + 1)), p + 1) for p in range(before, before + new)]
            pairs += sum(map(len, reach))
            read += len(set().union(*reach))
        assert counted == (pairs, read), window


def test_sliding_layers_cost_less_and_keep_less() -> None:
    shape = model("gemma-3-27b")
    cost = RooflineCost(shape, WEIGHT_FORMATS["bfloat16"], H200)
    long = np.array([4000], np.int32)
    seconds = cost.seconds(1, 1, cost.attended(np.ones(1, np.int32), long))
    assert seconds < cost.seconds(1, 1, tuple((4001, 4001) for _ in cost.windows))
    _, windows = size_cache(shape, H200, cost.weight_bytes, tp=1, settings=SETTINGS)
    assert None in windows
    assert 1024 in windows


def test_experts_are_read_once_each_and_only_those_chosen() -> None:
    cost = RooflineCost(model("qwen3-30b-a3b"), WEIGHT_FORMATS["bfloat16"], H200)
    assert cost.weight_bytes == pytest.approx(61e9, rel=0.01)
    few, more, all_of_them = (cost.parts(tokens, 1)["products"] for tokens in (1, 8, 256))
    assert few < 0.15 * cost.weight_bytes / (4.8e12 * 0.88)
    assert 3 * few < more < all_of_them


@pytest.mark.parametrize(("weights", "share"), [("float8", 0.5), ("int4", 0.26)])
def test_fewer_bits_are_read_faster(weights: str, share: float) -> None:
    plain, small = (RooflineCost(model("llama-3.1-8b"), WEIGHT_FORMATS[w], H200) for w in ("bfloat16", weights))
    layers = [cost._product_seconds(0, 1, 1) for cost in (plain, small)]
    assert layers[1] / layers[0] == pytest.approx(share, rel=0.05)
    chunk = [cost._product_seconds(0, 8192, 1) for cost in (plain, small)]
    assert chunk[1] / chunk[0] == pytest.approx(0.5 if weights == "float8" else 1.0, rel=0.06)


def test_recent_measurements_of_products_are_met() -> None:
    """Products of an 8B layer measured on such a chip, in microseconds: within 15 %."""
    cost = RooflineCost(model("llama-3.1-8b"), WEIGHT_FORMATS["bfloat16"], H200)
    measured = {64: (18.5, 12.5, 71.0, 40.4), 256: (23.7, 17.9, 100.3, 51.2), 2048: (134.6, 89.0, 616.8, 297.8)}
    for rows, times in measured.items():
        ours = [1e6 * (cost._product_seconds(index, rows, rows) / 32 + H200.launch) for index in range(4)]
        assert ours == pytest.approx(times, rel=0.15), rows


def test_the_cache_takes_what_weights_leave() -> None:
    shape = model("llama-3.1-8b")
    cost = RooflineCost(shape, WEIGHT_FORMATS["bfloat16"], H200)
    wide = SchedulerSettings(max_batch_tokens=8192, max_num_seqs=8192, max_model_len=4096)
    plan, windows = size_cache(shape, H200, cost.weight_bytes, tp=1, settings=wide)
    page = 16 * 32 * 2 * 8 * 128 * 2
    assert windows == (None,)
    assert plan.usable_pages == int((141e9 * 0.9 - cost.weight_bytes) // page) - 1
    with pytest.raises(ConfigError, match="of weights") as caught:
        size_cache(model("llama-3.1-70b"), load_hardware("h100-sxm"), 141e9, tp=1, settings=wide)
    assert "--tp" in (caught.value.hint or "")


def test_models_are_found_by_file_and_by_name(tmp_path: Path) -> None:
    config = json.loads((SHAPES / "llama-3.1-8b.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    for path in (tmp_path, tmp_path / "config.json"):
        shape, weights = load_model(str(path))
        assert (shape.layers, weights.name) == (32, "float8")
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model(str(tmp_path))[1].bits == pytest.approx(4.16, abs=0.01)
    assert load_model(str(tmp_path), weights="float32")[1].bits == 32
    config["quantization_config"] = {"quant_method": "mystery"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="mystery"):
        load_model(str(tmp_path))
    with pytest.raises(ModelNotFound) as caught:
        load_model("llama-3.1-9b")
    assert "llama-3.1-8b" in (caught.value.hint or "")
    with pytest.raises(ConfigError, match="--max-model-len"):
        load_model("llama-3.1-8b", max_model_len=10**7)
