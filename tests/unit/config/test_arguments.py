"""Flags are generated from the dataclasses, and come back as the same objects."""

from __future__ import annotations

import argparse
import dataclasses
import typing

import pytest

from hardpoint.config.arguments import (
    ENGINE_SECTIONS,
    FLAGS,
    SECTIONS,
    Parser,
    add_sections,
    engine_config,
    field_docs,
    section_from,
    server_config,
)
from hardpoint.config.engine import EngineConfig, ModelConfig, SchedulerConfig
from hardpoint.config.server import ServerConfig
from hardpoint.errors import ConfigError


def parser() -> Parser:
    made = Parser(prog="hardpoint serve")
    made.add_argument("model", nargs="?")
    add_sections(made, tuple(SECTIONS))
    return made


def test_no_flags_give_the_defaults() -> None:
    args = parser().parse_args([])
    assert engine_config(args, "m") == EngineConfig(ModelConfig("m"))
    assert server_config(args, {}) == ServerConfig()


def test_every_field_has_a_flag_and_a_help_text() -> None:
    made = parser()
    actions = {action.dest: action for action in made._actions}
    for section, (_, kind) in SECTIONS.items():
        for field in dataclasses.fields(kind):
            if (section, field.name) == ("model", "model"):
                continue
            action = actions[f"{section}.{field.name}"]
            assert action.help, f"{section}.{field.name} has no text in the class docstring"
            assert len(action.help) > 5


def test_every_entry_of_the_table_belongs_to_a_field() -> None:
    fields = {f"{name}.{field.name}" for name, (_, kind) in SECTIONS.items() for field in dataclasses.fields(kind)}
    assert set(FLAGS) <= fields


def test_no_spelling_is_used_twice() -> None:
    # argparse itself refuses a conflict, so building is the test; the help must format as well
    assert "--max-num-batched-tokens" in parser().format_help()


@pytest.mark.parametrize(
    ("flags", "dest", "value"),
    [
        (["--max-num-batched-tokens", "4096"], "scheduler.max_batch_tokens", 4096),
        (["--max-batch-tokens", "4K"], "scheduler.max_batch_tokens", 4096),
        (["--max-num-seqs", "8"], "scheduler.max_num_seqs", 8),
        (["--block-size", "32"], "cache.page_tokens", 32),
        (["--page-tokens=32"], "cache.page_tokens", 32),
        (["--kv-cache-memory", "2GiB"], "cache.kv_cache_memory", 2 << 30),
        (["--gpu-memory-utilization", "0.8"], "cache.memory_fraction", 0.8),
        (["--no-enable-prefix-caching"], "cache.prefix_caching", False),
        (["--no-prefix-caching"], "cache.prefix_caching", False),
        (["--enable-prefix-caching"], "cache.prefix_caching", True),
        (["--no-enable-chunked-prefill"], "scheduler.chunked_prefill", False),
        (["--kv-cache-dtype", "bfloat16"], "cache.kv_dtype", "bfloat16"),
        (["--device", "cpu:0"], "device.device", "cpu:0"),
        (["--dtype", "float32"], "model.dtype", "float32"),
        (["--max-model-len", "8k"], "model.max_model_len", 8000),
        (["--drain-timeout", "2.5"], "server.drain_timeout", 2.5),
        (["--log-requests"], "server.log_requests", True),
    ],
)
def test_spellings(flags: list[str], dest: str, value: object) -> None:
    assert getattr(parser().parse_args(flags), dest) == value


def test_repeated_flags_become_tuples_and_mappings() -> None:
    flags = "--served-model-name a --served-model-name b --api-key k1 --api-key k2 --option threads=2 --option mode=x"
    overrides = ["--override", "rope_theta=5e5", "--override", '{"num_hidden_layers": 2, "x": null}']
    args = parser().parse_args([*flags.split(), *overrides, "m"])
    config = engine_config(args, args.model)
    assert config.model.served_names == ("a", "b")
    assert config.device.options == {"threads": 2, "mode": "x"}
    assert config.model.overrides == {"rope_theta": 5e5, "num_hidden_layers": 2, "x": None}
    assert server_config(args, {}).api_keys == ("k1", "k2")
    assert args.model == "m"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-num-seqs", "0"], "at least 1"),
        (["--max-num-seqs", "x"], "whole number"),
        (["--port", "70000"], "from 0 to 65535"),
        (["--memory-fraction", "nan"], "out of range"),
        (["--dtype", "float8"], "invalid choice"),
        (["--kv-cache-memory", "lots"], "is not a size"),
        (["--option", "threads"], "key=value"),
        (["--max-model-len", "-1"], "argument"),
        (["a", "b"], "unexpected argument 'b'"),
    ],
)
def test_wrong_values_name_the_flag(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parser().parse_args(flags)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("--max-num-seq", "--max-num-seqs"),
        ("--max-batched-tokens", "--max-batch-tokens"),
        ("--prefix-cache", "--prefix-caching"),
        ("--served-model-names=x", "--served-model-name"),
    ],
)
def test_an_unknown_option_suggests_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parser().parse_args([wrong, "1"])
    assert wrong.split("=")[0] in caught.value.message
    assert caught.value.hint == f"did you mean {right}?"


def test_a_strange_option_points_to_the_help() -> None:
    with pytest.raises(ConfigError) as caught:
        parser().parse_args(["--zzz"])
    assert caught.value.hint is not None
    assert "--help" in caught.value.hint


def test_flags_that_cannot_go_together() -> None:
    args = parser().parse_args(["--max-batch-tokens", "8", "--max-num-seqs", "16"])
    with pytest.raises(ConfigError, match="less than --max-num-seqs"):
        engine_config(args, "m")


@pytest.mark.parametrize(
    ("words", "seqs", "told"),
    [
        (["--max-batch-tokens", "64"], 64, True),
        (["--max-num-batched-tokens=1"], 1, True),
        (["--max-batch-tokens", "256"], 256, False),
        (["--max-batch-tokens", "4096"], 256, False),
        ([], 256, False),
        (["--max-batch-tokens", "64", "--max-num-seqs", "64"], 64, False),
    ],
)
def test_a_default_yields_to_the_token_budget(words, seqs, told, caplog) -> None:
    scheduler = engine_config(parser().parse_args(words), "m").scheduler
    assert scheduler.max_num_seqs == seqs
    assert bool(caplog.records) is told
    if told:
        assert f"lowers --max-num-seqs to that, from {SchedulerConfig.max_num_seqs}" in caplog.text


def test_the_default_as_it_is_written_contradicts_too() -> None:
    with pytest.raises(ConfigError, match="less than --max-num-seqs 256"):
        engine_config(parser().parse_args(["--max-batch-tokens", "64", "--max-num-seqs", "256"]), "m")


def test_the_key_may_come_from_the_environment() -> None:
    assert server_config(parser().parse_args([]), {"HARDPOINT_API_KEY": "e"}).api_keys == ("e",)
    assert server_config(parser().parse_args(["--api-key", "f"]), {"HARDPOINT_API_KEY": "e"}).api_keys == ("f",)
    with pytest.raises(ConfigError, match="--api-key is empty"):
        server_config(parser().parse_args(["--api-key", ""]), {})


def test_docs_of_fields() -> None:
    class Example:
        """What it is.

        Attributes:
            a, b: two of them
                over two lines.
            c: another.

        More: not a field.
        """

    docs = field_docs(Example)
    assert docs == {"a": "two of them over two lines.", "b": "two of them over two lines.", "c": "another."}
    assert field_docs(ServerConfig)["port"] == "where to listen."


def test_a_command_may_have_some_sections_only() -> None:
    made = Parser(prog="x")
    add_sections(made, ENGINE_SECTIONS)
    args = made.parse_args(["--max-num-seqs", "3"])
    assert section_from(args, "server") == ServerConfig()
    assert section_from(args, "scheduler").max_num_seqs == 3


def test_values_have_the_fields_types() -> None:
    args = parser().parse_args(["--port", "1", "--health-timeout", "3"])
    server = server_config(args, {})
    hints = typing.get_type_hints(ServerConfig)
    assert type(server.port) is hints["port"]
    assert type(server.health_timeout) is hints["health_timeout"]
    assert isinstance(args, argparse.Namespace)
