"""The conformance kit and the seeded workloads on a GPU, in one go.

    python scripts/gpu_check.py --device cuda --out report        needs hardpoint, hardpoint-cuda and a GPU

Writes every verdict to OUT/conformance.json, pages to read to OUT/conformance.html and .md; the workloads, on made-up
weights in the shape of Llama-3.1-8B and beside the other engines that are installed, write OUT/compare.json and
OUT/compare.md. Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

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


def conformance(arguments: argparse.Namespace) -> dict[str, Any]:
    """The kit's report, as JSON; with "trouble" alone where there is none."""
    kit = [sys.executable, "-m", "hardpoint", "conformance", "--device", arguments.device]
    asked = ["--level", str(arguments.level), "--jobs", str(arguments.jobs), "--within", str(arguments.seconds)]
    page = ["--html", str(arguments.out / "conformance.html")]
    done = subprocess.run([*kit, *asked, *page, "--json"], stdout=subprocess.PIPE)
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        return {"trouble": f"exit code {done.returncode}"}
    return report


def table(device: str, report: dict[str, Any]) -> str:
    """Markdown."""
    if trouble := report.get("trouble"):
        return f"The kit {trouble}.\n"
    machine = report["machine"]
    level = "no level" if report["reached"] is None else f"level {report['reached']}"
    lines = [
        f"`python scripts/gpu_check.py --device {device}`, {machine['date']}, {report['name']}, torch "
        f"{machine['torch']}: {level} of the {report['asked']} asked, {report['seconds']:.0f} s.",
        "",
        "| group | " + " | ".join(STATUSES) + " |",
        "|---|" + "---|" * len(STATUSES),
    ]
    verdicts = report["verdicts"]
    for group in dict.fromkeys(verdict["group"] for verdict in verdicts):
        counts = Counter(verdict["status"] for verdict in verdicts if verdict["group"] == group)
        lines.append(f"| {group} | " + " | ".join(str(counts[status]) for status in STATUSES) + " |")
    failed = [verdict for verdict in verdicts if verdict["status"] == "fail"]
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
    parser.add_argument("--seconds", type=float, default=500, help="after which the kit begins no more checks")
    parser.add_argument("--level", type=int, default=6, help="of the kit's ladder")
    parser.add_argument("--jobs", type=int, default=max((os.cpu_count() or 2) - 2, 1), help="the kit's processes")
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS), help="as `bench compare` takes them")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    print("== conformance", flush=True)
    report = conformance(arguments)
    (arguments.out / "conformance.json").write_text(json.dumps(report))
    told = table(arguments.device, report)
    (arguments.out / "conformance.md").write_text(told)
    print(told, flush=True)
    bad = "trouble" in report or any(verdict["status"] == "fail" for verdict in report["verdicts"])
    if arguments.workloads:
        print("== workloads", flush=True)
        bad = workloads(arguments) or bad
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
