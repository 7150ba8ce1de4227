"""docs/spi is what its docstrings say, and every public name of the SPI has a place there."""

from __future__ import annotations

import pytest
import spi_docs

import hardpoint_platforms as spi

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return spi_docs.pages()


def test_pages_are_current(pages: dict[str, str]) -> None:
    kept = {path.name: path.read_text(encoding="utf-8") for path in spi_docs.FOLDER.glob("*.md")}
    differing = sorted(name for name, text in pages.items() if kept.get(name) != text)
    stale = sorted(set(kept) - set(pages) - spi_docs.BY_HAND)
    assert not differing, f"{differing} are not current: run `{spi_docs.COMMAND}`"
    assert not stale, f"{stale} belong to nothing: run `{spi_docs.COMMAND}`"


def test_every_public_name_has_a_place() -> None:
    shown = spi_docs.names_shown()
    assert set(spi.__all__) <= shown, f"put {sorted(set(spi.__all__) - shown)} on a page of spi_docs.PAGES"


def test_every_contract_and_attribute_is_described(pages: dict[str, str]) -> None:
    text = pages["contracts.md"]
    for contract in spi.CONTRACTS.values():
        section = text.partition(f"\n## {contract.name}\n")[2].partition("\n## ")[0]
        assert contract.signature in section
        for name, attribute in contract.attributes.items():
            assert f"| `{name}` |" in section
            assert attribute.doc.replace("|", r"\|") in section


def test_fields_and_methods_carry_what_their_docstrings_say(pages: dict[str, str]) -> None:
    assert (
        "| `max_prefill_requests` | `int \\| None` | `None` | requests with more than one token"
        in (pages["capabilities.md"])
    )
    assert "### synchronize · required" in pages["device.md"]
    assert "### info · property, required" in pages["device.md"]
    assert "### providers · default" in pages["device.md"]
    assert "| `CAPTURE` | `'capture'` | a step is recorded once" in pages["capabilities.md"]
    assert "| `limits` | `BatchLimits` | `BatchLimits()` |" in pages["capabilities.md"]
    assert "Attributes:" not in "".join(pages.values())
