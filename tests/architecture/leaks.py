"""What neutral code must not hold: words of vendors, and questions about which device it runs on."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
NEUTRAL = ("core/hardpoint", "platforms/hardpoint_platforms")
#: Code, and templates that become code. Data that names chips (the simulator's hardware table) is none.
SUFFIXES = (".py", ".pyi", ".template")

WORDS = (
    "cuda|hip|hipblas|rocm|nccl|rccl|cublas|cublaslt|cudnn|cutlass|triton|flashinfer|flashmla|pallas|xla|torchax|tpu|tpus"
    "|ascend|gaudi|hpu|musa|mlx|nvidia|sm_?\\d{2,3}a?|gfx\\d{3,4}|is_cuda|is_hip|is_rocm|is_xpu"
)
VENDOR = re.compile(rf"(?<![a-z])(?:{WORDS})(?![a-z])|torch\.cuda|torch\.xpu|torch\.mps", re.IGNORECASE)
#: Attributes of torch by which code asks for a device's kind: `tensor.is_xpu`, `torch.accelerator`.
KIND_ATTRIBUTES = frozenset({"is_cuda", "is_xpu", "is_mps", "is_xla", "is_hpu", "is_privateuseone"})
TORCH_MODULES = frozenset({"cuda", "xpu", "mps", "hpu", "xla", "mtia", "accelerator", "privateuseone"})
#: Whether memory is the host's is a question of addresses, not of vendors.
HOST = "cpu"


@dataclass(frozen=True)
class Leak:
    """One find: file inside of the checkout, line, and the words there."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def vendor_words(text: str) -> list[tuple[int, str]]:
    """(line, word) of every vendor word."""
    return [(number, match[0]) for number, line in enumerate(text.splitlines(), 1) for match in VENDOR.finditer(line)]


def device_checks(text: str) -> list[tuple[int, str]]:
    """(line, expression) of every question about the kind of device: `x.is_cuda`, `torch.xpu`, `device.type == "xla"`.

    A comparison with "cpu" is none: see `HOST`. Raises SyntaxError where `text` is no Python.
    """
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.expr) and _asks(node)]
    return sorted({(node.lineno, ast.unparse(node)) for node in nodes})


def neutral_sources() -> Iterator[Path]:
    """The files that must be free of both."""
    for folder in NEUTRAL:
        for path in sorted((CHECKOUT / folder).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                yield path


def all_vendor_words() -> list[Leak]:
    """Those of the neutral sources."""
    return [_leak(path, *found) for path in neutral_sources() for found in vendor_words(_read(path))]


def all_device_checks() -> list[Leak]:
    """Those of the neutral sources; templates are read as the file that they become."""
    return [
        _leak(path, *found)
        for path in neutral_sources()
        if path.suffix != ".template" or path.name.endswith(".py.template")
        for found in device_checks(_python(path))
    ]


def _asks(node: ast.expr) -> bool:
    if isinstance(node, ast.Attribute):
        of_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
        return node.attr in KIND_ATTRIBUTES or (of_torch and node.attr in TORCH_MODULES)
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        return any(map(_is_kind, sides)) and any(word != HOST for side in sides for word in _strings(side))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "startswith":
        return _is_kind(node.func.value) and any(word != HOST for each in node.args for word in _strings(each))
    return False


def _is_kind(node: ast.expr) -> bool:
    """`device.type`, `tensor.device.type`, `self.torch_device.type`, `info.platform`, `str(device)`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str" and node.args:
        return "device" in ast.unparse(node.args[0])
    if not isinstance(node, ast.Attribute):
        return False
    owner = ast.unparse(node.value)
    return (node.attr == "type" and "device" in owner) or (node.attr in ("platform", "vendor") and owner != "sys")


def _strings(node: ast.expr) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def _leak(path: Path, line: int, text: str) -> Leak:
    return Leak(path.relative_to(CHECKOUT).as_posix(), line, text)


def _python(path: Path) -> str:
    """A template with its placeholders filled in so that it parses."""
    text = _read(path)
    return re.sub(r"\$\{\w+\}|\$\w+", "x", text) if path.suffix == ".template" else text


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
