"""Operators' routes: version, metrics, prefix cache, aborting requests."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hardpoint import __version__
from hardpoint.metrics.prometheus import render
from hardpoint.server.openai.answers import json_response
from hardpoint.server.openai.intake import read_request
from hardpoint.server.openai.schemas import AbortRequest
from hardpoint.server.service import service_of

_abort = msgspec.json.Decoder(AbortRequest)


async def version(request: Request) -> Response:
    """The version of this distribution."""
    return json_response({"version": __version__})


async def metrics(request: Request) -> Response:
    """Prometheus text."""
    body, content_type = render(service_of(request).metrics, request.headers.get("accept", ""))
    return Response(body, headers={"Content-Type": content_type})


async def reset_prefix_cache(request: Request) -> Response:
    """Forget cached pages that no request uses."""
    service = service_of(request)
    service.check_open()
    await service.client.reset_prefix_cache()
    return Response(status_code=200)


async def abort_requests(request: Request) -> Response:
    """End requests by id; their streams finish with reason `abort`. Answers which ids were running."""
    service, body = await read_request(request, _abort)
    aborted: list[str] = []
    for id in body.request_ids:
        tickets = service.lifecycle.find(id)
        for ticket in tickets:
            for engine_id in list(ticket.engine_ids):
                await service.client.abort(engine_id)
        if tickets:
            aborted.append(id)
    return json_response({"aborted": aborted})
