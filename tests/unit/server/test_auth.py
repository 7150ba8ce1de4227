"""Keys guard every route but the health checks; unknown routes too."""

from __future__ import annotations

import pytest

from hardpoint.server.app import ROUTES
from hardpoint.server.auth import OPEN_PATHS

PATHS = [(method, path) for method, path, *_ in ROUTES]
EXTRA = [
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/redoc"),
    ("GET", "/nothing"),
    ("POST", "/health/"),
    ("GET", "//health"),
]


@pytest.fixture
def guarded(make_harness):
    return make_harness(api_keys=("key-one", "key-two"))


@pytest.mark.parametrize(("method", "path"), PATHS + EXTRA)
def test_every_route_without_a_key(guarded, method, path) -> None:
    response = guarded.request(method, path.replace("{model_id:path}", "tiny"))
    if path in OPEN_PATHS:
        assert response.status_code == 200
        return
    assert response.status_code == 401
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    "header",
    [
        *("", "Bearer", "Bearer ", "Bearer key", "Bearer key-one1", "bearer key-on", "Basic key-one", "key-one"),
        *("Bearer key-one, key-two", "Bearer \u00e9"),
    ],
)
def test_wrong_keys(guarded, header) -> None:
    assert guarded.get("/v1/models", headers={"Authorization": header.encode()}).status_code == 401


@pytest.mark.parametrize("header", ["Bearer key-one", "Bearer key-two", "bearer  key-one "])
def test_right_keys(guarded, header) -> None:
    assert guarded.get("/v1/models", headers={"Authorization": header}).status_code == 200


def test_no_keys_no_guard(harness) -> None:
    assert harness.get("/v1/models").status_code == 200


def test_preflight_needs_no_key_and_answers_only_known_origins(make_harness) -> None:
    harness = make_harness(api_keys=("k",), cors_origins=("http://here",))
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    good = harness.request("OPTIONS", "/v1/models", headers={"Origin": "http://here", **ask})
    assert good.headers["access-control-allow-origin"] == "http://here"
    bad = harness.request("OPTIONS", "/v1/models", headers={"Origin": "http://there", **ask})
    assert "access-control-allow-origin" not in bad.headers
    refused = harness.get("/v1/models", headers={"Origin": "http://here"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "http://here"
