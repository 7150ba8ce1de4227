"""The model folder: `list` shows what was pulled and which named models can be; `rm` removes one."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from hardpoint.cli import console
from hardpoint.config.arguments import Parser
from hardpoint.config.quantities import format_bytes

if TYPE_CHECKING:
    from hardpoint.weights.store import StoredModel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `hardpoint models`."""
    actions = parser.add_subparsers(dest="action", metavar="list|rm", parser_class=Parser)
    listing = actions.add_parser("list", help="what was pulled, and what can be")
    listing.add_argument("--json", action="store_true", help="as JSON")
    removal = actions.add_parser("rm", help="remove a pulled model")
    removal.add_argument("name", metavar="NAME", help="as `hardpoint models list` shows it")


def execute(args: argparse.Namespace) -> int:
    """List or remove."""
    from hardpoint.weights.store import list_models, models_folder, remove

    if args.action == "rm":
        console.note(f"removed {args.name}: {format_bytes(remove(args.name))} freed")
        return 0
    rows = list_models()
    if getattr(args, "json", False):
        print(json.dumps([as_json(row) for row in rows]))
        return 0
    table = [[row.name, row.format, format_bytes(row.bytes), when(row), row.title] for row in rows]
    styles = ["dim" if row.path is None else None for row in rows]
    console.show_table(["name", "format", "size", "pulled", ""], table, styles=styles, right=(2,))
    console.note(f"in {models_folder()}; any hub id can be pulled as well")
    return 0


def when(row: StoredModel) -> str:
    """When it was pulled, or how to get it."""
    return str(row.pulled) if row.path is not None else f"no (hardpoint pull {row.name})"


def as_json(row: StoredModel) -> dict[str, object]:
    """Plain data; `path` is null for what was not pulled."""
    return {
        "name": row.name,
        "title": row.title,
        "format": row.format,
        "path": None if row.path is None else str(row.path),
        "bytes": row.bytes,
        "pulled": None if row.pulled is None else row.pulled.isoformat(),
    }
