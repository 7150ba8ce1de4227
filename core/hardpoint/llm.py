"""`LLM`: generate offline, in this process. Shaped like vLLM's class of that name, so that scripts move over.

from hardpoint import LLM, SamplingParams

with LLM("smollm2") as llm:
    for output in llm.generate(["The kettle is"], SamplingParams(max_tokens=32)):
        print(output.outputs[0].text)
"""

from __future__ import annotations

import random
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from hardpoint.config.engine import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from hardpoint.config.placement import parse_placement
from hardpoint.config.quantities import byte_size
from hardpoint.errors import ConfigError, RequestError
from hardpoint.frontend.offline import Job, OfflineRunner
from hardpoint.frontend.requests import complete, limits_of
from hardpoint.frontend.streams import ClientTokenizer
from hardpoint.protocol.messages import EngineInfo
from hardpoint.request.choice import check_choice
from hardpoint.request.output import RequestOutput
from hardpoint.request.sampling import SamplingParams
from hardpoint.request.validation import check_priority, check_unicode, validate, validate_prompt

Value = TypeVar("Value")

if TYPE_CHECKING:
    from hardpoint.engine.loop import Engine

#: Offline nothing is refused because the queue is long.
UNLIMITED = 2**31 - 1
#: vLLM's spellings of our arguments.
ALIASES = {
    "block_size": "page_tokens",
    "kv_cache_memory_bytes": "kv_cache_memory",
    "num_gpu_blocks_override": "num_kv_pages",
    "gpu_memory_utilization": "memory_fraction",
    "kv_cache_dtype": "kv_dtype",
    "max_num_batched_tokens": "max_batch_tokens",
    "hf_overrides": "overrides",
    "scheduling_policy": "policy",
}
#: Arguments of vLLM that change nothing here, with the only values they may have (None: any).
WITHOUT_EFFECT: dict[str, tuple[Any, ...] | None] = {
    "pipeline_parallel_size": (1,),
    "trust_remote_code": (False,),
    "quantization": (None,),
    "enforce_eager": None,
    "disable_log_stats": None,
}

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model on a device, with its tokenizer. Not thread-safe. Close it, or use it in a `with` block."""

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        device_options: Mapping[str, Any] | None = None,
        placement: str | None = None,
        tensor_parallel_size: int = 1,
        enable_expert_parallel: bool = False,
        on_fallback: str = "warn",
        max_model_len: int | None = None,
        load_format: str = "auto",
        overrides: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        seed: int = 0,
        kv_cache_memory: int | str | None = None,
        num_kv_pages: int | None = None,
        memory_fraction: float | None = None,
        kv_dtype: str = "auto",
        page_tokens: int = 16,
        enable_prefix_caching: bool = True,
        max_num_seqs: int = 256,
        max_batch_tokens: int | None = None,
        enable_chunked_prefill: bool = True,
        policy: str = "fcfs",
        max_logprobs: int = 20,
        **vllm_arguments: Any,
    ) -> None:
        """Load `model`. The settings are those of `hardpoint.config.engine`, also in vLLM's spelling (`ALIASES`).

        kv_cache_memory: bytes, or text such as "2GiB". seed: of the seeds drawn for requests without one, so that a
        script gives the same results each time. Raises HardpointError; ConfigError for an unknown argument.
        """
        given = {key: value for key, value in locals().items() if key not in ("self", "vllm_arguments", "__class__")}
        settings = merge(given, vllm_arguments)
        self._open(config_of(settings), settings["max_logprobs"])

    @classmethod
    def from_config(cls, config: EngineConfig, *, max_logprobs: int = 20) -> Self:
        """Load what a whole configuration says."""
        llm = cls.__new__(cls)
        llm._open(config, max_logprobs)
        return llm

    @classmethod
    def over(
        cls,
        engine: Engine,
        info: EngineInfo,
        tokenizer: ClientTokenizer | None,
        *,
        seed: int = 0,
        max_logprobs: int = 20,
    ) -> Self:
        """Take an engine that was built by hand; it is owned from now on."""
        llm = cls.__new__(cls)
        llm._attach(engine, info, tokenizer, seed, max_logprobs)
        return llm

    def _open(self, config: EngineConfig, max_logprobs: int) -> None:
        from hardpoint.engine.build import build_engine
        from hardpoint.frontend.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(config.model)
        built = build_engine(config)
        self._attach(built.engine, built.info, tokenizer, config.model.seed, max_logprobs)

    def _attach(self, engine: Engine, info: EngineInfo, tokenizer: Any, seed: int, max_logprobs: int) -> None:
        self._runner = OfflineRunner(engine, tokenizer)
        self._engine = engine
        self._tokenizer = tokenizer
        self._seeds = random.Random(seed)
        self.info = info
        self.limits = limits_of(info, max_logprobs=max_logprobs, max_n=UNLIMITED, max_stop_strings=UNLIMITED)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue one or many prompts; the results are in their order.

        A prompt is a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}, in a dict also with a
        "cache_salt". sampling_params: one for all, or one per prompt. use_tqdm: show progress on stderr.
        Raises RequestError, before anything runs, for a prompt or parameters that cannot be served.
        """
        items = as_prompts(prompts)
        return self._run([self._read_prompt(item) for item in items], sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, each a list of messages with "role" and "content".

        chat_template: Jinja source that replaces the model's. Raises RequestError, also where the model has no
        template.
        """
        if not messages:
            raise RequestError("there are no messages", field="messages")
        first = messages[0]
        conversations: Any = [messages] if isinstance(first, Mapping) else messages
        items: list[Prompt] = []
        for key, value in (
            ("messages", conversations),
            ("tools", tools),
            ("chat_template", chat_template),
            ("chat_template_kwargs", chat_template_kwargs),
        ):
            check_unicode(value, key)
        for conversation in conversations:
            text = self._tokenizer.render_chat(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template=chat_template,
                **(chat_template_kwargs or {}),
            )
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            items.append({"prompt": text, "prompt_token_ids": ids})
        return self._run([self._read_prompt(item) for item in items], sampling_params, use_tqdm, None)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer (`hardpoint.frontend.tokenizer.Tokenizer`)."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used where none is given: vLLM's defaults, under those of the model's generation config."""
        defaults: dict[str, Any] = dict(self.info.default_sampling)
        return SamplingParams(**defaults)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self._engine.reset_prefix_cache()

    def close(self) -> None:
        """Give the device back. May be called again."""
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_prompt(self, prompt: Prompt) -> Job:
        text: str | None = None
        salt, ids = "", None
        if isinstance(prompt, str):
            text = prompt
        elif isinstance(prompt, Mapping):
            text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt", "")
        else:
            ids = prompt
        if not isinstance(salt, str):
            raise RequestError(f"cache_salt must be a text, got {salt!r:.80}", field="cache_salt")
        check_unicode(salt, "cache_salt")
        check_unicode(text, "prompt")
        if ids is None:
            if not isinstance(text, str):
                raise RequestError(
                    f"a prompt must be a text, token ids or a dict with one of them, got {prompt!r:.80}", field="prompt"
                )
            ids = self._tokenizer.encode(text)
        if not isinstance(ids, Sequence) or not all(isinstance(token, int) for token in ids):
            raise RequestError(f"token ids must be integers, got {ids!r:.80}", field="prompt")
        return Job(list(ids), SamplingParams(), text, cache_salt=salt)

    def _run(
        self,
        jobs: list[Job],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        show_progress: bool,
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        params = sampling_params if sampling_params is not None else self.get_default_sampling_params()
        each = [params] * len(jobs) if isinstance(params, SamplingParams) else list(params)
        orders = [0] * len(jobs) if priority is None else list(priority)
        for name, values in (("sampling_params", each), ("priority", orders)):
            if len(values) != len(jobs):
                raise RequestError(f"{len(jobs)} prompts, but {len(values)} {name}", field=name)
        ready = []
        for job, own, order in zip(jobs, each, orders, strict=True):
            validate(own, self.limits)
            own = complete(own, self._tokenizer)
            check_choice(own, self.limits.vocab_size)
            check_priority(order, self.info.policy)
            validate_prompt(job.prompt, own, self.limits)
            if own.seed is None:
                own = msgspec.structs.replace(own, seed=self._seeds.getrandbits(63))
            ready.append(Job(job.prompt, own, job.text, order, job.cache_salt))
        with progress(len(ready), show_progress) as on_done:
            return self._runner.run(ready, on_done)


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many as a list. A list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items: list[Any] = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]
    return items


def merge(given: Mapping[str, Any], vllm_arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Our arguments with vLLM's spellings brought in. Raises ConfigError for those that mean nothing here."""
    settings = dict(given)
    for name, value in vllm_arguments.items():
        if name in ALIASES:
            settings[ALIASES[name]] = value
        elif name not in WITHOUT_EFFECT:
            known = sorted({*given, *ALIASES, *WITHOUT_EFFECT})
            raise ConfigError(f"LLM has no argument {name!r}", hint=f"it takes: {', '.join(known)}")
        elif (allowed := WITHOUT_EFFECT[name]) is not None and value not in allowed:
            raise ConfigError(f"LLM does not support {name}={value!r}, only {allowed[0]!r}")
    return settings


def config_of(settings: Mapping[str, Any]) -> EngineConfig:
    """The configuration that the arguments of `LLM` mean. Raises ConfigError."""
    memory, placement = settings["kv_cache_memory"], settings["placement"]
    if isinstance(memory, str):
        memory = _parsed("kv_cache_memory", byte_size, memory)
    fraction = settings["memory_fraction"]
    model = ModelConfig(
        model=settings["model"],
        tokenizer=settings["tokenizer"],
        chat_template=settings["chat_template"],
        dtype=str(settings["dtype"]).removeprefix("torch."),
        max_model_len=settings["max_model_len"],
        load_format=settings["load_format"],
        overrides=dict(settings["overrides"] or {}),
        seed=settings["seed"] or 0,
    )
    cache = CacheConfig(
        page_tokens=settings["page_tokens"] or CacheConfig.page_tokens,
        kv_cache_memory=memory,
        num_kv_pages=settings["num_kv_pages"],
        memory_fraction=CacheConfig.memory_fraction if fraction is None else fraction,
        kv_dtype=settings["kv_dtype"],
        prefix_caching=settings["enable_prefix_caching"],
    )
    scheduler = SchedulerConfig(
        max_batch_tokens=settings["max_batch_tokens"],
        max_num_seqs=settings["max_num_seqs"],
        chunked_prefill=settings["enable_chunked_prefill"],
        policy=settings["policy"],
        max_waiting=UNLIMITED,
    )
    options = dict(settings["device_options"] or {})
    device = DeviceConfig(
        settings["device"],
        options,
        settings["on_fallback"],
        placement=_parsed("placement", parse_placement, placement) if placement else None,
        tensor_parallel_size=settings["tensor_parallel_size"] or 1,
        expert_parallel=bool(settings["enable_expert_parallel"]),
    )
    return EngineConfig(model, device, cache, scheduler)


def _parsed(name: str, parse: Callable[[str], Value], text: str) -> Value:
    try:
        return parse(text)
    except ArgumentTypeError as error:
        raise ConfigError(f"{name}: {error}") from None


@contextmanager
def progress(total: int, shown: bool) -> Iterator[Callable[[RequestOutput], None]]:
    """A progress bar on stderr that counts finished requests and output tokens per second."""
    if not shown:
        yield lambda output: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[rate]}"), console=Console(stderr=True)) as bar:
        task, tokens = bar.add_task("", total=total, rate=""), 0

        def on_done(output: RequestOutput) -> None:
            nonlocal tokens
            tokens += sum(len(sequence.token_ids) for sequence in output.outputs)
            elapsed = bar.tasks[0].elapsed or 0.0
            bar.update(task, advance=1, rate=f"{tokens / elapsed:.0f} tok/s" if elapsed else "")

        yield on_done
