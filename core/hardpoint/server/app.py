"""The application: routes and layers, put together around an engine client.

Layers, outermost first: request context (id, metrics, last-resort errors), CORS, API keys, routes. All are plain ASGI,
so that a streamed chunk passes through a handful of function calls.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from hardpoint import __version__
from hardpoint.config.engine import ModelConfig
from hardpoint.config.server import ServerConfig
from hardpoint.errors import EngineError
from hardpoint.frontend.client import EngineClient
from hardpoint.metrics.engine_stats import EngineCollector
from hardpoint.metrics.registry import ServerMetrics
from hardpoint.protocol.messages import EngineInfo
from hardpoint.server import control, health, openapi
from hardpoint.server.auth import OPEN_PATHS, ApiKeyMiddleware
from hardpoint.server.context import ContextMiddleware
from hardpoint.server.errors import ClientGone, ErrorBody, HttpError, error_response
from hardpoint.server.lifecycle import Lifecycle
from hardpoint.server.openai import answers, chat, completions, models, schemas, tokenize
from hardpoint.server.openai.token_spelling import TokenSpelling
from hardpoint.server.service import Service
from hardpoint_platforms.errors import HardpointError

if TYPE_CHECKING:
    from hardpoint.frontend.tokenizer import Tokenizer

Endpoint = Callable[[Request], Awaitable[Response]]

#: method, path, endpoint, type of the body, type of the answer, what the answer is
ROUTES: tuple[tuple[str, str, Endpoint, type | None, type | None, str], ...] = (
    ("POST", "/v1/chat/completions", chat.chat_completions, schemas.ChatRequest, answers.ChatCompletion, "The answer."),
    ("POST", "/v1/completions", completions.completions, schemas.CompletionRequest, answers.Completion, "The texts."),
    ("GET", "/v1/models", models.list_models, None, answers.ModelList, "Names that requests may use."),
    ("GET", "/v1/models/{model_id:path}", models.get_model, None, answers.ModelCard, "One model."),
    ("POST", "/tokenize", tokenize.tokenize, schemas.TokenizeTextRequest, answers.TokenizeAnswer, "Token ids."),
    ("POST", "/detokenize", tokenize.detokenize, schemas.DetokenizeRequest, answers.DetokenizeAnswer, "The text."),
    ("GET", "/health", health.health, None, None, "The engine works."),
    ("GET", "/live", health.live, None, None, "The process answers."),
    ("GET", "/ready", health.ready, None, None, "Requests are taken."),
    ("GET", "/version", control.version, None, None, "The version."),
    ("GET", "/metrics", control.metrics, None, None, "Prometheus text."),
    ("POST", "/reset_prefix_cache", control.reset_prefix_cache, None, None, "Forgotten."),
    ("POST", "/abort_requests", control.abort_requests, schemas.AbortRequest, None, "Ids that were running."),
)


def create_app(client: EngineClient, tokenizer: Tokenizer, server: ServerConfig, model: ModelConfig) -> FastAPI:
    """The HTTP application. The client may still be starting: until it serves, requests get 503."""
    metrics = ServerMetrics((model.served_names or (model.model,))[0])
    service = Service(
        client, tokenizer, TokenSpelling(tokenizer), server, model, Lifecycle(), metrics, int(time.time())
    )
    metrics.registry.register(EngineCollector(metrics.model_name, lambda: client.stats, lambda: _info_if_ready(client)))
    app = FastAPI(title="Hardpoint", version=__version__, redirect_slashes=False)
    app.state.service = service
    for method, path, endpoint, body, answer, text in ROUTES:
        app.add_api_route(
            path,
            endpoint,
            methods=[method],
            openapi_extra=openapi.operation(body, answer, text),
            response_model=None,
        )
        if path in OPEN_PATHS:
            app.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False, response_model=None)
    _describe(app)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(HardpointError, _hardpoint_error)
    app.add_exception_handler(ClientGone, _client_gone)
    if server.api_keys:
        app.add_middleware(ApiKeyMiddleware, keys=server.api_keys)
    if server.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(server.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(ContextMiddleware, metrics=metrics, log_requests=server.log_requests)
    return app


def _info_if_ready(client: EngineClient) -> EngineInfo | None:
    try:
        client.check_health()
    except EngineError:
        return None
    return client.info


def _describe(app: FastAPI) -> None:
    """Add the body and answer types to the generated document."""
    generate = app.openapi
    kinds = {kind for route in ROUTES for kind in (route[3], route[4]) if kind is not None}

    def document() -> dict[str, Any]:
        schema = generate()
        known = schema.setdefault("components", {}).setdefault("schemas", {})
        known.update(openapi.components([*sorted(kinds, key=lambda kind: kind.__name__), ErrorBody]))
        return schema

    app.openapi = document  # type: ignore[method-assign]


async def _http_exception(request: Request, exc: Exception) -> Response:
    """The framework's own refusals: no such route, wrong method."""
    assert isinstance(exc, HTTPException)
    path, method = request.scope["path"][:200], request.scope["method"]
    if exc.status_code == 404:
        refusal = HttpError(404, f"There is no route {path!r} here.", code="not_found")
    elif exc.status_code == 405:
        headers = dict(exc.headers or {})
        refusal = HttpError(405, f"{method} is not possible on {path!r}.", code="method_not_allowed", headers=headers)
    else:
        refusal = HttpError(exc.status_code, str(exc.detail), headers=exc.headers)
    return error_response(refusal)


async def _hardpoint_error(request: Request, exc: Exception) -> Response:
    return error_response(exc)


async def _client_gone(request: Request, exc: Exception) -> Response:
    return Response(status_code=499)
