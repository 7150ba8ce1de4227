"""Probes. `/live`: this process answers. `/ready`: it takes requests. `/health`: its engine works. No key, no body
but an error's."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from hardpoint.server.service import service_of


async def live(request: Request) -> Response:
    """200 as long as the event loop turns."""
    return Response(status_code=200)


async def ready(request: Request) -> Response:
    """200 when requests are taken; 503 while loading, draining or dead."""
    service_of(request).check_open()
    return Response(status_code=200)


async def health(request: Request) -> Response:
    """200 while the engine lives, also when draining; 503 while it loads, shows no life or is gone."""
    service_of(request).client.check_health()
    return Response(status_code=200)
