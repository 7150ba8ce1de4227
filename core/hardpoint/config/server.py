"""The HTTP side."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerConfig:
    """Attributes:
    host, port: where to listen.
    api_keys: any of them opens every route but health; empty leaves all open.
    drain_timeout: seconds that running requests get after SIGTERM.
    health_timeout: seconds without a sign of life after which /health is 503.
    max_body_bytes: larger bodies are refused (413).
    max_logprobs: most top log-probabilities a request may ask.
    max_n: most sequences a request may ask.
    max_stop_strings: most stop strings; each is limited to 1,024 characters.
    cors_origins: allowed origins.
    log_requests: one line per request.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    drain_timeout: float = 30.0
    health_timeout: float = 10.0
    max_body_bytes: int = 32 * 1024 * 1024
    max_logprobs: int = 20
    max_n: int = 128
    max_stop_strings: int = 16
    cors_origins: tuple[str, ...] = ()
    log_requests: bool = False
