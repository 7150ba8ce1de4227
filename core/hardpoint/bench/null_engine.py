"""An engine that computes nothing, and a tokenizer that needs no files: what is left is the cost of everything else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from hardpoint.config.engine import EngineConfig
from hardpoint.engine.loop import Engine
from hardpoint.executor.null import NullExecutor
from hardpoint.frontend.gguf_tokenizer import TokenizerParts, byte_letters
from hardpoint.frontend.tokenizer import Tokenizer
from hardpoint.kv.pager import KVPager
from hardpoint.protocol.messages import EngineInfo
from hardpoint.scheduler.scheduler import Scheduler
from hardpoint.scheduler.settings import SchedulerSettings

#: `builder` of an engine process that runs this engine.
BUILDER = "hardpoint.bench.null_engine:build_null_engine"
VOCAB_SIZE = 16_384
CONTEXT = 8_192
_PAGES = 16_384


@dataclass(frozen=True)
class NullEngine:
    """Scheduler, pager and loop are the real ones; the executor draws without a model."""

    engine: Engine
    info: EngineInfo


def build_null_engine(config: EngineConfig, progress: Callable[[str, float], None]) -> NullEngine:
    """Like `hardpoint.engine.build.build_engine`, without device and model."""
    pages = config.cache.num_kv_pages or _PAGES
    context = config.model.max_model_len or CONTEXT
    pager = KVPager(pages + 1, config.cache.page_tokens, (None,), config.cache.prefix_caching)
    settings = SchedulerSettings(
        max_batch_tokens=config.scheduler.max_batch_tokens or 8_192,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=context,
        max_waiting=config.scheduler.max_waiting,
        chunked_prefill=config.scheduler.chunked_prefill,
        policy=config.scheduler.policy,
    )
    engine = Engine(Scheduler(settings, pager), NullExecutor(VOCAB_SIZE), overlap=config.scheduler.overlap)
    info = EngineInfo(
        device="null:0",
        device_name="a device that computes nothing",
        device_reason="for measuring",
        tuning=[],
        dtype="none",
        kv_dtype="none",
        weight_bytes=0,
        kv_bytes=0,
        num_pages=pages,
        page_tokens=config.cache.page_tokens,
        max_model_len=context,
        max_concurrency=pages * config.cache.page_tokens / context,
        vocab_size=VOCAB_SIZE,
        ops=[],
        fallbacks=[],
        phases=[],
        policy=config.scheduler.policy,
        prefix_caching=config.cache.prefix_caching,
    )
    return NullEngine(engine, info)


def word_tokenizer() -> Tokenizer:
    """The real tokenizer over a vocabulary made here: 256 bytes, then short words (" w1f3"), each one token."""
    letters = byte_letters()
    space = letters[ord(" ")]
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    vocabulary |= {f"{space}w{number:x}": number for number in range(len(letters), VOCAB_SIZE)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(TokenizerParts(backend, False, False, False, None, ()))
