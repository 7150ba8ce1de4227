"""Ranks that share a GPU: every one of them is refused, and the one that owns the store goes last."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hardpoint_torch_gpu.collectives import GpuCommunicator

from hardpoint_platforms.errors import UnsupportedOperation

pytestmark = pytest.mark.reference


def refused(monkeypatch: pytest.MonkeyPatch, gpus: list[int]) -> list[str]:
    """What each rank is told, its GPU being number gpus[rank]."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device.index}"))
    store, told = dist.HashStore(), [""] * len(gpus)

    def rank(place: int) -> None:
        one = object.__new__(GpuCommunicator)
        one._device = torch.device("cuda", gpus[place])
        try:
            one._refuse_shared(store, place, len(gpus))
        except UnsupportedOperation as error:
            told[place] = str(error)

    threads = [threading.Thread(target=rank, args=(place,)) for place in range(len(gpus))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    return told


def test_ranks_on_gpus_of_their_own_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(monkeypatch, [0, 1, 2]) == ["", "", ""]


def test_ranks_that_share_one_are_refused_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    told = refused(monkeypatch, [0, 1, 0, 1])
    assert all("ranks 0 and 2 share a GPU" in said for said in told)
