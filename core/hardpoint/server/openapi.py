"""The parts of `/openapi.json` that come from the request and answer types."""

from __future__ import annotations

from typing import Any

import msgspec

_REFERENCE = "#/components/schemas/{name}"


def operation(request: type | None, answer: type | None, description: str) -> dict[str, Any]:
    """What a route adds to its OpenAPI entry: `openapi_extra` of FastAPI."""
    extra: dict[str, Any] = {"responses": {"200": {"description": description}}}
    if request is not None:
        extra["requestBody"] = {"required": True, "content": _json(request)}
    if answer is not None:
        extra["responses"]["200"]["content"] = _json(answer)
    return extra


def components(types: list[type]) -> dict[str, Any]:
    """Schemas of the types and of everything that they hold, by name."""
    _, schemas = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    return dict(schemas)


def _json(kind: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REFERENCE.format(name=kind.__name__)}}}
