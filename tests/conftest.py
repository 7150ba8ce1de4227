"""For all tests: the checkout guard, one torch thread per test process, and the two real models."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
PACKAGES = {"hardpoint": "core", "hardpoint_platforms": "platforms", "hardpoint_cpu": "plugins/cpu"}
#: Places with many like cases, of which every n-th runs among those whose name holds a word; HARDPOINT_TEST_EVERY=N
#: says otherwise for all of them. Triton's interpreter takes its time, and a GPU runs all of these in the conformance
#: kit; strict builds fifteen programs for each engine.
EVERY = {
    "tests/reference/cpu/native": (1, ""),
    "tests/reference/torch_gpu": (2, ""),
    "tests/reference/cases": (2, "strict"),
    "tests/reference/conformance/test_mutants.py": (2, ""),
    "tests/unit/scheduler/test_traces.py": (2, ""),
}

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
    every = {CHECKOUT / place: rule for place, rule in EVERY.items()}
    seen, kept, left = Counter[str](), [], []
    for item in items:
        name, _, case = item.nodeid.partition("[")
        rule = next((every[place] for place in (item.path, *item.path.parents) if place in every), None)
        if rule is None or rule[1] not in case:
            kept.append(item)
            continue
        n = int(os.environ.get("HARDPOINT_TEST_EVERY", rule[0]))
        (kept if seen[name] % n == 0 else left).append(item)
        seen[name] += 1
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
