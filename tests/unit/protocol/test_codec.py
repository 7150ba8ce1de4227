"""Every message survives the way; bytes of the other direction or of nobody do not."""

from __future__ import annotations

import pytest

from hardpoint.protocol import codec
from hardpoint.protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    EngineInfo,
    EngineRequest,
    EngineStats,
    Failure,
    Heartbeat,
    Outputs,
    Progress,
    Ready,
    RequestTiming,
    ResetPrefixCache,
    Shutdown,
    Submit,
    TokenLogprobs,
    TokenOutput,
)
from hardpoint.request.sampling import SamplingParams

INFO = EngineInfo(
    device="x:0",
    device_name="x",
    device_reason="only one",
    tuning=[("threads", "2", "cores")],
    dtype="float32",
    kv_dtype="float32",
    weight_bytes=1,
    kv_bytes=2,
    num_pages=3,
    page_tokens=16,
    max_model_len=64,
    max_concurrency=1.5,
    vocab_size=100,
    ops=[("reference", 4)],
    fallbacks=[],
    phases=[("load", 0.5)],
)
PARAMS = SamplingParams(stop=("a",), seed=-(2**63), logit_bias={3: -1.5}, allowed_token_ids=(1, 2))
TO_ENGINE = [
    Submit([EngineRequest(request_id="r#1", prompt=[1, 2], params=PARAMS, parent="r#0", deadline=1.5)]),
    Abort(["r#0"]),
    ResetPrefixCache(),
    Shutdown(),
]
FROM_ENGINE = [
    Ready(PROTOCOL_VERSION, INFO),
    Progress("load", 0.25),
    Heartbeat(0.0),
    Failure("no", "try", "ConfigError"),
    Outputs(
        [
            TokenOutput(
                request_id="r#0",
                token_ids=[4],
                logprobs=[TokenLogprobs([4, 5], [float("-inf"), -1.0], 2)],
                prompt_logprobs=[None, TokenLogprobs([1], [-0.5], 1)],
                finish_reason="stop",
                timing=RequestTiming(0.1, 0.2, 0.3, 1),
            ),
            TokenOutput(request_id="r#1", finish_reason="error", error="x", error_kind="PromptTooLong"),
        ],
        EngineStats(running=2),
    ),
]


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda m: type(m).__name__)
def test_to_engine(message: object) -> None:
    data = codec.encode(message)  # type: ignore[arg-type]
    assert codec.decode_to_engine(data) == message
    with pytest.raises(codec.ProtocolError):
        codec.decode_from_engine(data)


@pytest.mark.parametrize("message", FROM_ENGINE, ids=lambda m: type(m).__name__)
def test_from_engine(message: object) -> None:
    data = codec.encode(message)  # type: ignore[arg-type]
    assert codec.decode_from_engine(data) == message
    with pytest.raises(codec.ProtocolError):
        codec.decode_to_engine(data)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01\x02", b"hello"])
def test_noise(data: bytes) -> None:
    with pytest.raises(codec.ProtocolError):
        codec.decode_to_engine(data)


def test_versions_must_be_equal() -> None:
    codec.check_version(PROTOCOL_VERSION)
    with pytest.raises(codec.ProtocolError, match="versions"):
        codec.check_version(PROTOCOL_VERSION + 1)
