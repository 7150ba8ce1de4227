"""The peer of `bench compare-transformers` computes with as many threads as we do, whatever the device leaves torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hardpoint.bench import transformers_peer
from hardpoint.cli import bench_engine
from hardpoint.cli.main import main

pytestmark = pytest.mark.reference


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [([], 3), (["--threads", "2"], 2), (["--option", "threads=2"], 2)],
    ids=["own", "flag", "option"],
)
def test_the_peer_gets_as_many_threads(flags: list[str], wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []

    def compare(*_: Any, threads: int, **__: Any) -> list[Any]:
        given.append(threads)
        return []

    monkeypatch.setattr(transformers_peer, "TransformersPeer", lambda model: None)
    monkeypatch.setattr(transformers_peer, "compare", compare)
    # A device with a thread pool of its own.
    monkeypatch.setattr(bench_engine, "offline_engine", lambda args: torch.set_num_threads(1))
    monkeypatch.setattr(bench_engine, "fresh_batches", lambda args: None)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert main(["bench", "compare-transformers", "tiny", *flags]) == 0
    finally:
        torch.set_num_threads(before)
    assert given == [wanted]
