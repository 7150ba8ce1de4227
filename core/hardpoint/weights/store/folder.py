"""What lies in the store: names to paths, the list, removal. Nothing here downloads.

    models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf       a named model
    models/Qwen--Qwen3-0.6B/...                          a hub repository's files
    models/Qwen--Qwen3-0.6B/.pulled.json                 which of its selections are whole
    models/.partial/                                     pulls that have not finished

A named model appears under its name only after its checksum was right; a hub selection counts once it stands in
`.pulled.json`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hardpoint import env
from hardpoint.errors import ModelNotFound
from hardpoint.weights.store.catalogue import CATALOGUE

MARKER = ".pulled.json"
#: Selection of a repository's safetensors and everything beside them.
WHOLE = ""
_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+?)(?::(?P<quant>[\w.-]+))?$")


@dataclass(frozen=True)
class StoredModel:
    """One row of the list.

    Attributes:
        name: what to type.
        format: gguf or safetensors.
        path: None where it is known but not pulled.
        bytes: on disk, or of the file to come.
        pulled: when, in local time.
    """

    name: str
    title: str
    format: str
    path: Path | None
    bytes: int
    pulled: datetime | None


@dataclass(frozen=True)
class HubId:
    """`org/repo` or `org/repo:QUANT`."""

    repo: str
    quant: str = WHOLE

    def __str__(self) -> str:
        return f"{self.repo}:{self.quant}" if self.quant else self.repo

    @property
    def folder(self) -> Path:
        """Where the repository's files are kept."""
        return models_folder() / self.repo.replace("/", "--")


def models_folder() -> Path:
    """`models` under HARDPOINT_HOME, by default ~/.cache/hardpoint/models. May not exist yet."""
    return env.HOME.read() / "models"


def hub_id(name: str) -> HubId | None:
    """`name` as a hub id, or None if it has not the form of one."""
    match = _HUB_ID.match(name)
    if match is None or name.endswith(".gguf") or ".." in name:
        return None
    return HubId(match["repo"], match["quant"] or WHOLE)


def resolve(name: str) -> Path:
    """The file or folder of a model: a path, a named model or a hub id.

    Raises ModelNotFound, saying what to type, for everything that is not here.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    if name in CATALOGUE:
        file = models_folder() / name / CATALOGUE[name].file
        if file.exists():
            return file
        raise ModelNotFound(f"the model {name!r} is not here yet", hint=f"hardpoint pull {name}")
    hub = None if name.startswith((".", "~", "/")) else hub_id(name)
    if hub is None:
        raise _unknown(name)
    selections = read_marker(hub.folder)
    quant = _selected(hub, selections)
    if quant is not None:
        return hub.folder / selections[quant][0] if quant else hub.folder
    if not hub.quant and len(selections) == 1:
        return hub.folder / next(iter(selections.values()))[0]
    message = f"no file, folder or pulled model {name!r}{_others(hub, selections)}"
    raise ModelNotFound(message, hint=f"hardpoint pull {name}")


def list_models() -> list[StoredModel]:
    """Pulled models, then the named ones that could be pulled."""
    rows = [*_named(), *_from_hub()]
    return sorted(rows, key=lambda row: (row.path is None, row.name))


def remove(name: str) -> int:
    """Delete a pulled model; returns the bytes freed. Raises ModelNotFound."""
    hub = hub_id(name)
    if name in CATALOGUE:
        folder = models_folder() / name
    elif hub is not None and hub.quant:
        return _remove_selection(hub)
    elif hub is not None:
        folder = hub.folder
    else:
        raise _unknown(name)
    if not folder.is_dir():
        raise ModelNotFound(f"there is no pulled model {name!r}", hint="hardpoint models list")
    freed = _bytes_of(folder)
    shutil.rmtree(folder)
    return freed


def read_marker(folder: Path) -> dict[str, list[str]]:
    """Finished selections of a hub folder: quant (or WHOLE) to its files, first the one to open."""
    try:
        content: Any = json.loads((folder / MARKER).read_text())
    except (OSError, ValueError):
        return {}
    selections = content.get("selections", {}) if isinstance(content, dict) else {}
    return {
        quant: files
        for quant, files in selections.items()
        if isinstance(files, list) and files and all((folder / file).exists() for file in files)
    }


def write_marker(folder: Path, selections: dict[str, list[str]]) -> None:
    """Replace the marker in one step."""
    new = folder / f"{MARKER}.new"
    new.write_text(json.dumps({"selections": selections}, indent=1))
    new.replace(folder / MARKER)


def _named() -> Iterator[StoredModel]:
    for model in CATALOGUE.values():
        file = models_folder() / model.name / model.file
        there = file.exists()
        title = f"{model.title} ({model.license})"
        when = _time_of(file) if there else None
        yield StoredModel(model.name, title, "gguf", file if there else None, model.bytes, when)


def _from_hub() -> Iterator[StoredModel]:
    for folder in sorted(models_folder().glob("*--*")):
        repo = folder.name.replace("--", "/", 1)
        for quant, files in read_marker(folder).items():
            size = sum((folder / file).stat().st_size for file in files)
            path = folder / files[0] if quant else folder
            name, kind = str(HubId(repo, quant)), "gguf" if quant else "safetensors"
            yield StoredModel(name, "", kind, path, size, _time_of(folder / MARKER))


def _remove_selection(hub: HubId) -> int:
    selections = read_marker(hub.folder)
    quant = _selected(hub, selections)
    if quant is None:
        raise ModelNotFound(f"there is no pulled model {str(hub)!r}", hint="hardpoint models list")
    files = selections.pop(quant)
    if not selections:
        return remove(hub.repo)
    write_marker(hub.folder, selections)
    kept = {file for others in selections.values() for file in others}
    gone = [hub.folder / file for file in files if file not in kept]
    freed = sum(file.stat().st_size for file in gone)
    for file in gone:
        file.unlink()
    return freed


def _selected(hub: HubId, selections: dict[str, list[str]]) -> str | None:
    """The finished selection that a name means, whatever the case of its letters."""
    return next((quant for quant in selections if quant.lower() == hub.quant.lower()), None)


def _others(hub: HubId, selections: dict[str, list[str]]) -> str:
    here = ", ".join(str(HubId(hub.repo, quant)) for quant in selections)
    return f"; of this repository there is: {here}" if here else ""


def _unknown(name: str) -> ModelNotFound:
    close = get_close_matches(name, CATALOGUE, n=1)
    known = ", ".join(CATALOGUE)
    hint = f"did you mean {close[0]}?" if close else f"named models: {known}; or a path, or a hub id such as org/repo"
    return ModelNotFound(f"there is no file, folder or model {name!r}", hint=hint)


def _bytes_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _time_of(file: Path) -> datetime:
    return datetime.fromtimestamp(file.stat().st_mtime).replace(microsecond=0)
