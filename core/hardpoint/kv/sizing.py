"""From bytes of memory to a number of pages."""

from __future__ import annotations

from dataclasses import dataclass

from hardpoint.errors import ConfigError
from hardpoint.kv.groups import Windows, capacity_tokens, peak_pages


@dataclass(frozen=True)
class PagePlan:
    """How large the KV cache is.

    Attributes:
        num_pages: page ids, page 0 among them: what `StateCache.allocate` and `KVPager` take.
        page_tokens: tokens per page.
        kv_bytes: memory of all pages.
        capacity_tokens: longest sequence that fits alone.
        max_concurrency: sequences of max_model_len tokens that fit at once; below 1 where not even one does.
        warning: for people, where requests will be limited by the pool and not by max_model_len.
    """

    num_pages: int
    page_tokens: int
    kv_bytes: int
    capacity_tokens: int
    max_concurrency: float
    warning: str | None = None

    @property
    def usable_pages(self) -> int:
        """All but page 0."""
        return self.num_pages - 1


def plan_pages(
    *,
    page_bytes: int,
    page_tokens: int,
    windows: Windows,
    max_model_len: int,
    max_num_seqs: int,
    memory: int | None = None,
    num_pages: int | None = None,
    chunk: int | None = 1,
) -> PagePlan:
    """Decide the number of pages.

    page_bytes: one page over all pool layers, alignment included. memory: bytes for all pages; num_pages: usable pages,
    goes before memory. chunk: least tokens of a prefill chunk, None where prompts run whole. More pages than
    `max_num_seqs` sequences of `max_model_len` tokens can hold are not taken, unless num_pages asks for them.

    Raises ConfigError where the pool would not hold one short sequence: two pages per group, or max_model_len if that
    is less. A pool that holds more than that but not max_model_len is fine: `warning` says what it means.
    """
    if page_tokens < 1 or page_bytes < 1 or max_model_len < 1:
        raise ConfigError(f"page of {page_tokens} tokens and {page_bytes} bytes: check --page-tokens, --max-model-len")
    whole = peak_pages(windows, page_tokens, max_model_len, chunk)
    if num_pages is not None:
        usable, source = num_pages, f"--num-kv-pages {num_pages}"
    elif memory is not None:
        usable = min(memory // page_bytes - 1, whole * max_num_seqs)
        source = f"{memory / 2**20:.1f} MiB for the KV cache (--kv-cache-memory, or --memory-fraction of what is free)"
    else:
        raise ConfigError("the KV cache needs a size: set --kv-cache-memory or --num-kv-pages")
    least = peak_pages(windows, page_tokens, min(max_model_len, 2 * page_tokens), chunk)
    if usable < least:
        raise ConfigError(
            f"{source} gives {max(usable, 0)} pages of {page_tokens} tokens ({page_bytes} bytes each); "
            f"at least {least} are needed for one short sequence",
            hint="raise --kv-cache-memory or --num-kv-pages, or lower --page-tokens",
        )
    capacity = capacity_tokens(windows, page_tokens, usable, chunk)
    warning = None
    if capacity < max_model_len:
        warning = (
            f"the KV cache holds {capacity} tokens of one sequence, less than the context of {max_model_len}: longer "
            f"prompts are refused, longer outputs end with finish reason length (raise --kv-cache-memory or "
            f"--num-kv-pages, or set --max-model-len {capacity})"
        )
    return PagePlan(
        num_pages=usable + 1,
        page_tokens=page_tokens,
        kv_bytes=(usable + 1) * page_bytes,
        capacity_tokens=capacity,
        max_concurrency=usable / whole,
        warning=warning,
    )
