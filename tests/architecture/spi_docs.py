"""Writes docs/spi: one page per interface of the SPI, made of its docstrings and of the op contracts.

.venv/bin/python tests/architecture/spi_docs.py
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve()
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))

from spi_source import Module, table  # noqa: E402

from hardpoint_platforms.conformance.ladder import LEVELS, level_of  # noqa: E402
from hardpoint_platforms.ops.catalogue import CONTRACTS  # noqa: E402
from hardpoint_platforms.ops.contract import Attribute, OpContract  # noqa: E402
from hardpoint_platforms.versioning import offers  # noqa: E402

FOLDER = HERE.parents[2] / "docs" / "spi"
COMMAND = ".venv/bin/python tests/architecture/spi_docs.py"
#: Written by hand; what else lies in the folder is generated.
BY_HAND = {"versions.md"}


@dataclass(frozen=True)
class Page:
    """One page.

    Attributes:
        file, title: of the page; without: what the core does where a plugin brings nothing of this.
        sources: module -> names to show, in order; a module alone shows its public names.
        interface: whose version is shown; contracts: described at the end.
    """

    file: str
    title: str
    without: str
    sources: Mapping[str, str]
    interface: str = ""
    contracts: tuple[str, ...] = ()


#: In reading order.
PAGES = (
    Page(
        "manifest", "Manifest", "required; read without importing the plugin",
        {"manifest": "Manifest Kind OptionSpec", "versioning": "Version VersionRange INTERFACES OLDEST"}, "manifest",
    ),
    Page(
        "platform", "Platform", "required",
        {"platform": "Platform ProbeResult", "hookspecs": "hookimpl hardpoint_platform"}, "platform",
    ),
    Page(
        "device", "Device", "required; all of level 0",
        {"device": "Device DeviceInfo MemoryInfo", "ceilings": "Ceilings"}, "device",
    ),
    Page(
        "capabilities", "Capabilities", "what is not declared is absent",
        {"capabilities": "Capabilities BatchLimits ExecutionMode TuningChoice"}, "device",
    ),
    Page(
        "state", "Memory and state cache", "dense tensors out of `Device.zeros`",
        {"state_cache": "CacheGroup LayerCache CacheLayout State StateCache CanonicalPages DenseStateCache"},
        "state_cache",
    ),
    Page(
        "streams", "Streams and clock", "no streams, the wall clock",
        {"streams": "Stream Event Readback Clock"}, "streams",
    ),
    Page(
        "ops", "Ops and providers", "every op on its reference",
        {
            "ops.provider": "OpProvider Support",
            "ops.contract": "OpInstance WeightSpec OpContract Attribute Altitude Tolerance Sample Packed Kernel Weight",
            "binding": "OpTable Binding BoundOp Refusal",
            "ops.catalogue": "CONTRACTS", "ops.table": "op_table", "reference.providers": "reference_providers",
        },
        "ops",
    ),
    Page(
        "attention", "Attention", "gathers pages, softmax in float32",
        {"ops.provider": "AttentionPlanner", "batch": "AttentionBatch"}, "attention", ("attention", "mla_attention"),
    ),
    Page(
        "sampling", "Sampling", "draws on the reference",
        {"batch": "SamplingInputs Penalties LogitBias SampleResult Logprobs VerifyResult"}, "sampling",
        ("sample", "logprobs", "verify"),
    ),
    Page(
        "program", "Program", "eager: the step function is called",
        {"program": "ProgramBuilder Program Bucket SamplingShape StepInputs StepOutputs StepFunction Weights "
                    "EagerBuilder Footprint ANY_SIZE BIAS_ENTRIES TOP_LOGPROBS"},
        "program",
    ),
    Page(
        "quant", "Quantized weights", "dequantized at load",
        {"quant": "QuantTensor QuantScheme Packing Rounding Codes"},
        "ops",
    ),
    Page(
        "communication", "Communication", "gloo over the host; one rank needs none",
        {"communication": "Communicator Mesh TENSOR_AXIS"}, "communication",
    ),
    Page(
        "kv_transfer", "KV transfer", "through host memory",
        {"kv_transfer": "KVTransfer HostTransfer CANONICAL"}, "kv_transfer",
    ),
    Page(
        "errors", "Errors", "",
        {"errors": "HardpointError PlatformError PluginError DeviceUnavailable OutOfDeviceMemory DeviceLost "
                   "UnsupportedOperation"},
    ),
)  # fmt: skip


TITLES = {
    "README": "The device interface",
    **{page.file: page.title for page in PAGES},
    "contracts": "Op contracts",
    "versions": "Versions",
}


def pages() -> dict[str, str]:
    """File name -> text of every generated page."""
    made = {page.file: _page(page) for page in PAGES} | {"contracts": _contracts(), "README": _index()}
    return {f"{file}.md": _finished(file, text) for file, text in made.items()}


def names_shown() -> set[str]:
    """Every name that has a place on a page."""
    return {name for page in PAGES for names in page.sources.values() for name in names.split()}


def _page(page: Page) -> str:
    facts = [f"Interface `{page.interface}` {offers()[page.interface]}"] if page.interface else []
    if page.without:
        bare = page.without.startswith(("required", "what"))
        facts.append(page.without if bare else f"a plugin that brings none of it gets: {page.without}")
    parts = ["; ".join(facts) + "." if facts else ""]
    for number, (name, shown) in enumerate(page.sources.items()):
        module = Module(name)
        if number == 0 and len(shown.split()) > 1:
            parts.append(module.doc)
        elif name in ("ops.contract", "hookspecs"):
            parts.append(f"## In `{name}`\n\n{module.doc}")
        parts += [module.section(item) for item in shown.split()]
    if page.contracts:
        parts.append("## Op contracts")
        parts += [_contract(CONTRACTS[name], "###") for name in page.contracts]
    return "\n\n".join(parts)


def _contracts() -> str:
    told = (
        "What a device may implement, op by op, and how it is judged. Levels are those of `hardpoint conformance`. A "
        "default in the tables is what an instance has that does not set the attribute; an instance needs only the "
        "minor version of the attributes that it sets away from their defaults ([Versions](versions.md))."
    )
    rows = [
        (f"[{c.name}](#{c.name})", c.version, c.altitude.name.lower(), f"L{level_of(c.name)}", ", ".join(c.mutates))
        for c in CONTRACTS.values()
    ]
    overview = table(("contract", "version", "altitude", "level", "may write into"), rows, code=False)
    return "\n\n".join([_filled(told), overview, *(_contract(contract, "##") for contract in CONTRACTS.values())])


def _contract(contract: OpContract, level: str) -> str:
    parts = [f"{level} {contract.name}", f"```python\n{contract.signature}\n```", _filled(contract.doc)]
    rows = [(name, *_attribute(attribute)) for name, attribute in contract.attributes.items()]
    if rows:
        parts.append(table(("attribute", "default", "since", "meaning"), rows))
    facts = [f"version {contract.version}, {contract.altitude.name.lower()}, level {level_of(contract.name)}"]
    if contract.weights:
        names = [f"`{name.rstrip('?')}`" + " (may be absent)" * name.endswith("?") for name in contract.weights]
        facts.append("weights, in this order: " + ", ".join(names))
    if contract.wide_weights:
        facts.append("float32 whatever the activations are: " + ", ".join(f"`{n}`" for n in contract.wide_weights))
    facts.append("may write into: " + (", ".join(f"`{name}`" for name in contract.mutates) or "none of its arguments"))
    if contract.decomposition:
        facts.append("where nobody claims it: " + ", ".join(f"`{name}`" for name in contract.decomposition))
    bounds = [
        f"{str(dtype).removeprefix('torch.')} `{bound.atol:g} + {bound.rtol:g} |b|`"
        for dtype, bound in contract.tolerance.items()
    ]
    facts.append("may be off the reference's b by: " + ", ".join(bounds))
    parts.append("\n".join(f"- {fact}" for fact in facts))
    return "\n\n".join(parts)


def _filled(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _attribute(attribute: Attribute) -> tuple[str, str, str]:
    choices = f" ({', '.join(f'`{choice!r}`' for choice in attribute.choices)})" if attribute.choices else ""
    default = "required" if attribute.required else repr(attribute.default)
    return default, f"1.{attribute.since}", attribute.doc + choices


def _index() -> str:
    rows = [
        (f"[{page.title}]({page.file}.md)", str(offers()[page.interface]) if page.interface else "", page.without)
        for page in PAGES
    ]
    rows.append(("[Op contracts](contracts.md)", "", "signature, attributes, weights and tolerance of every op"))
    levels = [(f"L{level.number} {level.title}", level.writes, level.works) for level in LEVELS]
    return "\n\n".join(
        [
            "What `hardpoint_platforms` asks of a device and gives to it, in reading order.\n"
            "[Write a platform plugin](../how-to/write-a-plugin.md) walks through it with a chip of your own;\n"
            "[Versions](versions.md) is what is promised. Most names come from `hardpoint_platforms`\n"
            "itself (`from hardpoint_platforms import Device`), the others from the module below their heading.",
            table(("page", "version", "without it"), rows, code=False),
            "## What to write for which level",
            table(("level", "you write", "works then"), levels, code=False),
        ]
    )


def _finished(file: str, text: str) -> str:
    order = list(TITLES)
    place = order.index(file)
    near = [other for other in order[max(0, place - 1) : place + 2] if other != file]
    links = " · ".join(f"[{TITLES[other]}]({other}.md)" for other in near)
    whole = f"# {TITLES[file]}\n\n{text}\n\n---\n\n{links} · written by `{COMMAND}`\n"
    return re.sub(r"\n{3,}", "\n\n", whole)


def main() -> None:
    """Rewrite the folder."""
    FOLDER.mkdir(exist_ok=True)
    made = pages()
    for stale in {path.name for path in FOLDER.glob("*.md")} - set(made) - BY_HAND:
        (FOLDER / stale).unlink()
    for name, text in made.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    print(f"{len(made)} pages in {FOLDER}")


if __name__ == "__main__":
    main()
