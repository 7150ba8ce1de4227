"""TPU chips of this host as the system lists them. Opens no device and loads nothing."""

from __future__ import annotations

from pathlib import Path

#: Google's PCI vendor number, and what its TPU devices are called (as in JAX 0.10, `jax._src.hardware_utils`).
VENDOR = "0x1ae0"
_NAMES = {
    "0x0027": "TPU v2 or v3",
    "0x005e": "TPU v4",
    "0x0062": "TPU v5p",
    "0x0063": "TPU v5e",
    "0x006f": "TPU v6e",
    "0x0076": "TPU 7x",
}


def find_chips(root: Path = Path("/")) -> tuple[list[str], str]:
    """Names of the chips, one each, and why there are none.

    A chip counts where the PCI bus shows it and a device file lets it be opened: /dev/accel* of Google's own driver,
    or /dev/vfio/N.
    """
    names = []
    for vendor in sorted(root.glob("sys/bus/pci/devices/*/vendor")):
        if _read(vendor) == VENDOR:
            number = _read(vendor.with_name("device"))
            if number in _NAMES:
                names.append(_NAMES[number])
    opened = [*root.glob("dev/accel*"), *root.glob("dev/vfio/[0-9]*")]
    if names and not opened:
        return [], f"{len(names)} TPU chips on the PCI bus ({names[0]}), but neither /dev/accel* nor /dev/vfio/N"
    if not names:
        told = f"no TPU: no PCI device of vendor {VENDOR} that is one"
        return [], f"{told}, though /dev has {opened[0].name}" if opened else told
    return names, ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip().lower()
    except OSError:
        return ""
