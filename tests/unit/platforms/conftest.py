"""Fake plugin distributions: a package, its hardpoint.json and its .dist-info, written into a folder on sys.path."""

from __future__ import annotations

import importlib
import json
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

#: A whole platform with one device, as a plugin author would write it. {name} and {device} are filled in.
PLATFORM = """
import torch
from hardpoint_platforms.capabilities import Capabilities
from hardpoint_platforms.device import Device, DeviceInfo, MemoryInfo
from hardpoint_platforms.hookspecs import hookimpl
from hardpoint_platforms.platform import Platform, ProbeResult

INFO = DeviceInfo("{name}", 0, "a fake chip")


class FakeDevice(Device):
    info = INFO
    torch_device = torch.device("cpu")

    def capabilities(self):
        return Capabilities()

    def memory(self):
        return MemoryInfo(1 << 30, 1 << 30)

    def synchronize(self):
        return None


class FakePlatform(Platform):
    def probe(self):
        return ProbeResult((INFO,))

    def open(self, index, options):
        device = FakeDevice()
        device.options = dict(options)
        return device


@hookimpl
def hardpoint_platform():
    return FakePlatform()
"""

MANIFEST = {
    "manifest": "1.0",
    "vendor": "Acme",
    "kind": "accelerator",
    "priority": 50,
    "interfaces": {"platform": "1.0", "device": "1.0"},
}


class PluginFolder:
    """A folder that stands in for site-packages."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.packages: set[str] = set()

    def add(
        self,
        name: str = "acme",
        code: str = PLATFORM,
        *,
        extra: str = "",
        distribution: str | None = None,
        version: str = "1.2",
        value: str | None = None,
        requires: tuple[str, ...] = (),
        manifest: object = (),
        **facts: object,
    ) -> None:
        """A plugin. `facts` replace fields of the manifest; `manifest` replaces it whole (None: no file)."""
        distribution = distribution or f"{name}-hardpoint"
        package = distribution.replace("-", "_")
        self.packages.add(package)
        folder = self.path / package
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").write_text("")
        body = code.replace("{name}", name) + textwrap.dedent(extra)
        (folder / "platform.py").write_text(body)
        if manifest is not None:
            content = {"name": name} | MANIFEST | facts if manifest == () else manifest
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / "hardpoint.json").write_text(text)
        info = self.path / f"{package}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        lines = [f"Requires-Dist: {requirement}" for requirement in requires]
        head = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}", *lines, ""]
        (info / "METADATA").write_text("\n".join(head))
        point = value or f"{package}.platform"
        (info / "entry_points.txt").write_text(f"[hardpoint.platforms]\n{name} = {point}\n")


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PluginFolder]:
    """An empty folder at the head of sys.path; what was imported from it is forgotten afterwards."""
    folder = PluginFolder(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield folder
    for module in list(sys.modules):
        if module.partition(".")[0] in folder.packages:
            del sys.modules[module]


@pytest.fixture
def platform_code() -> Callable[..., str]:
    """The working plugin's source with pieces replaced: platform_code(old=new pairs)."""

    def change(*pairs: tuple[str, str]) -> str:
        code = PLATFORM
        for old, new in pairs:
            assert old in code, old
            code = code.replace(old, new)
        return code

    return change
