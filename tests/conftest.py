"""For all tests: the checkout guard, one torch thread per test process, and the two real models."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
PACKAGES = {"hardpoint": "core", "hardpoint_platforms": "platforms", "hardpoint_cpu": "plugins/cpu"}
#: Where many cases of a test are alike every n-th runs, counted among those whose name holds the word; the nearest
#: place rules. `HARDPOINT_TEST_EVERY=1 make test` runs them all, in more than twice the time.
EVERY: dict[str, tuple[tuple[int, str], ...]] = {
    "tests/reference": ((5, ""),),
    "tests/reference/cases": ((8, "strict"), (5, "")),  # strict builds its programs for each engine
    "tests/reference/conformance/test_devices.py": ((1, ""),),
    "tests/reference/conformance/test_mutants.py": ((8, ""),),
    "tests/reference/real": ((1, ""),),
    "tests/reference/rocm": ((1, ""),),
    "tests/reference/tpu": ((1, ""),),
    "tests/reference/tpu/test_ahead_of_time.py": ((2, "qwen3"),),  # experts cut, or each expert whole on one chip
    "tests/reference/torch_gpu": ((8, ""),),  # Triton's interpreter is slow, and a GPU runs these in the kit
    "tests/unit/gguf/test_fuzz.py": ((2, ""),),
    "tests/unit/kv/test_pager_traces.py": ((8, ""),),
    "tests/unit/scheduler/test_traces.py": ((8, ""),),
}
#: Tests marked `long` run with all others where HARDPOINT_TEST_EVERY=1.
_ALL = "1"

# Several test processes share few cores: one thread each, also for the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
# No test may depend on a hub that may not be there.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to test another copy of the code than the one around this file."""
    for package, folder in PACKAGES.items():
        where = _location(package)
        if where is None or not where.is_relative_to(CHECKOUT / folder):
            raise pytest.UsageError(
                f"`{package}` is imported from {where or 'nowhere'}, not from {CHECKOUT / folder}.\n"
                "Run `make setup` in this checkout, and use its .venv/bin/pytest."
            )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases that `EVERY` says; each test keeps its first."""
    every = {CHECKOUT / place: rules for place, rules in EVERY.items()}
    forced = os.environ.get("HARDPOINT_TEST_EVERY")
    seen, kept, left = Counter[tuple[str, str]](), [], []
    for item in items:
        name, _, case = item.nodeid.partition("[")
        rules = next((every[place] for place in (item.path, *item.path.parents) if place in every), ())
        n, word = next((rule for rule in rules if rule[1] in case), (1, ""))
        if item.get_closest_marker("long") and forced != _ALL:
            left.append(item)
            continue
        if forced and rules:
            n = int(forced)
        (kept if seen[name, word] % n == 0 else left).append(item)
        seen[name, word] += 1
    items[:] = kept
    if left:
        config.hook.pytest_deselected(items=left)


def _location(package: str) -> Path | None:
    from importlib.util import find_spec

    spec = find_spec(package)
    return Path(spec.origin).resolve().parent if spec is not None and spec.origin else None


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct (Q4_1), pulled into the ordinary model folder on first use."""
    return _pulled("smollm2")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270M, a base model without a chat template, pulled likewise."""
    return _pulled("gemma3-270m")


def _pulled(name: str) -> Path:
    from hardpoint.weights.store import pull

    return pull(name)  # takes a lock: one test process downloads, the others wait
