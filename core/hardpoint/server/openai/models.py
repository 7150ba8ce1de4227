"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from hardpoint.server.openai.answers import ModelCard, ModelList, json_response
from hardpoint.server.service import Service, service_of


def _card(service: Service, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=service.started,
        root=service.model.model,
        max_model_len=service.client.info.max_model_len,
    )


async def list_models(request: Request) -> Response:
    """Every name that requests may use."""
    service = service_of(request)
    service.client.check_health()
    return json_response(ModelList(data=[_card(service, name) for name in service.served_names]))


async def get_model(request: Request) -> Response:
    """One of them."""
    service = service_of(request)
    service.client.check_health()
    name = service.model_name(request.path_params["model_id"])
    return json_response(_card(service, name))
