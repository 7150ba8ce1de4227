"""What fits on a chip: weights, and pages of the KV cache in what they leave, in the groups of the real engine."""

from __future__ import annotations

from hardpoint.errors import ConfigError
from hardpoint.kv.sizing import PagePlan, plan_pages
from hardpoint.models.grouping import group_layers
from hardpoint.scheduler.settings import SchedulerSettings
from hardpoint.simulate.hardware import Hardware
from hardpoint.simulate.shape import DTYPE_BYTES, ModelShape
from hardpoint_platforms.state_cache import LayerCache


def size_cache(
    shape: ModelShape,
    hardware: Hardware,
    weight_bytes: float,
    *,
    tp: int,
    settings: SchedulerSettings,
    kv_dtype: str = "bfloat16",
    page_tokens: int = 16,
    memory_fraction: float = 0.9,
) -> tuple[PagePlan, tuple[int | None, ...]]:
    """Pages of one replica, and its cache groups: what `memory_fraction` of a chip's memory leaves beside the weights.

    Raises ConfigError where the weights or one short sequence do not fit.
    """
    caches = [LayerCache((("kv", 1, cached // min(tp, heads)),)) for heads, cached in shape.layer_cached]
    grouping = group_layers(shape.layer_windows, caches)
    numbers = sum(cache.elements_per_token() for cache in grouping.pool)
    room = hardware.memory * memory_fraction - weight_bytes
    if room <= 0:
        raise ConfigError(
            f"{shape.name} has {weight_bytes / 1e9:.1f} GB of weights on each of {tp} chips, {hardware.name} has "
            f"{hardware.memory / 1e9:.0f} GB of memory, {memory_fraction:.0%} of it to use",
            hint="raise --tp, or keep the weights in fewer bits: --weights",
        )
    windows = tuple(group.window for group in grouping.groups)
    plan = plan_pages(
        page_bytes=int(page_tokens * numbers * DTYPE_BYTES[kv_dtype]),
        page_tokens=page_tokens,
        windows=windows,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        memory=int(room),
        chunk=settings.min_chunk if settings.chunked_prefill else None,
    )
    return plan, windows
