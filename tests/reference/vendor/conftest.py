"""A plugin that goes wrong where a test says, and engines made of a tiny model on it."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hardpoint.config.engine import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig

CASES = Path(__file__).parents[1] / "cases"
#: What a test may replace in CODE.
DEFAULTS = {
    "BODY": "pass", "SUPPORT": "Support(True)", "BUILT": "add_norm", "BUCKETS": "()", "PROGRAM": "pass",
    "PREPARED": "pass",
}  # fmt: skip
#: The plugin: norms and a rope of its own. BODY is what its norm does with the right result `y`.
CODE = """
import functools
import threading
import torch
from hardpoint_platforms.capabilities import Capabilities
from hardpoint_platforms.device import Device, DeviceInfo, MemoryInfo
from hardpoint_platforms.hookspecs import hookimpl
from hardpoint_platforms.ops.contract import Kernel
from hardpoint_platforms.ops.provider import OpProvider, Support
from hardpoint_platforms.platform import Platform, ProbeResult
from hardpoint_platforms.program import Bucket, EagerBuilder, Program
from hardpoint_platforms.reference.norm import build_add_norm
from hardpoint_platforms.reference.rotary import build_rope
from hardpoint_platforms.versioning import Version

INFO = DeviceInfo("faulty", 0, "a fake chip")
CALLS = []
RELEASED = threading.Event()
def hang():
    RELEASED.wait(30)
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
class Held(Program):
    def __init__(self, step):
        self.step = step
    def run(self, inputs, state, weights):
        return self.step(inputs, state, weights)
    def prepare(self, inputs, state, weights):
        PREPARED
        return state
class Builder(EagerBuilder):
    def buckets(self, max_tokens, max_requests):
        return BUCKETS
    def build(self, step, bucket):
        PROGRAM
        return Held(step) if bucket.tokens else super().build(step, bucket)
class FaultyDevice(Device):
    info, torch_device = INFO, torch.device("cpu")
    capabilities = lambda self: Capabilities(step_tokens=64)
    memory = lambda self: MemoryInfo(1 << 28, 1 << 28)
    synchronize = lambda self: None
    providers = lambda self: (AddNorm(), Rope())
    programs = lambda self: Builder()
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
        for name, text in (DEFAULTS | changes).items():
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
