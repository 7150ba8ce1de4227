"""Fixtures of the cases that public bug reports gave (engine level): tiny models, engines, and the oracle."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint.engine import devices

if (HERE := str(Path(__file__).parent)) not in sys.path:
    sys.path.insert(0, HERE)

from engine_driver import Driver
from tiny_models import Chain, llama_config, random_weights, save_llama

#: strict is the reference under the rules of a static-shape chip; the cpu takes steps of any size.
DEVICES = ("cpu", "strict")
#: What these look at lies before the device: on strict they would take minutes to say the same once more.
HOST_SIDE = ("test_rope_config", "test_vocabulary", "test_weights", "test_gguf_files", "test_stop")


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """One thread, as test processes share few cores; and plugins are looked for once, not for each tiny engine."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "discover", functools.cache(devices.discover))
        yield


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Every case of the engine runs on both."""
    if request.param == "strict" and request.module.__name__.rpartition(".")[2] in HOST_SIDE:
        pytest.skip("looks at what lies before the device")
    return str(request.param)


@pytest.fixture(scope="module")
def overlap(device: str) -> bool:
    """The plain loop on one device, the overlapped loop on the other; test_mixed_batches has all four."""
    return device == "cpu"


@pytest.fixture(scope="session")
def make_chain(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Chain]:
    """make(script, **settings of Chain) -> Chain."""
    return lambda script, **settings: Chain(tmp_path_factory.mktemp("chain"), script, **settings)


@pytest.fixture(scope="session")
def make_llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make(pieces=None, seed=0, **changes of the config) -> folder of a random tiny model."""

    def make(pieces: Sequence[str] | None = None, seed: int = 0, **changes: Any) -> Path:
        config = llama_config(**changes)
        return save_llama(tmp_path_factory.mktemp("llama"), config, random_weights(config, seed), pieces)

    return make


@pytest.fixture(scope="session")
def tiny(make_llama: Callable[..., Path]) -> Path:
    """The random tiny model."""
    return make_llama()


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., Driver]]:
    """start(folder, **settings) -> Driver; equal settings share one engine, with its prefix cache emptied."""
    engines: dict[Any, Driver] = {}

    def start(folder: Path, **settings: Any) -> Driver:
        key = (folder, repr(sorted(settings.items())))
        if key not in engines:
            engines[key] = Driver(folder, **settings)
        return engines[key].cold()

    yield start
    for driver in engines.values():
        driver.engine.close()


class Oracle:
    """transformers on the same weights, eager attention, without a cache."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """float32 [T, V]."""
        with torch.no_grad():
            return self._model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].float()

    def logprobs(self, ids: Sequence[int]) -> torch.Tensor:
        """float32 [T, V]; row p is about the token at p + 1."""
        return torch.log_softmax(self.logits(ids), -1)

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The next `count` tokens."""
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(prompt) :]


@pytest.fixture(scope="session")
def oracle() -> Callable[[Path], Oracle]:
    """oracle(folder) -> Oracle; made once per folder."""
    made: dict[Path, Oracle] = {}

    def get(folder: Path) -> Oracle:
        if folder not in made:
            made[folder] = Oracle(folder)
        return made[folder]

    return get


@pytest.fixture(scope="session")
def prompt_of() -> Callable[..., list[int]]:
    """prompt_of(length, seed=0) -> ordinary token ids."""

    def make(length: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(1000 * length + seed)
        return torch.randint(2, 300, (length,), generator=generator).tolist()

    return make
