"""What an engine is made of, composed of one frozen configuration per owner. All values are concrete or "auto";
`hardpoint.engine.build` resolves "auto" once, when device and model are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hardpoint.config.placement import Placement
from hardpoint_platforms.choices import KernelChoice


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and how it is read.

    Attributes:
        model: folder, .gguf file, hub id ("Qwen/Qwen3-0.6B", "repo:Q4_K_M") or a named model ("smollm2").
        served_names: names that requests may use; the model's own if empty.
        tokenizer: another tokenizer's folder, or None for the model's.
        chat_template: path of a Jinja file that replaces the model's.
        dtype: auto, float32, bfloat16 or float16, of activations and unquantized weights.
        max_model_len: longest sequence in tokens; None takes the model's.
        load_format: auto, safetensors, gguf or dummy (random weights of the real shapes).
        overrides: replaces keys of the model's config.
        generation_config: auto takes the model's sampling defaults (temperature, top_p ...), none leaves them out.
        seed: of dummy weights and of requests without a seed.
    """

    model: str
    served_names: tuple[str, ...] = ()
    tokenizer: str | None = None
    chat_template: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    load_format: str = "auto"
    overrides: Mapping[str, Any] = field(default_factory=dict)
    generation_config: str = "auto"
    seed: int = 0


@dataclass(frozen=True)
class DeviceConfig:
    """Which device.

    Attributes:
        device: auto, NAME or NAME:INDEX.
        placement: layers on devices of several platforms, "layers[0:15]=cpu,layers[15:30]=acme"; goes before device.
        options: passed to the platform's `open`, checked against its manifest.
        on_fallback: error, warn or allow, for ops that fall to the reference.
        numerics: fast or exact; short for the device's option of that name.
        threads: of the host; likewise.
        kernels: providers that some ops must get, "attention[layers.3.*]=reference" or "linear=NAME".
        startup_timeout: seconds that one piece of starting may take (an op's first call, a program, a weight) before
            the engine gives up and says where it hangs.
        step_timeout: seconds that one step may take before it does likewise.
        tensor_parallel_size: chips over which each layer is cut, from `device` on; of platforms that run several chips
            in one process.
        expert_parallel: of these, each has whole experts instead of a part of every expert.
    """

    device: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    on_fallback: str = "warn"
    numerics: str | None = None
    threads: int | None = None
    placement: Placement | None = None
    kernels: tuple[KernelChoice, ...] = ()
    startup_timeout: float = 300.0
    step_timeout: float = 600.0
    tensor_parallel_size: int = 1
    expert_parallel: bool = False


@dataclass(frozen=True)
class CacheConfig:
    """The KV cache.

    Attributes:
        page_tokens: tokens per page.
        kv_cache_memory: bytes for all pages; None measures.
        num_kv_pages: number of pages; goes before kv_cache_memory.
        memory_fraction: share of the free memory that the measured plan takes.
        kv_dtype: auto or a dtype's name.
        prefix_caching: keep pages of finished requests and share equal prefixes.
    """

    page_tokens: int = 16
    kv_cache_memory: int | None = None
    num_kv_pages: int | None = None
    memory_fraction: float = 0.5
    kv_dtype: str = "auto"
    prefix_caching: bool = True


@dataclass(frozen=True)
class SchedulerConfig:
    """What one step may hold.

    Attributes:
        max_batch_tokens: token budget of a step; None chooses.
        max_num_seqs: requests running at once; where it is not given, no more than max_batch_tokens.
        chunked_prefill: whether a prompt may be spread over steps.
        policy: fcfs or priority.
        overlap: schedule step n + 1 while step n runs.
        max_waiting: requests that may queue; more are refused.
    """

    max_batch_tokens: int | None = None
    max_num_seqs: int = 256
    chunked_prefill: bool = True
    policy: str = "fcfs"
    overlap: bool = True
    max_waiting: int = 8192


@dataclass(frozen=True)
class EngineConfig:
    """Everything that the engine process needs."""

    model: ModelConfig
    device: DeviceConfig = field(default_factory=DeviceConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
