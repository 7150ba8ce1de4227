"""Names to paths, the list, removal: without any network."""

from __future__ import annotations

from pathlib import Path

import pytest

from hardpoint.errors import ModelNotFound
from hardpoint.weights.store import list_models, models_folder, remove, resolve
from hardpoint.weights.store.folder import HubId, hub_id


def put(store: Path) -> Path:
    path = store / "tiny" / "tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * 77)
    return path


def test_the_folder_follows_the_environment(store: Path) -> None:
    assert models_folder() == store


def test_paths_come_first(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store)
    assert resolve("tiny") == store / "tiny" / "tiny.gguf"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert resolve("tiny") == Path("tiny")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tiny", "hardpoint pull tiny"),
        ("tinny", "did you mean tiny"),
        ("zzz", "named models: tiny, two-parts"),
        ("org/repo", "hardpoint pull org/repo"),
        ("org/repo:Q4_K_M", "hardpoint pull org/repo:Q4_K_M"),
        ("./here.gguf", "no file, folder or model './here.gguf'"),
        ("/abs/path", "no file, folder or model '/abs/path'"),
        ("models/x.gguf", "no file, folder or model"),
        ("../up/x", "no file, folder or model"),
    ],
)
def test_what_is_not_here_says_what_to_type(store: Path, name: str, says: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        resolve(name)
    assert says in str(caught.value)


def test_list_shows_pulled_ones_first(store: Path) -> None:
    assert [(row.name, row.path) for row in list_models()] == [("tiny", None), ("two-parts", None)]
    path = put(store)
    first, second = list_models()
    assert (first.name, first.path, first.format) == ("tiny", path, "gguf")
    assert first.pulled is not None
    assert (second.path, second.pulled) == (None, None)


def test_remove(store: Path) -> None:
    path = put(store)
    assert remove("tiny") == 77
    assert not path.parent.exists()
    for name in ("tiny", "org/repo", "org/repo:Q4_0"):
        with pytest.raises(ModelNotFound, match="no pulled model"):
            remove(name)
    with pytest.raises(ModelNotFound):
        remove("../tiny")


def test_hub_ids() -> None:
    assert hub_id("Qwen/Qwen3-0.6B") == HubId("Qwen/Qwen3-0.6B")
    assert hub_id("org/repo:Q4_K_M") == HubId("org/repo", "Q4_K_M")
    for other in ("smollm2", "a/b/c", "org/..", "../x", "/abs/x", "org/file.gguf", "org/", "org/repo:"):
        assert hub_id(other) is None
