"""The command line of the configuration: one flag per field of the frozen dataclasses, and back into objects.

Help texts come from the "Attributes" part of each class's docstring and defaults from the fields, so a new field
needs no line here. `FLAGS` holds only what a field cannot say: other spellings (vLLM's too), legal words, ranges.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import logging
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hardpoint import env
from hardpoint.config.engine import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from hardpoint.config.kernels import parse_kernel_choice
from hardpoint.config.placement import parse_placement
from hardpoint.config.quantities import at_least, between, byte_size, key_value, token_count
from hardpoint.config.server import ServerConfig
from hardpoint.errors import ConfigError

log = logging.getLogger(__name__)

#: Section name -> (title in --help, dataclass).
SECTIONS: Mapping[str, tuple[str, type]] = {
    "model": ("Model", ModelConfig),
    "device": ("Device", DeviceConfig),
    "cache": ("KV cache", CacheConfig),
    "scheduler": ("Scheduler", SchedulerConfig),
    "server": ("Server", ServerConfig),
}
ENGINE_SECTIONS = ("model", "device", "cache", "scheduler")


@dataclass(frozen=True)
class Flag:
    """What a field cannot say of its flag.

    Attributes:
        name: instead of the field's own name.
        aliases: other spellings, without dashes; those of vLLM so that commands move over.
        parse: text to value; raises argparse.ArgumentTypeError.
        choices: the only legal words.
        metavar: in --help.
        optional: the parser says None where the flag was not given, though its field has a default.
    """

    name: str | None = None
    aliases: tuple[str, ...] = ()
    parse: Any = None
    choices: tuple[str, ...] | None = None
    metavar: str | None = None
    optional: bool = False


FLAGS: Mapping[str, Flag] = {
    "model.served_names": Flag("served-model-name", ("served-name",), metavar="NAME"),
    "model.tokenizer": Flag(metavar="PATH"),
    "model.chat_template": Flag(metavar="FILE"),
    "model.dtype": Flag(choices=("auto", "float32", "bfloat16", "float16")),
    "model.max_model_len": Flag(aliases=("context-length",), parse=token_count, metavar="TOKENS"),
    "model.generation_config": Flag(choices=("auto", "none")),
    "model.load_format": Flag(choices=("auto", "safetensors", "gguf", "dummy")),
    "model.overrides": Flag("override", ("hf-overrides",), parse=key_value, metavar="KEY=JSON"),
    "device.options": Flag("option", parse=key_value, metavar="KEY=VALUE"),
    "device.on_fallback": Flag(choices=("error", "warn", "allow")),
    "device.numerics": Flag(choices=("fast", "exact")),
    "device.threads": Flag(parse=at_least(1), metavar="N"),
    "device.startup_timeout": Flag(parse=between(0.5, 86400.0), metavar="SECONDS"),
    "device.step_timeout": Flag(parse=between(0.5, 86400.0), metavar="SECONDS"),
    "device.tensor_parallel_size": Flag(aliases=("tp",), parse=at_least(1), metavar="N"),
    "device.expert_parallel": Flag(aliases=("enable-expert-parallel",)),
    "device.kernels": Flag("kernel", parse=parse_kernel_choice, metavar="OP[WHERE]=PROVIDER"),
    "device.placement": Flag(parse=parse_placement, metavar="LAYERS=DEVICE,..."),
    "cache.page_tokens": Flag(aliases=("block-size",), parse=at_least(1), metavar="TOKENS"),
    "cache.kv_cache_memory": Flag(aliases=("kv-cache-memory-bytes",), parse=byte_size, metavar="SIZE"),
    "cache.num_kv_pages": Flag(aliases=("num-gpu-blocks-override",), parse=at_least(2), metavar="N"),
    "cache.memory_fraction": Flag(aliases=("gpu-memory-utilization",), parse=between(0.01, 1.0), metavar="SHARE"),
    "cache.kv_dtype": Flag(aliases=("kv-cache-dtype",), metavar="DTYPE"),
    "cache.prefix_caching": Flag(aliases=("enable-prefix-caching",)),
    "scheduler.max_batch_tokens": Flag(aliases=("max-num-batched-tokens",), parse=token_count, metavar="TOKENS"),
    "scheduler.max_num_seqs": Flag(parse=at_least(1), metavar="N", optional=True),
    "scheduler.chunked_prefill": Flag(aliases=("enable-chunked-prefill",)),
    "scheduler.policy": Flag(aliases=("scheduling-policy",), choices=("fcfs", "priority")),
    "scheduler.overlap": Flag(aliases=("async-scheduling",)),
    "scheduler.max_waiting": Flag(parse=at_least(0), metavar="N"),
    "server.host": Flag(metavar="ADDRESS"),
    "server.port": Flag(parse=at_least(0, 65535), metavar="PORT"),
    "server.api_keys": Flag("api-key", metavar="KEY"),
    "server.drain_timeout": Flag(parse=between(0.0, 86400.0), metavar="SECONDS"),
    "server.health_timeout": Flag(parse=between(0.5, 3600.0), metavar="SECONDS"),
    "server.max_body_bytes": Flag("max-body-size", parse=byte_size, metavar="SIZE"),
    "server.max_logprobs": Flag(parse=at_least(0), metavar="N"),
    "server.max_n": Flag(parse=at_least(1), metavar="N"),
    "server.max_stop_strings": Flag(parse=at_least(0), metavar="N"),
    "server.cors_origins": Flag("cors-origin", metavar="ORIGIN"),
    "server.log_requests": Flag(aliases=("enable-log-requests",)),
}


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Each option under its first spelling; the others stand behind its text."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        shown = [spelling for spelling in action.option_strings if spelling not in _other_spellings(action)]
        if isinstance(action, argparse.BooleanOptionalAction):
            return ", ".join(shown)
        value = "" if action.nargs == 0 else f" {self._format_args(action, str(action.metavar or action.dest).upper())}"
        return ", ".join(shown) + value

    def _expand_help(self, action: argparse.Action) -> str:
        others = [spelling for spelling in _other_spellings(action) if not spelling.startswith("--no-")]
        return super()._expand_help(action) + (f"; also {', '.join(others)}" if others else "")


def _other_spellings(action: argparse.Action) -> list[str]:
    """All but the first long option (with its --no- form) and a short one."""
    long = [spelling for spelling in action.option_strings if spelling.startswith("--")]
    return long[2 if isinstance(action, argparse.BooleanOptionalAction) else 1 :]


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations; its errors are ConfigErrors that name the nearest option."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", HelpFormatter)
        super().__init__(*args, **kwargs)

    def format_help(self) -> str:
        if self.usage is None:
            places = [a for a in self._actions if not a.option_strings]
            shown = [f"[{a.metavar or a.dest}]" if a.nargs == "?" else str(a.metavar or a.dest) for a in places]
            self.usage = " ".join(["%(prog)s", *shown, "[options]"])
        return super().format_help()

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown)
        return parsed

    def error(self, message: str) -> typing.NoReturn:
        raise ConfigError(f"{self.prog}: {message}", hint=f"`{self.prog} --help` lists the options")

    def _refuse(self, unknown: Sequence[str]) -> typing.NoReturn:
        from difflib import get_close_matches

        options = [word.split("=")[0] for word in unknown if word.startswith("-")]
        if not options:
            self.error(f"unexpected argument {unknown[0]!r}")
        known = [spelling for action in self._actions for spelling in action.option_strings]
        near = get_close_matches(options[0], known, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else f"`{self.prog} --help` lists the options"
        raise ConfigError(f"{self.prog}: unknown option {options[0]}", hint=hint)


def add_sections(parser: argparse.ArgumentParser, sections: Sequence[str], without: Sequence[str] = ()) -> None:
    """Add the flags of these sections, one titled group each. `without`: fields ("model.seed") that get none."""
    for section in sections:
        title, kind = SECTIONS[section]
        group = parser.add_argument_group(title)
        docs, hints = field_docs(kind), typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            positional = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            if positional or f"{section}.{field.name}" in without:
                continue
            _add_flag(group, f"{section}.{field.name}", field, hints[field.name], docs.get(field.name, ""))


def field_docs(kind: type) -> dict[str, str]:
    """Field name -> its text in the class docstring's "Attributes" part. "a, b: text" gives both the text."""
    _, _, part = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    base = re.match(r" *", part)
    indent = base[0] if base else ""
    docs: dict[str, str] = {}
    names: list[str] = []
    for line in part.splitlines():
        match = re.match(rf"{indent}(\w+(?:, \w+)*): (.*)", line)
        if match:
            names = match[1].split(", ")
            docs.update(dict.fromkeys(names, match[2]))
        elif line.startswith(f"{indent} "):
            docs.update({name: f"{docs[name]} {line.strip()}" for name in names})
        else:
            break
    return docs


def _add_flag(group: Any, dest: str, field: dataclasses.Field[Any], hint: Any, doc: str) -> None:
    flag = FLAGS.get(dest, Flag())
    spellings = [f"--{flag.name or field.name.replace('_', '-')}", *(f"--{alias}" for alias in flag.aliases)]
    base = _base_type(hint)
    settings: dict[str, Any] = {"dest": dest, "default": None}
    text = re.sub(r"\bNone\b", "unset", doc.rstrip(".")).replace("%", "%%")
    if base is bool:
        settings |= {"action": argparse.BooleanOptionalAction, "default": field.default}
        text += f" (default: {'on' if field.default else 'off'})"
    elif base in (tuple, Mapping):
        settings |= {"action": "append", "type": flag.parse or str, "metavar": flag.metavar}
        text += "; may be given several times"
    else:
        settings |= {"default": None if flag.optional else field.default, "type": flag.parse or base}
        settings["metavar"] = flag.metavar or field.name.rsplit("_", 1)[-1].upper()
        if flag.choices:
            settings["choices"] = flag.choices
        if field.default is not None:
            text += f" (default: {field.default})"
    group.add_argument(*spellings, help=text, **settings)


def _base_type(hint: Any) -> Any:
    """`int | None` -> int, `tuple[str, ...]` -> tuple, `Mapping[str, Any]` -> Mapping."""
    if isinstance(hint, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    return typing.get_origin(hint) or hint


def section_from(namespace: argparse.Namespace, section: str, **given: Any) -> Any:
    """The section's dataclass from parsed flags. `given` goes before them."""
    kind = SECTIONS[section][1]
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if not hasattr(namespace, f"{section}.{field.name}"):
            continue
        value = getattr(namespace, f"{section}.{field.name}")
        if value is None and FLAGS.get(f"{section}.{field.name}", Flag()).optional:
            continue
        base = _base_type(hints[field.name])
        if base is tuple:
            value = tuple(value or ())
        elif base is Mapping:
            value = {key: item for pairs in value or () for key, item in pairs.items()}
        values[field.name] = value
    return kind(**(values | given))


def engine_config(namespace: argparse.Namespace, model: str) -> EngineConfig:
    """The engine's configuration. Raises ConfigError where two flags cannot go together.

    Without --max-num-seqs its default goes down to --max-batch-tokens where that is less; a warning says so.
    """
    config = EngineConfig(
        model=section_from(namespace, "model", model=model),
        device=section_from(namespace, "device"),
        cache=section_from(namespace, "cache"),
        scheduler=section_from(namespace, "scheduler"),
    )
    budget, seqs = config.scheduler.max_batch_tokens, config.scheduler.max_num_seqs
    if budget is not None and budget < 1:
        raise ConfigError("--max-batch-tokens must be at least 1")
    if budget is not None and budget < seqs:
        if getattr(namespace, "scheduler.max_num_seqs", None) is None:
            log.warning("--max-batch-tokens %d also lowers --max-num-seqs to that, from %d", budget, seqs)
            return dataclasses.replace(config, scheduler=dataclasses.replace(config.scheduler, max_num_seqs=budget))
        raise ConfigError(
            f"--max-batch-tokens {budget} is less than --max-num-seqs {seqs}: not every running request could get a "
            "token per step",
            hint=f"raise --max-batch-tokens to {seqs}, or lower --max-num-seqs to {budget}",
        )
    return config


def server_config(namespace: argparse.Namespace, environ: Mapping[str, str] | None = None) -> ServerConfig:
    """The server's configuration. Without --api-key the key is that of HARDPOINT_API_KEY, if any."""
    config: ServerConfig = section_from(namespace, "server")
    if any(not key.strip() for key in config.api_keys):
        raise ConfigError("--api-key is empty", hint="leave the flag out to serve without a key")
    key = env.API_KEY.read(environ)
    if not config.api_keys and key is not None:
        config = dataclasses.replace(config, api_keys=(key,))
    return config
