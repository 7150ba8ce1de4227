"""The core and the SPI know no vendor: not in code, not in comments. Plugins do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]

WORDS = (
    "cuda|hip|hipblas|rocm|nccl|rccl|cublas|cublaslt|cudnn|cutlass|triton|flashinfer|flashmla|pallas|xla|torchax|tpu|tpus"
    "|ascend|gaudi|hpu|musa|mlx|nvidia|sm_?\\d{2,3}a?|gfx\\d{3,4}|is_cuda|is_hip|is_rocm|is_xpu"
)
VENDOR = re.compile(rf"(?<![a-z])(?:{WORDS})(?![a-z])|torch\.cuda|torch\.xpu|torch\.mps", re.IGNORECASE)


def leaks(text: str) -> list[tuple[int, str]]:
    """(line, word) of every vendor word."""
    return [(number, match[0]) for number, line in enumerate(text.splitlines(), 1) for match in VENDOR.finditer(line)]


@pytest.mark.parametrize("folder", ["core/hardpoint", "platforms/hardpoint_platforms"])
def test_no_vendor_word(folder: str) -> None:
    paths = sorted((CHECKOUT / folder).rglob("*.py"))
    assert paths
    found = [
        f"{path.relative_to(CHECKOUT)}:{line}: {word}"
        for path in paths
        for line, word in leaks(path.read_text(encoding="utf-8"))
    ]
    assert not found, "vendor words in neutral code:\n" + "\n".join(found)


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
    assert leaks(line)


@pytest.mark.parametrize("line", ["the ship sails", "relationship", "xlarge", "cudahy", "membership_id"])
def test_the_search_spares(line: str) -> None:
    assert not leaks(line)
