"""The offline interface over an engine that computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from null_engines import PacedExecutor, info, scheduler
from scripted_tokenizers import Scripted, byte_level

from hardpoint.config.engine import CacheConfig
from hardpoint.engine.loop import Engine
from hardpoint.errors import ConfigError, EngineDead, ModelNotFound, PromptTooLong, RequestError
from hardpoint.llm import LLM, as_prompts, config_of, merge
from hardpoint.request.sampling import SamplingParams


class Chatty(Scripted):
    def render_chat(self, messages: Sequence[Any], **options: Any) -> str:
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + (
            "> " if options["add_generation_prompt"] else ""
        )


TOKENIZER = Chatty(byte_level().raw)
FOUR = SamplingParams(max_tokens=4)


def llm(executor: PacedExecutor | None = None, overlap: bool = True) -> LLM:
    engine = Engine(scheduler(), executor or PacedExecutor(), overlap=overlap)
    return LLM.over(engine, info(), TOKENIZER)


def test_prompts_of_every_shape_in_order() -> None:
    with llm() as model:
        prompts = ["one", {"prompt": "two"}, {"prompt_token_ids": [1, 2, 3]}, [4, 5]]
        outputs = model.generate(prompts, FOUR, use_tqdm=False)
        assert [o.prompt for o in outputs] == ["one", "two", None, None]
        assert [o.prompt_token_ids for o in outputs[2:]] == [[1, 2, 3], [4, 5]]
        assert all(o.finished and len(o.outputs[0].token_ids) == 4 for o in outputs)
        assert all(o.outputs[0].text == TOKENIZER.decode(o.outputs[0].token_ids) for o in outputs)
        assert model.generate("one", FOUR, use_tqdm=False)[0].outputs[0].finish_reason == "length"
        assert len(model.generate([7, 8], FOUR, use_tqdm=False)) == 1
        assert model.generate([], FOUR, use_tqdm=False) == []


@pytest.mark.parametrize("overlap", [False, True])
def test_more_prompts_than_rows_with_parameters_each(overlap: bool) -> None:
    with llm(overlap=overlap) as model:
        params = [SamplingParams(max_tokens=1 + i % 7, n=1 + i % 3) for i in range(50)]
        outputs = model.generate([f"prompt {i}" for i in range(50)], params, use_tqdm=False)
        for i, output in enumerate(outputs):
            assert output.prompt == f"prompt {i}"
            assert [len(o.token_ids) for o in output.outputs] == [1 + i % 7] * (1 + i % 3)
            assert [o.index for o in output.outputs] == list(range(1 + i % 3))


def test_stop_strings() -> None:
    with llm() as model:
        whole = model.generate("x", SamplingParams(max_tokens=30), use_tqdm=False)[0].outputs[0].text
        stopped = model.generate("x", SamplingParams(max_tokens=30, stop=whole[10:12]), use_tqdm=False)[0].outputs[0]  # type: ignore[arg-type]
        assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == (whole[:10], "stop", whole[10:12])
        assert model._engine.stats().pages_used == 0


def test_chat() -> None:
    with llm() as model:
        talk = [{"role": "user", "content": "hi"}]
        (one,) = model.chat(talk, FOUR, use_tqdm=False)
        assert one.prompt == "user: hi\n> "
        assert len(model.chat([talk, talk], FOUR, use_tqdm=False)) == 2
        with pytest.raises(RequestError):
            model.chat([], FOUR)


def test_refusals_come_before_anything_runs() -> None:
    with llm() as model:
        for prompts, params, field in [
            (["ok", "x" * 5000], FOUR, "prompt"),
            (["ok", ""], FOUR, "prompt"),
            (["ok", [300]], FOUR, "prompt"),
            (["ok", 5], FOUR, "prompt"),
            (["ok", {"text": "x"}], FOUR, "prompt"),
            (["ok"], [FOUR, FOUR], "sampling_params"),
            (["ok"], SamplingParams(top_p=0), "top_p"),
            (["ok", "a\ud800"], FOUR, "prompt"),
            (["ok", {"prompt_token_ids": [1], "prompt": "\udfff"}], FOUR, "prompt"),
            (["ok", {"prompt": "x", "cache_salt": "\ud800"}], FOUR, "cache_salt"),
            (["ok", {"prompt": "x", "cache_salt": 5}], FOUR, "cache_salt"),
            (["ok"], SamplingParams(stop="\ud800"), "stop"),  # type: ignore[arg-type]
            (["ok"], SamplingParams(bad_words=("\ud800",)), "bad_words"),
            (["ok"], SamplingParams(allowed_token_ids=TOKENIZER.eos_token_ids, min_tokens=1), "allowed_token_ids"),
            (["ok"], SamplingParams(allowed_token_ids=(65,), bad_words=(TOKENIZER.decode([65]),)), "allowed_token_ids"),
        ]:
            with pytest.raises(RequestError) as refusal:
                model.generate(prompts, params, use_tqdm=False)
            assert refusal.value.field == field
        with pytest.raises(RequestError, match="--policy priority"):
            model.generate(["a", "b"], FOUR, priority=[0, 1], use_tqdm=False)
        for changes in (
            {"messages": [{"role": "user", "content": "\ud800"}]},
            {"tools": [{"type": "\ud800"}]},
            {"chat_template": "\ud800"},
            {"chat_template_kwargs": {"a": "\ud800"}},
        ):
            with pytest.raises(RequestError, match="lone surrogate") as refusal:
                model.chat(**({"messages": [{"role": "user", "content": "x"}]} | changes), use_tqdm=False)  # type: ignore[arg-type]
            assert (refusal.value.field or "").startswith(next(iter(changes)))
        assert model._engine.stats().steps == 0
        with pytest.raises(PromptTooLong):
            model.generate("x" * 5000)


def test_priorities_under_the_policy_that_looks_at_them() -> None:
    engine = Engine(scheduler(policy="priority", max_num_seqs=1), PacedExecutor(), overlap=False)
    with LLM.over(engine, info(policy="priority"), TOKENIZER) as model:
        assert len(model.generate(["a", "b"], FOUR, priority=[3, -1], use_tqdm=False)) == 2


@pytest.mark.parametrize("arguments", [{"model": "\ud800"}, {"model": "m", "tokenizer": "org/\udfff"}], ids=str)
def test_a_model_that_has_no_name(arguments: dict[str, str]) -> None:
    with pytest.raises(ModelNotFound):
        LLM(**arguments)


def test_unseeded_requests_repeat_from_run_to_run_and_differ_from_each_other() -> None:
    def seeds() -> list[int | None]:
        executor = PacedExecutor()
        with llm(executor) as model:
            model.generate(["a", "b"], FOUR, use_tqdm=False)
        return [new.params.seed for plan in executor.plans for new in plan.new]

    assert seeds() == seeds()
    assert len(set(seeds())) == 2


def test_broken_engine_and_closed_llm() -> None:
    model = llm(PacedExecutor(lost_at=3))
    for _ in range(2):
        with pytest.raises(EngineDead, match="fell off the bus"):
            model.generate("x", SamplingParams(max_tokens=50), use_tqdm=False)
    executor = PacedExecutor()
    closed = llm(executor)
    closed.close()
    closed.close()
    assert executor.closed
    with pytest.raises(EngineDead, match="closed"):
        closed.generate("x", use_tqdm=False)


def test_interrupt_leaves_the_engine_clean() -> None:
    with llm() as model:
        step, steps = model._engine.step, iter(range(100))

        def interrupted() -> Any:
            if next(steps) == 5:
                raise KeyboardInterrupt
            return step()

        model._engine.step = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            model.generate(["a", "b"], SamplingParams(max_tokens=50), use_tqdm=False)
        assert len(model.generate("c", FOUR, use_tqdm=False)) == 1
        assert model._engine.stats().running == 0


def test_progress_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with llm() as model:
        model.generate(["a", "b"], FOUR)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "2/2" in shown.err


GIVEN = {
    "model": "m",
    "tokenizer": None,
    "dtype": "auto",
    "device": "auto",
    "device_options": None,
    "placement": None,
    "tensor_parallel_size": 1,
    "enable_expert_parallel": False,
    "on_fallback": "warn",
    "max_model_len": None,
    "load_format": "auto",
    "overrides": None,
    "chat_template": None,
    "seed": 0,
    "kv_cache_memory": None,
    "num_kv_pages": None,
    "memory_fraction": None,
    "kv_dtype": "auto",
    "page_tokens": 16,
    "enable_prefix_caching": True,
    "max_num_seqs": 256,
    "max_batch_tokens": None,
    "enable_chunked_prefill": True,
    "policy": "fcfs",
    "max_logprobs": 20,
}


def test_arguments_in_both_spellings() -> None:
    settings = merge(
        GIVEN | {"kv_cache_memory": "1GiB", "seed": 3},
        {"block_size": 32, "gpu_memory_utilization": 0.9, "max_num_batched_tokens": 512, "enforce_eager": True},
    )
    config = config_of(settings)
    assert (config.cache.page_tokens, config.cache.memory_fraction, config.cache.kv_cache_memory) == (32, 0.9, 2**30)
    assert (config.scheduler.max_batch_tokens, config.model.seed) == (512, 3)
    assert config_of(GIVEN).cache == CacheConfig()
    cut = config_of(GIVEN | {"tensor_parallel_size": 4, "enable_expert_parallel": True}).device
    assert (cut.tensor_parallel_size, cut.expert_parallel) == (4, True)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("nonsense", 1, "nonsense"),
        ("pipeline_parallel_size", 2, "pipeline_parallel_size=2"),
        ("quantization", "x", "quant"),
    ],
)
def test_arguments_that_mean_nothing(argument: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("m", **{argument: value})
    with pytest.raises(ConfigError, match="kv_cache_memory"):
        config_of(GIVEN | {"kv_cache_memory": "lots"})


def test_as_prompts() -> None:
    assert as_prompts("a") == ["a"]
    assert as_prompts([1, 2]) == [[1, 2]]
    assert as_prompts([[1], "b"]) == [[1], "b"]
