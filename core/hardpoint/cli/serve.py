"""Serve a model over HTTP, in OpenAI's protocol.

hardpoint serve                          the default model, if it was pulled
hardpoint serve Qwen/Qwen3-0.6B --port 9000 --api-key SECRET
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import time
from typing import TYPE_CHECKING

from hardpoint.cli import console
from hardpoint.cli.model_name import chosen_model, shown_name
from hardpoint.config.arguments import SECTIONS, add_sections, engine_config, server_config
from hardpoint.errors import ConfigError

if TYPE_CHECKING:
    from hardpoint.config.engine import EngineConfig
    from hardpoint.config.server import ServerConfig
    from hardpoint.protocol.messages import EngineInfo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `hardpoint serve`."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="folder, .gguf file, hub id or named model (default: smollm2)"
    )
    add_sections(parser, tuple(SECTIONS))


def execute(args: argparse.Namespace) -> int:
    """Serve until a signal or the engine's end. Returns the server's exit code."""
    started = time.perf_counter()
    server = server_config(args)
    model = chosen_model(args.model, "serve")
    config = engine_config(args, model)
    if config.model.load_format != "dummy":
        from hardpoint.weights.store import resolve

        resolve(model)
    refuse_taken_port(server.host, server.port)
    if server.log_requests:
        logging.getLogger("hardpoint.server.access").setLevel(logging.INFO)
    console.note(f"hardpoint: starting {shown_name(model)}")
    return serve(config, server, started)


def serve(config: EngineConfig, server: ServerConfig, started: float) -> int:
    """Start the engine process, and load everything of the front end while it loads the model."""
    from hardpoint.engine.launch import launch_engine
    from hardpoint.engine.startup import lasting_objects
    from hardpoint_platforms.host_memory import give_back_memory

    launched = launch_engine()
    progress = console.ProgressLine()
    with lasting_objects():
        import asyncio

        from hardpoint.cli.story import engine_story, server_story
        from hardpoint.frontend.remote_client import RemoteEngineClient

        client = RemoteEngineClient(
            config, health_timeout=server.health_timeout, on_progress=progress.update, launched=launched
        )
        try:
            from hardpoint.frontend.tokenizer import load_tokenizer
            from hardpoint.server.app import create_app
            from hardpoint.server.serve import bind, run

            tokenizer = load_tokenizer(config.model)
            client.use_tokenizer(tokenizer)
            app = create_app(client, tokenizer, server, config.model)
            listener = bind(server.host, server.port)
        except BaseException:
            progress.clear()
            asyncio.run(client.close())
            raise
    give_back_memory()
    url = shown_url(server.host, listener.getsockname()[1])
    name = (config.model.served_names or (config.model.model,))[0]

    def tell(info: EngineInfo) -> None:
        progress.clear()
        lines = engine_story(info, shown_name(config.model.model), time.perf_counter() - started)
        lines += server_story(url, name, chat=tokenizer.has_chat_template, key_needed=bool(server.api_keys))
        print("\n".join(lines), flush=True)

    try:
        return run(app, server, listener=listener, on_ready=tell)
    finally:
        progress.clear()


def refuse_taken_port(host: str, port: int) -> None:
    """Raise ConfigError if the address cannot be had, before anything heavy starts."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}, port {port}: {os.strerror(error.errno) if error.errno else error}",
            hint=f"another server may run there; choose another port, such as --port {port % 65535 + 1}",
        ) from error


def shown_url(host: str, port: int) -> str:
    """An address that a client on this machine can use."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{reachable}:{port}"
