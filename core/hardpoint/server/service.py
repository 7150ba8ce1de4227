"""What every route works with, put together once by `create_app` and found at `app.state.service`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from starlette.requests import Request

from hardpoint.config.engine import ModelConfig
from hardpoint.config.server import ServerConfig
from hardpoint.errors import NotFound
from hardpoint.frontend.client import EngineClient
from hardpoint.frontend.requests import limits_of
from hardpoint.metrics.registry import ServerMetrics
from hardpoint.request.validation import RequestLimits
from hardpoint.server.lifecycle import Lifecycle
from hardpoint.server.openai.token_spelling import TokenSpelling

if TYPE_CHECKING:
    from hardpoint.frontend.tokenizer import Tokenizer


@dataclass(frozen=True)
class Service:
    """The parts of one server.

    Attributes:
        started: Unix time, for `created` of the models.
    """

    client: EngineClient
    tokenizer: Tokenizer
    spelling: TokenSpelling
    server: ServerConfig
    model: ModelConfig
    lifecycle: Lifecycle
    metrics: ServerMetrics
    started: int

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names that requests may use, the main one first."""
        return self.model.served_names or (self.model.model,)

    @property
    def limits(self) -> RequestLimits:
        """What a request may ask for. Valid once the engine serves."""
        return limits_of(
            self.client.info,
            max_logprobs=self.server.max_logprobs,
            max_n=self.server.max_n,
            max_stop_strings=self.server.max_stop_strings,
        )

    def check_open(self) -> None:
        """Raise EngineBusy or EngineDead if no request can be taken now."""
        self.lifecycle.check_open()
        self.client.check_health()

    def model_name(self, asked: str | None) -> str:
        """The name to answer with. Raises NotFound for a model that is not served."""
        names = self.served_names
        if asked is None:
            return names[0]
        if asked in names:
            return asked
        served = ", ".join(names)
        raise NotFound(f"The model {asked[:200]!r} is not served here; this server has: {served}.", field="model")


def service_of(request: Request) -> Service:
    """The service of the application that a request came to."""
    return cast(Service, request.app.state.service)
