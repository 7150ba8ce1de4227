"""What `from hardpoint import ...` and `from hardpoint_platforms import ...` offer is decided here, not by accident."""

from __future__ import annotations

import importlib

import pytest

CORE_NAMES = ["LLM", "SamplingParams", "__version__"]


def test_core_names() -> None:
    import hardpoint

    assert sorted(hardpoint.__all__) == CORE_NAMES


@pytest.mark.parametrize("package", ["hardpoint", "hardpoint_platforms"])
def test_every_exported_name_is_there(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__all__
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None, name
        assert name in dir(module)


@pytest.mark.parametrize("package", ["hardpoint", "hardpoint_platforms"])
def test_an_unknown_name_is_an_attribute_error(package: str) -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        importlib.import_module(package).no_such_name  # noqa: B018


def test_spi_names() -> None:
    """A plugin's author finds everything that a plugin derives from under one roof."""
    import hardpoint_platforms as spi

    devices = {"Platform", "Device", "DeviceInfo", "ProbeResult", "Capabilities"}
    needed = devices | {"OpProvider", "Support", "HardpointError"}
    assert needed <= set(spi.__all__)


def test_the_version_is_that_of_the_package() -> None:
    from importlib.metadata import version

    import hardpoint

    assert hardpoint.__version__ == version("hardpoint")
