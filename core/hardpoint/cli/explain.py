"""Which provider runs each op of a model on a device, why, and who refused it.

The model is built on the device without its weights. Layers that are alike share one row; --all shows each.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from hardpoint.cli import console
from hardpoint.cli.model_name import chosen_model
from hardpoint.config.arguments import ENGINE_SECTIONS, add_sections, engine_config

if TYPE_CHECKING:
    from hardpoint_platforms.binding import Binding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `hardpoint explain`."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="folder, .gguf file, hub id or named model")
    parser.add_argument("--json", action="store_true", help="every row, as JSON")
    parser.add_argument("--all", action="store_true", help="one row per op instance, layers not folded")
    add_sections(parser, ENGINE_SECTIONS)


def execute(args: argparse.Namespace) -> int:
    """Build the op table and print it."""
    from hardpoint.engine.build import explain_model

    config = engine_config(args, chosen_model(args.model, "explain"))
    parts = explain_model(config)
    if args.json:
        print(json.dumps([{"device": device} | as_json(binding) for device, found in parts for binding in found]))
        return 0
    for number, (device, bindings) in enumerate(parts):
        if number:
            print()
        if len(parts) > 1:
            print(f"{console.paint(device, 'bold')}\n")
        _show(bindings, args.all)
    return 0


def _show(bindings: Sequence[Binding], every: bool) -> None:
    """The table of one device, and what it adds up to. Without `every`, blocks that no provider has are told last."""
    from hardpoint_platforms.binding import DECOMPOSED

    def unknown(one: Binding) -> bool:
        return not every and one.provider == DECOMPOSED and not one.refused

    whole = dict.fromkeys(one.instance.op for one in bindings if unknown(one))
    bindings = [one for one in bindings if not unknown(one)]
    rows = [[where, *row] for where, row in (plain(bindings) if every else folded(bindings))]
    styles = ["yellow" if row[4].startswith("fallback") else None for row in rows]
    headers = ["where", "op", "altitude", "provider", "why", "refused"]
    if not any(row[-1] for row in rows):
        headers, rows = headers[:-1], [row[:-1] for row in rows]
    console.show_table(headers, rows, styles=styles)
    chosen = Counter(binding.provider for binding in bindings if binding.provider != DECOMPOSED)
    print()
    print(f"{chosen.total()} op instances: " + ", ".join(f"{name} {count}" for name, count in chosen.most_common()))
    if whole:
        print(f"Bound op by op, as no provider has them whole: {', '.join(whole)}.")
    if outside := sum(not binding.held for binding in bindings):
        print(
            f"{outside} of them are not held by the step's program: it is split there, or the whole step runs op by op."
        )
        print("Which of the two, a server says when it starts (steps).")


def as_json(binding: Binding) -> dict[str, Any]:
    """One binding with everything that was asked."""
    instance = binding.instance
    return {
        "where": instance.where,
        "op": instance.op,
        "altitude": binding.altitude.name.lower(),
        "provider": binding.provider,
        "reason": binding.reason,
        "fallback": binding.fallback,
        "held": binding.held,
        "refused": [{"provider": refusal.provider, "reason": refusal.reason} for refusal in binding.refused],
        "dtype": str(instance.dtype).removeprefix("torch."),
        "attributes": {name: _plain_value(value) for name, value in instance.attrs.items()},
        "weights": {
            name: {
                "shape": list(spec.shape),
                "dtype": str(spec.dtype).removeprefix("torch."),
                "scheme": None if spec.scheme is None else str(spec.scheme),
            }
            for name, spec in instance.weights.items()
        },
    }


def plain(bindings: Iterable[Binding]) -> list[tuple[str, list[str]]]:
    """(where, the other cells) per binding."""
    return [(binding.instance.where, _cells(binding)) for binding in bindings]


def folded(bindings: Iterable[Binding]) -> list[tuple[str, list[str]]]:
    """Likewise, rows that differ in the layer number alone as one: "layers.0-29.self_attn.qkv x30"."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for binding in bindings:
        match = re.search(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", binding.instance.where)
        template = binding.instance.where
        if match:
            template = f"{template[: match.start()]}{{}}{template[match.end() :]}"
        groups.setdefault((template, *_cells(binding)), []).append(int(match[0]) if match else -1)
    rows = []
    for (template, *cells), layers in groups.items():
        where = template.replace("{}", spans(layers))
        rows.append((where if len(layers) == 1 else f"{where} x{len(layers)}", cells))
    return rows


def spans(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _cells(binding: Binding) -> list[str]:
    refused = "; ".join(f"{refusal.provider}: {refusal.reason}" for refusal in binding.refused)
    notes = ["fallback"] * binding.fallback + ["not held by the program"] * (not binding.held) + [binding.reason]
    why = ". ".join(note for note in notes if note)
    return [binding.instance.op, binding.altitude.name.lower(), binding.provider, why, refused]


def _plain_value(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain_value(item) for item in value]
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
