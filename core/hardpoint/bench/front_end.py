"""The front end process of `hardpoint bench stream`: the real server and client, before an engine without a model.

python -m hardpoint.bench.front_end PORT [MODEL]      MODEL: whose tokenizer to use
"""

from __future__ import annotations

import sys

from hardpoint.bench.null_engine import BUILDER, word_tokenizer
from hardpoint.config.engine import EngineConfig, ModelConfig
from hardpoint.config.server import ServerConfig
from hardpoint.frontend.remote_client import RemoteEngineClient
from hardpoint.frontend.tokenizer import load_tokenizer
from hardpoint.server.app import create_app
from hardpoint.server.serve import run


def main(port: int, model: str | None) -> int:
    """Serve until a signal."""
    server = ServerConfig(port=port, drain_timeout=0.0)
    name = ModelConfig("null", served_names=("null",))
    client = RemoteEngineClient(EngineConfig(name), builder=BUILDER)
    tokenizer = load_tokenizer(ModelConfig(model)) if model else word_tokenizer()
    client.use_tokenizer(tokenizer)
    return run(create_app(client, tokenizer, server, name), server)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None))
