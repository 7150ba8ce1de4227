"""Hub repositories: which files a name means, and fetching them with huggingface_hub, which resumes."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hardpoint.errors import ModelError, ModelNotFound
from hardpoint.weights.store.folder import WHOLE, HubId, read_marker, write_marker

_QUANT = re.compile(
    r"(?:^|[-._/])(?P<quant>(?:UD-)?(?:I?Q\d+(?:_[A-Za-z0-9]+)*|TQ\d_\d|MXFP4(?:_MOE)?|NVFP4|BF16|F16|FP16|F32))"
    r"(?:-\d{5}-of-\d{5})?\.gguf$",
    re.IGNORECASE,
)
#: What a safetensors model consists of. Weights of other formats and of other tools stay at the hub.
_WANTED = re.compile(r"[^/]+\.(safetensors|json|jinja|model|tiktoken|txt)$|additional_chat_templates/[^/]+\.jinja$")
_UNWANTED = re.compile(r"^(consolidated|original|pytorch_model|tf_model|flax_model|onnx|README|LICENSE)", re.IGNORECASE)
_POLL_SECONDS = 0.2


def pull_from_hub(hub: HubId, report: Any) -> Path:
    """Fetch a repository's safetensors, or one of its GGUF models, into the store.

    `report` is a PullProgress. Raises ModelNotFound (no such repository or quantization, or several to choose from) and
    ModelError (no access, no network).
    """
    sizes = _list_files(hub)
    quant, files = choose_files(hub, sizes)
    finished = read_marker(hub.folder)
    if finished.get(quant) != files:
        hub.folder.mkdir(parents=True, exist_ok=True)
        _fetch(hub, {file: sizes[file] for file in files}, report)
        write_marker(hub.folder, {**read_marker(hub.folder), quant: files})
    return hub.folder / files[0] if quant else hub.folder


def choose_files(hub: HubId, sizes: Mapping[str, int]) -> tuple[str, list[str]]:
    """The selection that a name means: its quantization (WHOLE for safetensors) and files, first the one to open.

    Raises ModelNotFound, listing what there is, where the name means none or several.
    """
    models = gguf_models(sizes)
    if not hub.quant:
        if any(file.endswith(".safetensors") and _wanted(file) for file in sizes):
            return WHOLE, sorted(file for file in sizes if _wanted(file))
        if len(models) == 1:
            quant, files = next(iter(models.items()))
            return quant, files
        raise _choice(hub, models, "holds no safetensors" if models else "holds no model that can be served")
    exact = [name for name in models if name.lower() == hub.quant.lower()]
    if not exact:
        raise _choice(hub, models, f"has no quantization {hub.quant!r}")
    return exact[0], models[exact[0]]


def gguf_models(files: Sequence[str] | Mapping[str, int]) -> dict[str, list[str]]:
    """The GGUF models among file names: quantization to its file, or its parts in order."""
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        name = file.rsplit("/", 1)[-1]
        if not file.endswith(".gguf") or name.startswith("mmproj"):
            continue
        match = _QUANT.search(file)
        models.setdefault(match["quant"] if match else name.removesuffix(".gguf"), []).append(file)
    return models


def _wanted(file: str) -> bool:
    return bool(_WANTED.fullmatch(file)) and not _UNWANTED.search(file)


def _choice(hub: HubId, models: Mapping[str, Sequence[str]], what: str) -> ModelNotFound:
    if not models:
        return ModelNotFound(f"the repository {hub.repo!r} {what}", hint="it needs .safetensors or .gguf files")
    names = ", ".join(models)
    return ModelNotFound(
        f"the repository {hub.repo!r} {what}; its GGUF files are: {names}",
        hint=f"hardpoint pull {hub.repo}:{next(iter(models))}",
    )


def _list_files(hub: HubId) -> dict[str, int]:
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(hub.repo, files_metadata=True)
    except Exception as error:
        raise _translated(hub, error) from error
    return {file.rfilename: file.size or 0 for file in info.siblings or ()}


def _fetch(hub: HubId, sizes: Mapping[str, int], report: Any) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import tqdm

    class Silent(tqdm):
        """The caller shows progress, not the library."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

    total, done = sum(sizes.values()), threading.Event()

    def watch() -> None:
        while not done.wait(_POLL_SECONDS):
            report("download", min(_present(hub.folder, sizes), total), total)

    watcher = threading.Thread(target=watch, name="pull-progress", daemon=True)
    watcher.start()
    try:
        snapshot_download(hub.repo, local_dir=hub.folder, allow_patterns=list(sizes), tqdm_class=Silent)
    except Exception as error:
        raise _translated(hub, error) from error
    finally:
        done.set()
        watcher.join()
    missing = [file for file in sizes if not (hub.folder / file).exists()]
    if missing:
        raise ModelError(f"{hub}: the hub did not send {', '.join(missing)}", hint=f"hardpoint pull {hub}")
    report("download", total, total)


def _present(folder: Path, sizes: Mapping[str, int]) -> int:
    """Bytes of the wanted files so far, those still growing included."""
    whole = sum(min((folder / file).stat().st_size, size) for file, size in sizes.items() if (folder / file).exists())
    growing = 0
    for file in folder.glob(".cache/huggingface/download/**/*.incomplete"):
        try:
            growing += file.stat().st_size
        except FileNotFoundError:
            continue
    return whole + growing


def _translated(hub: HubId, error: Exception) -> ModelError | ModelNotFound:
    """The library's error in our words."""
    from huggingface_hub import errors

    page = f"https://huggingface.co/{hub.repo}"
    if isinstance(error, errors.GatedRepoError):
        return ModelError(
            f"the repository {hub.repo!r} is gated: its owner asks you to accept terms first",
            hint=f"accept them at {page}, then set HF_TOKEN (or run `hf auth login`) and pull again",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelNotFound(
            f"the hub has no repository {hub.repo!r}, or it is private",
            hint="check the spelling; set HF_TOKEN for a private one",
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        mend = f"unset HF_HUB_OFFLINE && hardpoint pull {hub}"
        return ModelError(f"cannot pull {hub}: HF_HUB_OFFLINE is set", hint=mend)
    if isinstance(error, errors.HfHubHTTPError):
        mend = "try again: a pull goes on where it stopped"
        return ModelError(f"cannot pull {hub}: the hub answered {error}", hint=mend)
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
        return ModelError(f"cannot pull {hub}: {error.strerror}: {error.filename}")
    reason = str(error) or type(error).__name__
    return ModelError(
        f"cannot pull {hub}: the hub cannot be reached ({reason})",
        hint="check the network; a model on disk is served by its path: hardpoint serve /path/to/model",
    )
