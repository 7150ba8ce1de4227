"""The SPI as it was frozen, and what has changed since: the promise of docs/spi/versions.md, held by a test.

.venv/bin/python tests/architecture/spi_frozen.py            what breaks the promise, if anything does
.venv/bin/python tests/architecture/spi_frozen.py --freeze   write spi_1.json anew: at a release, never to mend a test
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))

from spi_docs import PAGES, Page  # noqa: E402

from hardpoint_platforms.ops.catalogue import CONTRACTS  # noqa: E402
from hardpoint_platforms.versioning import INTERFACES, Version  # noqa: E402

FROZEN = HERE.with_name("spi_1.json")
Tree = dict[str, Any]


def described() -> Tree:
    """The SPI now: versions, every public name of the pages, every contract."""
    return {
        "interfaces": {name: str(version) for name, version in INTERFACES.items()},
        "names": {name: found for page in PAGES for name, found in _page(page)},
        "contracts": {name: _contract(name) for name in CONTRACTS},
    }


def _page(page: Page) -> Iterator[tuple[str, Tree]]:
    for module, names in page.sources.items():
        home = importlib.import_module(f"hardpoint_platforms.{module}")
        for name in names.split():
            value = getattr(home, name)
            found = _described(value)
            if found is not None:
                yield f"{module}.{name}", {"interface": page.interface} | found


def _described(value: Any) -> Tree | None:
    """A class or a function; constants and aliases say nothing that a caller could hold on to."""
    if inspect.isclass(value) and issubclass(value, enum.Enum):
        return {"kind": "enum", "members": {member.name: repr(member.value) for member in value}}
    if inspect.isclass(value):
        return {
            "kind": "class",
            "abstract": sorted(getattr(value, "__abstractmethods__", ())),
            "methods": {name: _parameters(member) for name, member in _methods(value)},
            "properties": sorted(name for name, member in _own(value) if isinstance(member, property)),
            "fields": _fields(value),
        }
    if inspect.isfunction(value):
        return {"kind": "function", "parameters": _parameters(value)}
    return None


def _own(kind: type) -> Iterator[tuple[str, Any]]:
    """Public members of a class and of those of the SPI that it is made from."""
    homes = [base for base in kind.__mro__ if base.__module__.startswith("hardpoint_platforms")]
    seen = {name: member for base in reversed(homes) for name, member in vars(base).items()}
    yield from ((name, member) for name, member in seen.items() if not name.startswith("_"))


def _methods(kind: type) -> Iterator[tuple[str, Any]]:
    for name, member in _own(kind):
        member = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if inspect.isfunction(member):
            yield name, member


def _parameters(function: Any) -> list[list[str]]:
    """Name, kind and default ("" without one) of each."""
    return [
        [each.name, each.kind.name, "" if each.default is each.empty else repr(each.default)]
        for each in inspect.signature(function).parameters.values()
    ]


def _fields(kind: type) -> list[list[str]]:
    """Name, type and default of each field of a dataclass."""
    if not dataclasses.is_dataclass(kind):
        return []
    return [[each.name, str(each.type), _default(each)] for each in dataclasses.fields(kind)]


def _default(each: dataclasses.Field[Any]) -> str:
    if each.default is not dataclasses.MISSING:
        return repr(each.default)
    return "" if each.default_factory is dataclasses.MISSING else "made"


def _contract(name: str) -> Tree:
    contract = CONTRACTS[name]
    return {
        "version": str(contract.version),
        "altitude": contract.altitude.name,
        "signature": contract.signature,
        "weights": list(contract.weights),
        "mutates": list(contract.mutates),
        "attributes": {
            key: {"default": repr(a.default), "required": a.required, "since": a.since, "choices": repr(a.choices)}
            for key, a in contract.attributes.items()
        },
    }


def complaints(frozen: Tree, now: Tree) -> list[str]:
    """What a plugin written against `frozen` would not find, and what was added without a new minor."""
    found: list[str] = []
    for interface, version in frozen["interfaces"].items():
        if interface not in now["interfaces"]:
            found.append(f"interface {interface} is gone")
        elif Version.parse(now["interfaces"][interface]).major > Version.parse(version).major:
            return []  # a new major is another promise, and gets a file of its own
    for name, was in frozen["names"].items():
        found += _changed(name, was, now["names"].get(name), now["interfaces"], frozen["interfaces"])
    for name, was in frozen["contracts"].items():
        found += _contract_changed(name, was, now["contracts"].get(name))
    return found


def _changed(name: str, was: Tree, is_now: Tree | None, versions: Tree, before: Tree) -> list[str]:
    if is_now is None:
        return [f"{name} is gone"]
    gone, added = [], []
    if was["kind"] != is_now["kind"]:
        return [f"{name} was a {was['kind']} and is a {is_now['kind']}"]
    for group in ("members", "methods", "properties"):
        old, new = was.get(group, {}), is_now.get(group, {})
        gone += [f"{name}.{key} is gone" for key in old if key not in new]
        added += [f"{name}.{key}" for key in new if key not in old]
    gone += [f"{name}.{key} is another value" for key, value in was.get("members", {}).items()
             if is_now["members"].get(key, value) != value]  # fmt: skip
    gone += [f"{name}.{key} must be written since" for key in is_now.get("abstract", ()) if key not in was["abstract"]]
    calls = [(key, value, is_now["methods"].get(key)) for key, value in was.get("methods", {}).items()]
    calls += [("", was["parameters"], is_now["parameters"])] if was["kind"] == "function" else []
    calls += [("(fields)", was["fields"], is_now["fields"])] if was.get("fields") else []
    for key, old, new in calls:
        if new is not None:
            where = f"{name}.{key}" if key else name
            gone += _sequence_changed(where, old, new)
            added += [f"{where}({item[0]})" for item in new[len(old) :]]
    interface = was["interface"]
    raised = interface and Version.parse(versions[interface]) > Version.parse(before[interface])
    return gone + ([] if raised or not added else [f"{', '.join(added)} is new: raise the minor of {interface!r}"])


def _sequence_changed(where: str, old: list[list[str]], new: list[list[str]]) -> list[str]:
    """Parameters or fields: those that there were stay as they were, in order; new ones follow and have defaults."""
    if new[: len(old)] != old:
        return [f"{where} takes {new[: len(old)]} where it took {old}"]
    return [f"{where}: {item[0]} is new and has no default" for item in new[len(old) :] if not item[-1]]


def _contract_changed(name: str, was: Tree, is_now: Tree | None) -> list[str]:
    if is_now is None:
        return [f"contract {name} is gone"]
    old, new = Version.parse(was["version"]), Version.parse(is_now["version"])
    if new.major > old.major:
        return []
    found = [
        f"contract {name}: its {part} is another, and its major is the same"
        for part in ("altitude", "signature", "weights", "mutates")
        if was[part] != is_now[part]
    ]
    for key, attribute in was["attributes"].items():
        if is_now["attributes"].get(key) != attribute:
            found.append(f"contract {name}: attribute {key} is another, and its major is the same")
    for key, attribute in is_now["attributes"].items():
        if key not in was["attributes"] and (attribute["required"] or not old.minor < attribute["since"] <= new.minor):
            found.append(f"contract {name}: attribute {key} is new: give it a default and a minor of its own (since)")
    return found


def main() -> int:
    """Write the file, or print what breaks the promise."""
    now = described()
    if "--freeze" in sys.argv:
        FROZEN.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
        print(f"{FROZEN.name}: {len(now['names'])} names, {len(now['contracts'])} contracts")
        return 0
    broken = complaints(json.loads(FROZEN.read_text(encoding="utf-8")), now)
    print("\n".join(broken) or "as it was promised")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
