"""The core and the SPI know no vendor and ask no device what it is: not in code, not in comments. Plugins do."""

from __future__ import annotations

import pytest
from leaks import NEUTRAL, all_device_checks, all_vendor_words, device_checks, neutral_sources, vendor_words


def test_the_count_is_zero(capsys: pytest.CaptureFixture[str]) -> None:
    words, checks = all_vendor_words(), all_device_checks()
    files = len(list(neutral_sources()))
    with capsys.disabled():
        print(f"\nleaks in {files} neutral files: {len(words)} vendor words, {len(checks)} device checks (0 allowed)")
    assert not words, "vendor words in neutral code:\n" + "\n".join(map(str, words))
    assert not checks, "neutral code asks which device it runs on:\n" + "\n".join(map(str, checks))


@pytest.mark.parametrize("folder", NEUTRAL)
def test_every_folder_is_looked_at(folder: str) -> None:
    assert sum(folder in path.as_posix() for path in neutral_sources()) > 20


def test_templates_are_looked_at() -> None:
    assert any(path.name == "device.py.template" for path in neutral_sources())


@pytest.mark.parametrize(
    "line",
    [
        "x = torch.cuda.is_available()",
        "if device == 'cuda':",
        "# NCCL hangs here",
        "use_triton = 1",
        "sm90 kernels",
        "a TPU",
    ],
)
def test_the_search_finds(line: str) -> None:
    assert vendor_words(line)


@pytest.mark.parametrize("line", ["the ship sails", "relationship", "xlarge", "cudahy", "membership_id"])
def test_the_search_spares(line: str) -> None:
    assert not vendor_words(line)


@pytest.mark.parametrize(
    "line",
    [
        "x.is_cuda",
        "tensor.is_xpu and y",
        "torch.cuda.synchronize()",
        "torch.accelerator.current_device_index()",
        "x.device.type == 'cuda'",
        "self.torch_device.type != 'acme'",
        "device.type in ('cpu', 'acme')",
        "'acme' == device.info.platform",
        "entry.manifest.vendor == 'Acme'",
        "str(x.device).startswith('acme')",
        "device.type.startswith('ac')",
        "str(device) == 'acme:0'",
    ],
)
def test_device_checks_are_found(line: str) -> None:
    assert [number for number, _ in device_checks(f"y = 1\nz = {line}\n")] == [2]


@pytest.mark.parametrize(
    "line",
    [
        "x.device.type == 'cpu'",
        "self.torch_device.type != 'cpu'",
        "part.type != 'text'",
        "a.device.type == b.device.type",
        "torch.matmul(x, y).is_contiguous()",
        "sys.platform == 'linux'",
        "'device.type == \"acme\"'",
    ],
)
def test_other_questions_are_spared(line: str) -> None:
    assert device_checks(f"z = {line}\n") == []
