"""Would a model fit on devices that you do not have? Its weights, its cache and its programs are weighed for them.

  hardpoint plan llama-3.1-8b --device PLATFORM:KIND --tensor-parallel-size 4
  hardpoint plan qwen3-30b-a3b --device PLATFORM:KIND --tensor-parallel-size 4 --expert-parallel --compile

Needs the platform's compiler, and none of its devices; which kinds it knows, the platform's own page says. MODEL is a
config.json, a folder, a pulled model or a named shape (`hardpoint simulate --list`). No weights are read; they are
weighed as plain ones.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardpoint.cli import console
from hardpoint.config.arguments import ENGINE_SECTIONS, add_sections, engine_config
from hardpoint.errors import ConfigError

if TYPE_CHECKING:
    from hardpoint.config.engine import EngineConfig
    from hardpoint.worker.planning import PlannedModel
    from hardpoint_platforms.program import Bucket


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `hardpoint plan`."""
    parser.add_argument("model", metavar="MODEL", help="config.json, folder, pulled model or named shape")
    parser.add_argument(
        "--compile",
        action="store_true",
        help="also compile the largest decode and the largest prefill program for greedy requests (minutes)",
    )
    parser.add_argument("--json", action="store_true", help="the plan as JSON")
    add_sections(parser, ENGINE_SECTIONS, without=("model.load_format", "model.seed", "device.placement"))


def execute(args: argparse.Namespace) -> int:
    """Weigh, compile where asked, and print."""
    config = engine_config(args, args.model)
    planned = plan_model(config, args.compile)
    if args.json:
        print(json.dumps(_as_json(planned), indent=2))
    else:
        _show(planned, config.device.tensor_parallel_size)
    return 0


def plan_model(config: EngineConfig, compiled: bool) -> PlannedModel:
    """The plan of a configuration whose device is a platform and a kind, NAME:KIND. Raises HardpointError."""
    from hardpoint.simulate.models import read_config
    from hardpoint.weights.dummy import DummySource
    from hardpoint.weights.source import Checkpoint
    from hardpoint.worker.planning import Planner
    from hardpoint_platforms.communication import TENSOR_AXIS, Mesh
    from hardpoint_platforms.discovery import discover
    from hardpoint_platforms.selection import open_target

    platform, colon, target = config.device.device.partition(":")
    if not (colon and target):
        raise ConfigError(
            f"--device {config.device.device}: plan is for devices that are not here",
            hint="name a platform and a kind of its devices: --device PLATFORM:KIND",
        )
    values = {**read_config(config.model.model)[0], **config.model.overrides}
    checkpoint = Checkpoint(Path(config.model.model), values, {}, DummySource(empty=True), "dummy")
    mesh = Mesh((TENSOR_AXIS,), (config.device.tensor_parallel_size,))
    device = open_target(platform, target, discover(), mesh, config.device.options)
    try:
        if compiled:
            console.note(f"compiling two programs for {device.info.name}: minutes each for a large model")
        return Planner(config, checkpoint, device).plan(_largest if compiled else None)
    finally:
        device.close()


def _largest(buckets: Sequence[Bucket]) -> list[Bucket]:
    """The largest decode and the largest prefill of the simplest way of sampling."""
    plainest = min(bucket.sampling for bucket in buckets)
    same = [bucket for bucket in buckets if bucket.sampling == plainest]
    kinds = ([b for b in same if b.query == 1], [b for b in same if b.query != 1])
    return [max(kind, key=lambda bucket: (bucket.tokens, bucket.requests)) for kind in kinds if kind]


def _show(planned: PlannedModel, ranks: int) -> None:
    pages = planned.pages
    each = f"on each of {ranks} devices" if ranks > 1 else "on the device"
    rows = [
        ["memory", _gigabytes(planned.memory), "as published for this kind"],
        ["weights", _gigabytes(planned.weights), planned.dtype],
        [
            "cache",
            _gigabytes(pages.kv_bytes),
            f"{pages.usable_pages:,} pages of {pages.page_tokens} tokens in {planned.kv_dtype}: "
            f"{pages.max_concurrency:.1f} sequences of {planned.max_model_len:,} tokens",
        ],
    ]
    for bucket, found in planned.programs:
        size = f"{bucket.tokens} tokens of {bucket.requests} requests"
        rows.append([f"{_kind(bucket)}, temporaries", _gigabytes(found.temporaries), size])
    console.show_table(["", each, ""], rows)
    used = planned.weights + pages.kv_bytes + max((found.temporaries for _, found in planned.programs), default=0)
    print(f"\n{_gigabytes(used)} of {_gigabytes(planned.memory)} {each}.")
    for bucket, found in planned.programs:
        counted = ", ".join(f"{count} {name}" for name, count in found.collectives.items()) or "no collectives"
        print(f"{_kind(bucket)}: compiled in {found.seconds:.0f} s; {found.kernels} own kernels, {counted}")
    if pages.warning:
        print(f"\n{console.paint(pages.warning, 'yellow')}")


def _kind(bucket: Bucket) -> str:
    return "decode" if bucket.query == 1 else "prefill"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"


def _as_json(planned: PlannedModel) -> dict[str, Any]:
    whole = asdict(planned) | {"programs": []}
    for bucket, found in planned.programs:
        sizes = {"tokens": bucket.tokens, "requests": bucket.requests, "query": bucket.query}
        whole["programs"].append(sizes | {"sampling": bucket.sampling.name.lower()} | asdict(found))
    return whole
