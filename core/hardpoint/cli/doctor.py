"""Is every device plugin in order? Each one that is installed is imported, asked for its devices, and made to compute.

Exit code 1 if one of them fails; a plugin whose device is merely absent is no failure.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardpoint import env
from hardpoint.cli import console
from hardpoint.cli.version import versions
from hardpoint.config.quantities import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hardpoint_platforms.doctor import Row

_STYLES = {"PASS": "green", "FAIL": "red", "absent": "dim"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `hardpoint doctor`."""
    parser.add_argument("--json", action="store_true", help="as JSON")


def execute(args: argparse.Namespace) -> int:
    """Try every platform, and look at the model folder."""
    from hardpoint_platforms.discovery import discover
    from hardpoint_platforms.doctor import diagnose

    rows = diagnose(discover())
    failed = any(row.status == "FAIL" for row in rows)
    store = model_folder(env.HOME.read() / "models")
    if args.json:
        document = {
            "ok": not failed,
            "platforms": [dataclasses.asdict(row) for row in rows],
            "versions": versions(),
            "models": store,
        }
        print(json.dumps(document))
    else:
        show(rows, store)
    return 1 if failed else 0


def show(rows: Sequence[Row], store: dict[str, Any]) -> None:
    """The result for people, on stdout."""
    for row in rows:
        status = console.paint(f"{row.status:<6}", _STYLES[row.status])
        print(f"{status} {row.platform} ({row.kind}, {row.distribution} {row.version})")
        if row.reason:
            print(f"         {row.reason}")
        if row.mend:
            print(f"         -> {row.mend}")
        for device in row.devices:
            print(f"  {console.paint(f'{device.status:<6}', _STYLES[device.status])} {device.device}: {device.name}")
            print(f"           {'computed ' if device.status == 'PASS' else ''}{device.computed}")
            if device.mend:
                print(f"           -> {device.mend}")
            if device.memory_total:
                free, total = format_bytes(device.memory_free), format_bytes(device.memory_total)
                print(f"           memory   {free} free of {total}")
            for name, value, reason in device.tuning:
                print(f"           {name:<8} {value}" + (f" ({reason})" if reason else ""))
            if not device.verified:
                print("           its authors have not run this plugin on real hardware of this kind")
    print()
    print("  ".join(f"{name} {number}" for name, number in versions().items()))
    print(f"models: {store['files']} files, {format_bytes(store['bytes'])} in {store['path']}")


def model_folder(path: Path) -> dict[str, Any]:
    """Number and bytes of the files in the folder of pulled models."""
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else []
    return {"path": str(path), "files": len(files), "bytes": sum(file.stat().st_size for file in files)}
