"""The start-up story: what `serve` prints when it is ready. Plain text from plain data."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence

from hardpoint.config.quantities import format_bytes
from hardpoint.protocol.messages import EngineInfo

#: Fallback ops named one by one; more are counted.
SHOWN_FALLBACKS = 4
_INDENT = 13


def engine_story(info: EngineInfo, model: str, seconds: float) -> list[str]:
    """The engine in a few lines: device and why, tuning, memory, pages, ops, fallbacks, phases.

    seconds: from the start of the command until the engine was ready.
    """
    tokens = info.num_pages * info.page_tokens
    weights, cache = format_bytes(info.weight_bytes), format_bytes(info.kv_bytes)
    lines = [
        _row("model", f"{model}, {info.dtype}, context {info.max_model_len:,} tokens"),
        _row("device", _because(f"{info.device}, {info.device_name}", info.device_reason)),
    ]
    lines += [_row("tuning", _because(f"{name} {value}", reason)) for name, value, reason in info.tuning]
    lines += [
        _row("memory", f"weights {weights}, KV cache {cache} ({info.kv_dtype})"),
        _row(
            "pages",
            f"{info.num_pages:,} of {info.page_tokens} tokens = {tokens:,} tokens, "
            f"{info.max_concurrency:.1f} sequences of full length at once",
        ),
        _row("ops", ", ".join(f"{provider} {count}" for provider, count in info.ops)),
    ]
    if info.default_sampling:
        chosen = ", ".join(f"{name} {value:g}" for name, value in info.default_sampling.items())
        lines.append(_row("sampling", f"{chosen} unless a request says otherwise (the model's generation config)"))
    lines += [_row("fallback", text) for text in _short(info.fallbacks)]
    phases = ", ".join(f"{name} {spent:.1f}" for name, spent in info.phases)
    lines.append(_row("ready", f"after {seconds:.1f} s" + (f": {phases}" if phases else "")))
    return _without_repeats(lines)


def server_story(base_url: str, model: str, *, chat: bool, key_needed: bool) -> list[str]:
    """Where the server listens, and a request to try."""
    messages = {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    body = {"model": model} | (messages if chat else {"prompt": "The sky is blue because"}) | {"max_tokens": 64}
    path = "chat/completions" if chat else "completions"
    key = " -H 'Authorization: Bearer YOUR_KEY'" if key_needed else ""
    return [
        _row("serving", f"{base_url}/v1"),
        _row("try", f"curl {base_url}/v1/{path}{key} \\"),
        f"{'':<{_INDENT}}  -H 'Content-Type: application/json' -d '{json.dumps(body)}'",
    ]


def _because(what: str, reason: str) -> str:
    return f"{what} ({reason})" if reason else what


def _row(name: str, text: str) -> str:
    wrapped = textwrap.wrap(text, 108, break_long_words=False, break_on_hyphens=False) or [""]
    return f"\n{'':<{_INDENT}}".join([f"  {name:<{_INDENT - 2}}{wrapped[0]}", *wrapped[1:]])


def _short(fallbacks: Sequence[str]) -> list[str]:
    rest = len(fallbacks) - SHOWN_FALLBACKS
    shown = list(fallbacks[:SHOWN_FALLBACKS])
    return [*shown, f"and {rest} more; `hardpoint explain` shows all"] if rest > 0 else shown


def _without_repeats(lines: Sequence[str]) -> list[str]:
    """Leave the row's name out where it repeats the row above's."""
    result: list[str] = []
    last = ""
    for line in lines:
        name = line[2:_INDENT].strip()
        result.append(f"{'':<{_INDENT}}{line[_INDENT:]}" if name == last else line)
        last = name
    return result
