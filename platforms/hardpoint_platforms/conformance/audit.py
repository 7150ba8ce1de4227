"""Group `load`: manifest, probe and opening behave, and loading the plugin changes nothing that is not its own.

The import audit runs in a process of its own: it takes a picture of `hardpoint` and `hardpoint_platforms`, loads the
plugin, opens its device, binds its ops, and takes another.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator

import torch

from hardpoint_platforms.capabilities import BatchLimits, Capabilities
from hardpoint_platforms.conformance.checks import Check, Group, Measure, Refused, Unverified, Wrong
from hardpoint_platforms.conformance.picture import CORE, differences, picture
from hardpoint_platforms.conformance.subject import Subject
from hardpoint_platforms.device import DeviceInfo
from hardpoint_platforms.errors import DeviceUnavailable, HardpointError, PlatformError
from hardpoint_platforms.program import SamplingShape
from hardpoint_platforms.validation import check_probe

#: Seconds that `probe` may take.
PROBE_SECONDS = 2.0


def checks(subject: Subject) -> Iterator[Check]:
    """Level 0, all of them."""
    for contract, name, body in (
        ("manifest", "manifest", _manifest),
        ("imports", "nothing outside the plugin changes", _imports),
        ("imports", "opening changes nothing", _open_changes_nothing),
        ("probe", "quick and the same twice", _probe),
        ("device", "opens and is valid", _opens),
        ("device", "two at once", _two_at_once),
        ("device", "closes twice and opens again", _reopens),
        ("device", "an index that is not there is an error", _wrong_index),
        ("capabilities", "sound and the same each time", _capabilities),
        ("capabilities", "providers and programs are the same each time", _stable),
    ):
        yield Check("load", contract, name, 0, body)


def _manifest(subject: Subject, seed: int) -> Measure:
    entry = subject.entry
    if not subject.installed:
        raise Unverified("the platform was handed over as an object; an installed plugin has a manifest")
    if entry.manifest is None:
        raise Wrong(str(entry.problem or "hardpoint.json cannot be read"))
    if entry.manifest.name != entry.name:
        raise Wrong(f"hardpoint.json names the platform {entry.manifest.name!r}, its entry point {entry.name!r}")
    bare = [option.name for option in entry.manifest.options.values() if not option.description]
    if bare:
        raise Wrong(f"hardpoint.json: option {bare[0]!r} has no description")
    return Measure()


def _imports(subject: Subject, seed: int) -> Measure:
    if not subject.installed:
        raise Unverified("the platform was handed over as an object; an installed plugin is loaded in a process")
    command = [sys.executable, "-m", "hardpoint_platforms.conformance.picture", subject.request]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise Wrong(f"cannot be loaded in a fresh process: {last[0]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    wrong = []
    if found["imported"]:
        wrong.append(f"imports {', '.join(found['imported'][:3])}: a plugin leans on hardpoint_platforms alone")
    if found["changed"]:
        wrong.append(f"changes {', '.join(found['changed'][:3])}, which is not its own")
    if wrong:
        raise Wrong("; ".join(wrong))
    return Measure(seconds=found["seconds"])


def _open_changes_nothing(subject: Subject, seed: int) -> Measure:
    before = picture(CORE)
    device = subject.fresh()
    try:
        for provider in device.providers():
            provider.planner()
        device.programs().buckets(64, 4)
    finally:
        device.close()
    changed = differences(before, picture(CORE))
    if changed:
        raise Wrong(f"changes {', '.join(changed[:3])} while it is opened", subject_code=type(subject.platform).open)
    return Measure()


def _probe(subject: Subject, seed: int) -> Measure:
    started = time.perf_counter()
    first = check_probe(subject.entry, subject.platform.probe())
    seconds = time.perf_counter() - started
    code = type(subject.platform).probe
    if seconds > PROBE_SECONDS:
        raise Wrong(f"probe() takes {seconds:.1f} s, at most {PROBE_SECONDS:g} s are allowed", subject_code=code)
    second = check_probe(subject.entry, subject.platform.probe())
    if first.devices != second.devices:
        raise Wrong("probe() finds other devices the second time", subject_code=code)
    numbers = [info.index for info in first.devices]
    if len(set(numbers)) != len(numbers):
        raise Wrong(f"probe() gives two devices one index: {numbers}", subject_code=code)
    return Measure(seconds=seconds)


def _opens(subject: Subject, seed: int) -> Measure:
    device = subject.device
    info = device.info
    if not isinstance(info, DeviceInfo) or (info.platform, info.index) != (subject.entry.name, subject.index):
        raise Wrong(
            f"info is {info!r:.80}, not that of {subject.entry.name}:{subject.index}", subject_code=type(device)
        )
    if not isinstance(device.torch_device, torch.device):
        raise Wrong(f"torch_device is {device.torch_device!r:.40}, not a torch.device", subject_code=type(device))
    found = device.zeros((2, 2), torch.float32).device
    if found.type != device.torch_device.type:
        raise Wrong(f"zeros() makes tensors on {found}, torch_device says {device.torch_device}")
    return Measure()


def _two_at_once(subject: Subject, seed: int) -> Measure:
    first = subject.device
    try:
        second = subject.fresh()
    except (DeviceUnavailable, PlatformError) as error:
        raise Refused(error.message) from error
    try:
        mark = torch.arange(6.0)
        held = first.to_device(mark.clone())
        second.to_device(torch.zeros(6))
        second.synchronize()
    finally:
        second.close()
    if not torch.equal(first.to_host(held), mark):
        raise Wrong("closing a second opening of the device harms the first", subject_code=type(second).close)
    return Measure()


def _reopens(subject: Subject, seed: int) -> Measure:
    for _ in range(2):
        device = subject.fresh()
        device.zeros((3,), torch.float32)
        device.close()
        device.close()
    return Measure()


def _wrong_index(subject: Subject, seed: int) -> Measure:
    code = type(subject.platform).open
    try:
        device = subject.platform.open(12345, subject.options)
    except DeviceUnavailable as error:
        if not error.message.strip():
            raise Wrong("open() of an absent index gives no reason", subject_code=code) from error
        return Measure()
    except HardpointError as error:
        raise Wrong(f"open() of an absent index raises {type(error).__name__}, not DeviceUnavailable") from error
    device.close()
    raise Wrong("open(12345) opens something: a device asked for must be the one that is got", subject_code=code)


def _capabilities(subject: Subject, seed: int) -> Measure:
    device = subject.device
    code = type(device).capabilities
    facts = device.capabilities()
    if not isinstance(facts, Capabilities):
        raise Wrong(f"capabilities() returns {type(facts).__name__}, not Capabilities", subject_code=code)
    if facts != device.capabilities():
        raise Wrong("capabilities() differ from call to call", subject_code=code)
    for name in ("compute_dtypes", "kv_dtypes"):
        listed = getattr(facts, name)
        if not listed or not all(isinstance(dtype, torch.dtype) for dtype in listed):
            raise Wrong(f"{name} is {listed!r:.60}: at least one torch.dtype is needed", subject_code=code)
    if not facts.page_tokens or min(facts.page_tokens) < 1:
        raise Wrong(f"page_tokens is {facts.page_tokens}: at least one page size is needed", subject_code=code)
    if facts.step_tokens < 1 or (facts.max_context is not None and facts.max_context < 1):
        raise Wrong("step_tokens and max_context must be at least 1", subject_code=code)
    _check_limits(facts.limits, code)
    return Measure()


def _check_limits(limits: BatchLimits, code: object) -> None:
    for name in ("max_tokens", "max_requests", "max_prefill_requests"):
        most = getattr(limits, name)
        if most is not None and most < 1:
            raise Wrong(f"limits.{name} is {most}: nothing could ever run", subject_code=code)
    if limits.prefill_chunk_multiple < 1:
        raise Wrong("limits.prefill_chunk_multiple must be at least 1", subject_code=code)
    for name in ("token_buckets", "request_buckets"):
        sizes = getattr(limits, name)
        if list(sizes) != sorted(set(sizes)) or any(size < 1 for size in sizes):
            raise Wrong(f"limits.{name} is {sizes}: ascending sizes are needed", subject_code=code)


def _stable(subject: Subject, seed: int) -> Measure:
    device = subject.device
    first, second = ([(p.op, p.name) for p in device.providers()] for _ in range(2))
    if first != second:
        raise Wrong("providers() differ from call to call", subject_code=type(device).providers)
    one, two = (device.programs().buckets(256, 8) for _ in range(2))
    if one != two:
        raise Wrong("buckets() differ from call to call", subject_code=type(device.programs()).buckets)
    limits = device.capabilities().limits
    prefills = min(8, limits.max_prefill_requests or 8)
    tokens = min(256, limits.max_tokens or 256)
    rows = min(8, limits.max_requests or 8, tokens)
    # the largest steps that the limits allow: all bring one token; as many as may bring several; some of each
    steps = [(rows, rows, 1), (tokens, min(rows, prefills), tokens)]
    steps += [(tokens, rows, tokens)] if limits.mixed or prefills == 8 else []
    for step in steps if one else ():
        if not any(bucket.fits(*step, SamplingShape.FULL) for bucket in one):
            tokens, rows, query = step
            told = f"a step of {tokens} tokens, {rows} requests, up to {query} tokens each, sampling of every kind"
            raise Wrong(f"buckets(256, 8): none takes {told}", subject_code=type(device.programs()).buckets)
    return Measure()


GROUP = Group("load", "load and import audit", checks)
