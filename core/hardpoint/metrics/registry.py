"""Every metric that the front end counts itself, on a registry of its own.

The `vllm:` names, labels and buckets are those that existing dashboards and autoscalers read; `hardpoint:` names are
ours; `http_` names follow the common instrumentation of FastAPI servers. Token counters equal the sums of the `usage`
objects that were sent (requests that were cut short count what they got).
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

LABELS = ("model_name", "engine")
#: The one engine of this server; data-parallel ranks come with numbers of their own.
ENGINE = "0"

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_TTFT_LONG = (*_TTFT, 160.0, 640.0, 2560.0)
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
_LATENCY_LONG = (*_LATENCY, 960.0, 1920.0, 7680.0)
_TOKENS = tuple(float(base * 10**power) for power in range(6) for base in (1, 2, 5))
_SMALL = (1.0, 2.0, 5.0, 10.0, 20.0)
_HTTP = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

FINISH_REASONS = ("stop", "length", "abort", "error", "timeout")


class ServerMetrics:
    """The front end's metrics of one served model. Owns the registry that `/metrics` renders."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.registry = CollectorRegistry()
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of answered requests.")
        self.prompt_tokens_cached = self._counter(
            "vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache."
        )
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        finished = Counter(
            "vllm:request_success",
            "Sequences that ended, by reason.",
            (*LABELS, "finished_reason"),
            registry=self.registry,
        )
        self.finished = {reason: finished.labels(model_name, ENGINE, reason) for reason in FINISH_REASONS}
        self.ttft = self._histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", _TTFT_LONG)
        self.itl = self._histogram("vllm:inter_token_latency_seconds", "Between tokens of one sequence.", _ITL)
        self.tpot = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per token after the first, per sequence.", _ITL
        )
        self.e2e = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.", _LATENCY_LONG)
        self.queue_time = self._histogram("vllm:request_queue_time_seconds", "Waiting for the engine.", _LATENCY_LONG)
        self.prefill_time = self._histogram("vllm:request_prefill_time_seconds", "Prefill phase.", _LATENCY_LONG)
        self.decode_time = self._histogram("vllm:request_decode_time_seconds", "Decode phase.", _LATENCY_LONG)
        self.inference_time = self._histogram(
            "vllm:request_inference_time_seconds", "Prefill and decode phases.", _LATENCY_LONG
        )
        self.request_prompt_tokens = self._histogram("vllm:request_prompt_tokens", "Prompt length, tokens.", _TOKENS)
        self.request_generation_tokens = self._histogram(
            "vllm:request_generation_tokens", "Tokens generated per sequence.", _TOKENS
        )
        self.request_max_tokens = self._histogram(
            "vllm:request_params_max_tokens", "max_tokens asked for (or what was left).", _TOKENS
        )
        self.request_n = self._histogram("vllm:request_params_n", "n asked for.", _SMALL)
        self.request_computed_tokens = self._histogram(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens computed, prefix hits left out.", _TOKENS
        )
        self.request_preemptions = self._histogram(
            "vllm:request_num_preemptions", "Preemptions per sequence.", (0.0, *_SMALL)
        )
        self._disconnects = self._counter("hardpoint:client_disconnects", "Requests whose client went away.")
        self._http = Counter(
            "http_requests",
            "Requests by route, method and status class.",
            ("handler", "method", "status"),
            registry=self.registry,
        )
        self._http_seconds = Histogram(
            "http_request_duration_seconds",
            "From the request's head to the answer's last byte.",
            ("handler", "method"),
            buckets=_HTTP,
            registry=self.registry,
        )

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, LABELS, registry=self.registry).labels(self.model_name, ENGINE)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        family = Histogram(name, text, LABELS, buckets=buckets, registry=self.registry)
        return family.labels(self.model_name, ENGINE)

    def http_request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count one HTTP request. `route` is the route's template, never the path as sent."""
        self._http.labels(route, method, f"{status // 100}xx").inc()
        self._http_seconds.labels(route, method).observe(seconds)

    def client_gone(self) -> None:
        """A client went away before its answer was complete."""
        self._disconnects.inc()
