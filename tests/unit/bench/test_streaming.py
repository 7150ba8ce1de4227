"""The engine that computes nothing, and `bench stream` with its real processes."""

from __future__ import annotations

import pytest

from hardpoint.bench.null_engine import VOCAB_SIZE, build_null_engine, word_tokenizer
from hardpoint.bench.streaming import run
from hardpoint.config.engine import CacheConfig, EngineConfig, ModelConfig
from hardpoint.protocol.messages import EngineRequest
from hardpoint.request.sampling import SamplingParams


def test_the_tokenizer_round_trips_and_its_words_are_words() -> None:
    tokenizer = word_tokenizer()
    assert tokenizer.vocab_size == VOCAB_SIZE
    text = "Grüße, 世界! 🦜"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([1000, 1001]) == " w3e8 w3e9"
    assert not tokenizer.has_chat_template


def test_the_null_engine_serves_whole_requests() -> None:
    config = EngineConfig(ModelConfig("null"), cache=CacheConfig(num_kv_pages=64))
    built = build_null_engine(config, lambda phase, done: None)
    params = SamplingParams(max_tokens=9, ignore_eos=True, seed=0)
    for index in range(3):
        built.engine.add(EngineRequest(request_id=str(index), prompt=list(range(40)), params=params))
    tokens = {str(index): 0 for index in range(3)}
    while built.engine.has_work:
        for output in built.engine.step().outputs:
            tokens[output.request_id] += len(output.token_ids)
    assert tokens == {"0": 9, "1": 9, "2": 9}
    assert built.engine.stats().pages_used == 0
    built.engine.close()


@pytest.mark.server
def test_streaming_through_both_processes() -> None:
    result = run(requests=6, concurrency=3, input_len=8, output_len=10)
    assert result.summary.failed == 0
    assert result.summary.output_tokens == 60
    assert result.summary.prompt_tokens == 48
    assert 6 <= result.pieces <= 60
    assert result.front_end_seconds + result.engine_seconds > 0
