"""The text that `/metrics` answers with."""

from __future__ import annotations

from prometheus_client.exposition import choose_encoder

from hardpoint.metrics.registry import ServerMetrics


def render(metrics: ServerMetrics, accept: str) -> tuple[bytes, str]:
    """All metrics as (body, content type), in the format that the Accept header prefers."""
    encoder, content_type = choose_encoder(accept)
    return encoder(metrics.registry), content_type
