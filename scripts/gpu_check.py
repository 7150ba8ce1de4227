"""The conformance kit and the seeded workloads on a GPU, in one go.

    python scripts/gpu_check.py --device cuda --out report        needs hardpoint, hardpoint-cuda and a GPU

Most of the kit's time on a GPU is the compiling of kernels, which is done on the processor, so that groups of checks
run beside each other; those that fill the device's memory run alone. Writes every verdict to OUT/conformance.json, a
table to OUT/conformance.md; the workloads, on made-up weights in the shape of Llama-3.1-8B and beside the other engines
that are installed, write OUT/compare.json and OUT/compare.md. Exit code 1 if a check fails or a group does not end.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

#: Groups that look at free memory, or use it up.
ALONE = ("load", "memory", "state")
BESIDE = ("ops", "models", "quantized", "sampling", "programs", "scheduler", "transfer", "collectives")
#: The largest group, by dtype.
SPLIT = {f"attention, {dtype}": f"attention/*/{dtype}" for dtype in ("bfloat16", "float16", "float32")}
WORKLOADS = ("a", "b", "c", "d", "s8", "s32", "s64", "s128", "s512")
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
STATUSES = ("pass", "fail", "refused", "unverified")


def kit(device: str, name: str, seconds: float) -> tuple[str, list[dict[str, Any]], str]:
    """Verdicts of a group, and what went wrong if it did not end."""
    what = ("--case", SPLIT[name]) if name in SPLIT else ("--group", name)
    command = [sys.executable, "-m", "hardpoint", "conformance", "--device", device, *what, "--json"]
    started = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return name, [], f"did not end in {seconds:.0f} s"
    print(f"  {name}: {time.monotonic() - started:.0f} s", flush=True)
    try:
        return name, json.loads(done.stdout)["verdicts"], ""
    except (ValueError, KeyError):
        return name, [], f"exit code {done.returncode}: {done.stderr[-400:]}"


def conformance(device: str, seconds: float) -> dict[str, tuple[list[dict[str, Any]], str]]:
    """Verdicts and trouble, by group."""
    results = [kit(device, name, seconds) for name in ALONE]
    names = (*SPLIT, *BESIDE)
    with ThreadPoolExecutor(len(names)) as pool:
        results += pool.map(lambda name: kit(device, name, seconds), names)
    return {name: (verdicts, trouble) for name, verdicts, trouble in results}


def table(device: str, results: dict[str, tuple[list[dict[str, Any]], str]]) -> str:
    """Markdown."""
    import torch

    where = torch.cuda.get_device_name() if torch.cuda.is_available() else device
    lines = [
        f"`python scripts/gpu_check.py --device {device}`, {date.today()}, {where}, torch {torch.__version__}.",
        "",
        "| group | " + " | ".join(STATUSES) + " | |",
        "|---|" + "---|" * (len(STATUSES) + 1),
    ]
    for name, (verdicts, trouble) in results.items():
        counts = Counter(verdict["status"] for verdict in verdicts)
        lines.append(f"| {name} | " + " | ".join(str(counts[status]) for status in STATUSES) + f" | {trouble} |")
    failed = [v for verdicts, _ in results.values() for v in verdicts if v["status"] == "fail"]
    lines += ["", *(f"* `{verdict['case']}`: {verdict['message']}" for verdict in failed)]
    return "\n".join(lines).rstrip() + "\n"


def workloads(arguments: argparse.Namespace) -> bool:
    """Whether `hardpoint bench compare` failed."""
    model = arguments.out / "llama-8b"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(LLAMA))
    limits = ["--max-model-len", "4096", "--max-num-seqs", "512", "--max-batch-tokens", "8192"]
    command = [sys.executable, "-m", "hardpoint", "bench", "compare", str(model), "--device", arguments.device]
    command += ["--load-format", "dummy", "--dtype", "bfloat16", *limits, "--out", str(arguments.out)]
    return subprocess.run([*command, "--rounds", "2", "--workloads", *arguments.workloads]).returncode != 0


def main() -> int:
    """Kit, then workloads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True, help="folder for the reports")
    parser.add_argument("--seconds", type=float, default=400, help="for each group of checks")
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS), help="as `bench compare` takes them")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    print("== conformance", flush=True)
    results = conformance(arguments.device, arguments.seconds)
    verdicts = {name: {"verdicts": found, "trouble": trouble} for name, (found, trouble) in results.items()}
    (arguments.out / "conformance.json").write_text(json.dumps(verdicts))
    told = table(arguments.device, results)
    (arguments.out / "conformance.md").write_text(told)
    print(told, flush=True)
    bad = any(trouble or any(v["status"] == "fail" for v in found) for found, trouble in results.values())
    if arguments.workloads:
        print("== workloads", flush=True)
        bad = workloads(arguments) or bad
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
