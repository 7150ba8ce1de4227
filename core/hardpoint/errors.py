"""The core's branches of the exception tree, under `hardpoint_platforms.errors.HardpointError`.

HardpointError
  ConfigError                a setting that cannot be, alone or with another; names the flag
  ModelError                 a model that cannot be loaded
    UnsupportedArchitecture
    WeightsError             names file and tensor
    TokenizerError
  ModelNotFound              nothing under that name; says what to type
  RequestError               bad input of one request; names the field (HTTP 4xx)
    NotFound                 the model or route asked for (HTTP 404)
    PromptTooLong
    TooManyRequests          admission refused (HTTP 503)
  EngineError                the engine's side of a request failed (HTTP 5xx)
    EngineDead               the engine process is gone
    EngineBusy               draining or not yet ready
"""

from __future__ import annotations

from hardpoint_platforms.errors import HardpointError


class ConfigError(HardpointError):
    """A setting that cannot be, alone or with another. The message names the flag."""


class ModelError(HardpointError):
    """A model that cannot be loaded."""


class UnsupportedArchitecture(ModelError):
    """No native model for this architecture."""


class WeightsError(ModelError):
    """A weight file that is corrupt, incomplete or of an unknown kind. Names file and tensor."""


class TokenizerError(ModelError):
    """A tokenizer that cannot be built exactly."""


class ModelNotFound(HardpointError):
    """Nothing under that name, here or at its source."""


class RequestError(HardpointError):
    """Bad input of one request. `field` is the request's field at fault, in the protocol's spelling."""

    status = 400

    def __init__(self, message: str, *, field: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.field = field


class NotFound(RequestError):
    """The model or resource asked for does not exist."""

    status = 404


class PromptTooLong(RequestError):
    """Prompt and output cannot fit into the context or the KV cache."""


class TooManyRequests(RequestError):
    """Admission refused: the queue is full."""

    status = 503


class EngineError(HardpointError):
    """The engine's side of a request failed."""

    status = 500


class EngineDead(EngineError):
    """The engine process is gone; the server cannot serve any more."""

    status = 503


class EngineBusy(EngineError):
    """The server is draining or not ready yet."""

    status = 503
