"""Hub ids: which files a name means, the fetch, its errors. The hub is a stand-in that never leaves the machine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from hardpoint.errors import ModelError, ModelNotFound
from hardpoint.weights.store import list_models, pull, remove, resolve
from hardpoint.weights.store.hub import gguf_models

PLAIN = {
    "config.json": 20,
    "generation_config.json": 10,
    "tokenizer.json": 30,
    "tokenizer_config.json": 15,
    "model-00001-of-00002.safetensors": 400,
    "model-00002-of-00002.safetensors": 300,
    "model.safetensors.index.json": 12,
}
NOISE = {
    "README.md": 5,
    ".gitattributes": 5,
    "pytorch_model.bin": 700,
    "consolidated.safetensors": 700,
    "original/params.json": 5,
    "onnx/model.onnx": 700,
    "LICENSE.txt": 3,
}
QUANTS = {
    "README.md": 5,
    "m-Q4_K_M.gguf": 100,
    "m.Q8_0.gguf": 200,
    "m-UD-IQ2_XXS.gguf": 50,
    "BF16/m-BF16-00001-of-00002.gguf": 300,
    "BF16/m-BF16-00002-of-00002.gguf": 250,
    "mmproj-F16.gguf": 10,
}


class Hub:
    """Repositories as name to files and sizes."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, int]] = {}
        self.error: Exception | None = None
        self.fetched: list[str] = []
        self.stop_after: int | None = None

    def model_info(self, repo: str, *, files_metadata: bool) -> Any:
        assert files_metadata
        if self.error is not None:
            raise self.error
        files = self.repos[repo].items()
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name, size=size) for name, size in files])

    def snapshot_download(self, repo: str, *, local_dir: Path, allow_patterns: list[str], **_: Any) -> str:
        for number, name in enumerate(sorted(allow_patterns)):
            if self.stop_after is not None and number >= self.stop_after:
                raise httpx.ConnectError("connection lost")
            if not (local_dir / name).exists():
                (local_dir / name).parent.mkdir(parents=True, exist_ok=True)
                (local_dir / name).write_bytes(b"x" * self.repos[repo][name])
                self.fetched.append(name)
        return str(local_dir)


@pytest.fixture
def hub(store: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub()
    hub.repos = {
        "org/plain": {**PLAIN, **NOISE},
        "org/quants": QUANTS,
        "org/one": {"x.Q4_0.gguf": 7},
        "org/none": NOISE,
    }
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    return hub


def test_safetensors_and_what_belongs_to_them(hub: Hub, store: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    path = pull("org/plain", lambda *step: seen.append(step))
    assert path == resolve("org/plain") == store / "org--plain"
    assert sorted(hub.fetched) == sorted(PLAIN)
    assert seen[-1] == ("download", sum(PLAIN.values()), sum(PLAIN.values()))
    pull("org/plain")
    assert sorted(hub.fetched) == sorted(PLAIN)


@pytest.mark.parametrize("name", ["org/quants:Q4_K_M", "org/quants:q4_k_m"])
def test_one_quantization(hub: Hub, store: Path, name: str) -> None:
    assert pull(name) == store / "org--quants" / "m-Q4_K_M.gguf" == resolve(name)
    assert hub.fetched == ["m-Q4_K_M.gguf"]
    assert resolve("org/quants") == resolve(name)


def test_split_quantization_comes_with_all_parts(hub: Hub, store: Path) -> None:
    assert pull("org/quants:BF16") == store / "org--quants" / "BF16" / "m-BF16-00001-of-00002.gguf"
    assert len(hub.fetched) == 2


def test_several_selections_of_one_repository(hub: Hub, store: Path) -> None:
    pull("org/quants:Q4_K_M")
    pull("org/quants:UD-IQ2_XXS")
    with pytest.raises(ModelNotFound, match="org/quants:Q4_K_M, org/quants:UD-IQ2_XXS"):
        resolve("org/quants")
    rows = {row.name: row for row in list_models() if row.path is not None}
    assert rows.keys() == {"org/quants:Q4_K_M", "org/quants:UD-IQ2_XXS"}
    assert (rows["org/quants:Q4_K_M"].bytes, rows["org/quants:Q4_K_M"].format) == (100, "gguf")
    assert remove("org/quants:Q4_K_M") == 100
    assert resolve("org/quants").name == "m-UD-IQ2_XXS.gguf"
    remove("org/quants:UD-IQ2_XXS")
    assert not (store / "org--quants").exists()


def test_a_repository_with_one_gguf_needs_no_choice(hub: Hub) -> None:
    assert pull("org/one").name == "x.Q4_0.gguf"
    assert resolve("org/one") == resolve("org/one:Q4_0")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("org/quants", "its GGUF files are: BF16, Q4_K_M, UD-IQ2_XXS, Q8_0"),
        ("org/quants:Q5_K_M", "no quantization 'Q5_K_M'; its GGUF files are"),
        ("org/none", "no model that can be served"),
        ("org/plain:Q4_K_M", "no quantization"),
    ],
)
def test_names_that_mean_none_or_several_list_what_there_is(hub: Hub, name: str, says: str) -> None:
    with pytest.raises(ModelNotFound, match=says):
        pull(name)
    with pytest.raises(ModelNotFound, match=r"hardpoint pull") as caught:
        resolve(name)
    assert name in str(caught.value)


def test_a_pull_that_was_cut_off_is_not_there_and_goes_on(hub: Hub) -> None:
    hub.stop_after = 3
    with pytest.raises(ModelError, match="cannot be reached"):
        pull("org/plain")
    assert len(hub.fetched) == 3
    with pytest.raises(ModelNotFound, match="org/plain"):
        resolve("org/plain")
    hub.stop_after = None
    pull("org/plain")
    assert sorted(hub.fetched) == sorted(PLAIN)
    assert resolve("org/plain").is_dir()


def test_a_file_that_was_deleted_is_not_here_any_more(hub: Hub, store: Path) -> None:
    (pull("org/plain") / "config.json").unlink()
    with pytest.raises(ModelNotFound):
        resolve("org/plain")
    (store / "org--plain" / ".pulled.json").write_text("{broken")
    with pytest.raises(ModelNotFound):
        resolve("org/plain")
    assert json.loads((pull("org/plain") / ".pulled.json").read_text())["selections"].keys() == {""}


def _response(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "https://hub.invalid/x"))


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (errors.GatedRepoError("gated", response=_response(403)), ModelError, "accept terms"),
        (errors.RepositoryNotFoundError("404", response=_response(404)), ModelNotFound, "no repository 'org/plain'"),
        (errors.HfHubHTTPError("503 busy", response=_response(503)), ModelError, "the hub answered 503"),
        (errors.OfflineModeIsEnabled("offline"), ModelError, "HF_HUB_OFFLINE is set"),
        (httpx.ConnectError("no route"), ModelError, "cannot be reached .no route"),
        (OSError(28, "No space left on device", "/x"), ModelError, "No space left on device: /x"),
    ],
)
def test_errors_in_our_words(hub: Hub, error: Exception, kind: type[Exception], says: str) -> None:
    hub.error = error
    with pytest.raises(kind, match=says):
        pull("org/plain")


def test_offline_for_real(store: Path) -> None:
    """Tests run with HF_HUB_OFFLINE: the real library refuses, and says so through us."""
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        pull("org/repository")


def test_quantization_names() -> None:
    files = [
        "a-q4_0.gguf",
        "b.IQ4_XS.gguf",
        "Q3_K_L/c-Q3_K_L-00001-of-00003.gguf",
        "d-mxfp4.gguf",
        "odd.gguf",
        "TQ1_0.gguf",
    ]
    assert set(gguf_models(files)) == {"q4_0", "IQ4_XS", "Q3_K_L", "mxfp4", "odd", "TQ1_0"}
