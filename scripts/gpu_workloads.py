"""Seeded workloads through the engine alone, no HTTP: what docs/experiments.md gives for a GPU.

    python scripts/gpu_workloads.py --device cuda a b d s64        needs hardpoint, hardpoint-cuda and a GPU

The model has the shape of Llama-3.1-8B with random weights; greedy, ends ignored, prefix cache off.

    a      1 request, 128 tokens in, 256 out
    b      256 requests, 128 in, 128 out
    c      512 requests of unlike lengths, log-normal, about 220 in and 180 out
    d      32 prompts of 2,048 tokens, 1 out
    sN     N requests, 128 in, 128 out
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from pathlib import Path

import numpy as np

from hardpoint.config.engine import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from hardpoint.engine.build import BuiltEngine, build_engine
from hardpoint.protocol.messages import EngineRequest
from hardpoint.request.sampling import SamplingParams

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
#: Prompt and number of output tokens of each request.
Workload = list[tuple[list[int], int]]


def workload(name: str, vocabulary: int, seed: int = 0) -> Workload:
    """The requests of a workload by its letter."""
    random = np.random.default_rng([seed, sum(map(ord, name))])

    def lengths(count: int, mean: float, sigma: float, most: int) -> list[int]:
        drawn = random.lognormal(math.log(mean) - sigma * sigma / 2, sigma, count)
        return [int(length) for length in np.clip(np.rint(drawn), 4, most)]

    plans: dict[str, list[tuple[int, int]]] = {
        "a": [(128, 256)],
        "b": [(128, 128)] * 256,
        "c": list(zip(lengths(512, 220, 0.9, 2048), lengths(512, 180, 0.7, 1024), strict=True)),
        "d": [(2048, 1)] * 32,
    }
    plan = [(128, 128)] * int(name[1:]) if name.startswith("s") else plans[name]
    return [(random.integers(0, vocabulary, into).tolist(), out) for into, out in plan]


def run(built: BuiltEngine, requests: Workload, tag: str) -> tuple[float, int, int]:
    """Seconds, output tokens and steps. Raises SystemExit where a request fails."""
    started, tokens, steps = time.perf_counter(), 0, 0
    for number, (prompt, out) in enumerate(requests):
        params = SamplingParams(temperature=0.0, max_tokens=out, ignore_eos=True)
        built.engine.add(EngineRequest(request_id=f"{tag}-{number}", prompt=prompt, params=params))
    while built.engine.has_work:
        steps += 1
        for output in built.engine.step().outputs:
            tokens += len(output.token_ids)
            if output.error:
                raise SystemExit(output.error)
    return time.perf_counter() - started, tokens, steps


def build(arguments: argparse.Namespace) -> BuiltEngine:
    """The engine, its weights made up."""
    with tempfile.TemporaryDirectory() as folder:
        shape = LLAMA | {key: json.loads(value) for key, value in arguments.shape}
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        config = EngineConfig(
            ModelConfig(folder, dtype=arguments.dtype, max_model_len=4096, load_format="dummy"),
            DeviceConfig(arguments.device),
            CacheConfig(prefix_caching=False, memory_fraction=0.8),
            SchedulerConfig(max_num_seqs=512, max_batch_tokens=arguments.max_batch_tokens),
        )
        return build_engine(config)


def main() -> None:
    """Each workload `--rounds` times; the first round also compiles what was not compiled before."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", metavar="WORKLOAD")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-batch-tokens", type=int, default=8192)
    parser.add_argument(
        "--shape", action="append", default=[], type=lambda text: text.partition("=")[::2], metavar="KEY=JSON",
        help="another value in the model's config, such as num_hidden_layers=2",
    )  # fmt: skip
    arguments = parser.parse_args()
    started = time.perf_counter()
    built = build(arguments)
    print(f"{built.info.device} ({built.info.device_name}): engine ready in {time.perf_counter() - started:.1f} s")
    for name in arguments.workloads:
        requests = workload(name, built.info.vocab_size)
        into = sum(len(prompt) for prompt, _ in requests)
        for turn in range(arguments.rounds):
            seconds, tokens, steps = run(built, requests, f"{name}{turn}")
            print(
                f"{name}: {seconds:.3f} s, {tokens / seconds:,.0f} output tok/s, {into / seconds:,.0f} prompt tok/s, "
                f"{seconds / steps * 1e3:.2f} ms per step",
                flush=True,
            )
    built.engine.close()


if __name__ == "__main__":
    main()
