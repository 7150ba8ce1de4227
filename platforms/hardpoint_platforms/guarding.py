"""Whose fault an error or a hang is: the plugin's distribution, the op and its place in the model, the plugin's line.

Bound kernels are plain callables and nothing is noted while they run. When an exception reaches somebody who can tell
of it, its traceback still knows: the instruction that failed spells the call (`self._rope(`), what it called is found
among the frame's values, and that object is one of the op table's kernels. The frames of a thread that hangs know it
in the same way.
"""

from __future__ import annotations

import inspect
import linecache
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

from hardpoint_platforms.discovery import PlatformEntry, discover
from hardpoint_platforms.errors import (
    DeviceLost,
    DeviceUnavailable,
    HardpointError,
    OutOfDeviceMemory,
    PlatformError,
    PluginError,
)

if TYPE_CHECKING:
    from hardpoint_platforms.binding import BoundOp, OpTable
    from hardpoint_platforms.device import Device
    from hardpoint_platforms.ops.contract import OpInstance
    from hardpoint_platforms.ops.provider import OpProvider
    from hardpoint_platforms.program import Bucket

#: Errors that say what happened as well as anybody could.
_PLAIN = (PluginError, DeviceUnavailable, OutOfDeviceMemory, DeviceLost)
#: Packages in which a failing line is not a plugin's fault: plugins call back into them.
_OURS = ("hardpoint_platforms", "hardpoint")
#: Frames as they are, innermost first.
Frames = Sequence["Stand"]
_CALL = re.compile(r"(?P<self>self\.)?(?P<name>\w+)\(")


@dataclass(frozen=True)
class Stand:
    """Where a frame stands, or stood when an error went through it. `instruction`: in bytes of its code."""

    frame: FrameType
    instruction: int
    line: int

    def __str__(self) -> str:
        return f"{self.frame.f_code.co_filename}:{self.line} in {self.frame.f_code.co_name}"


def of_thread(thread: int | None) -> list[Stand]:
    """Where a thread (by `threading.get_ident`) stands now, innermost frame first; empty if there is no such thread."""
    frame: FrameType | None = sys._current_frames().get(thread or -1)
    found = []
    while frame is not None:
        found.append(Stand(frame, frame.f_lasti, frame.f_lineno))
        frame = frame.f_back
    return found


@dataclass(frozen=True)
class Plugin:
    """Whose code it is.

    Attributes:
        platform: what people write after --device; distribution, version: of the installed package.
        packages: names of the import packages that its code lies in.
    """

    platform: str
    distribution: str
    version: str
    packages: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}".strip()

    def error(self, cause: str, message: str, hint: str | None = None) -> PluginError:
        """A PluginError that names distribution and version."""
        return PluginError(self.platform, cause, f"{self}: {message}", hint=hint)


def plugin_of(device: Device) -> Plugin:
    """The plugin that opened a device. Reads the metadata of installed packages: for errors, not for steps."""
    package = _package_of(type(device))
    entry = discover().entries.get(device.info.platform)
    return Plugin(device.info.platform, package, "", (package,)) if entry is None else _plugin(entry, package)


def plugin_of_provider(provider: OpProvider) -> Plugin:
    """The plugin whose package a provider comes from."""
    package = _package_of(type(provider))
    entry = next((entry for entry in discover().entries.values() if _package(entry) == package), None)
    return Plugin(package, package, "", (package,)) if entry is None else _plugin(entry, package)


def place_of_error(error: BaseException, plugin: Plugin) -> str:
    """ "FILE:LINE in NAME" of the innermost line of the plugin's; empty if there is none."""
    return _line(_chain(error), plugin.packages)


@contextmanager
def naming(parts: Sequence[tuple[Device, OpTable]]) -> Iterator[None]:
    """What `named` makes of errors is raised in their place."""
    try:
        yield
    except Exception as error:
        told = named(error, parts)
        if told is error:
            raise
        raise told from error


def named(error: Exception, parts: Sequence[tuple[Device, OpTable]]) -> Exception:
    """A PluginError (cause "run") where a kernel of these devices raised `error`, or other code of their plugins.

    It names distribution and version, op and place, the plugin's innermost line and what to do. Any other error, and
    one that says on purpose what is wrong with the device, comes back as it is.
    """
    if isinstance(error, _PLAIN) or (isinstance(error, HardpointError) and not isinstance(error, PlatformError)):
        return error
    full = _out_of_memory(error, parts)
    if full is not None:
        return full
    chain = _chain(error)
    in_kernel = _kernel_fault(chain, parts, f"raised {_said(error)}")
    if in_kernel is not None:
        return in_kernel
    if not isinstance(error, HardpointError):
        for device, _ in parts:
            plugin = plugin_of(device)
            if _last(chain, plugin.packages):
                at = _at(_line(chain, plugin.packages))
                return plugin.error("run", f"{device.info} raised {_said(error)}{at}", advice(plugin))
    return error


def _kernel_fault(chain: Frames, parts: Sequence[tuple[Device, OpTable]], told: str) -> PluginError | None:
    """That the bound kernel which these frames were calling did what is `told`; None where they called none."""
    for device, table in parts:
        for bound in _running(chain, table):
            plugin = plugin_of(device)
            packages = {*plugin.packages, _package_of(type(bound.provider))}
            at = _at(_line(chain, packages) or _line(chain, ("hardpoint_platforms",)))
            place = f"{named_op(bound.instance)} ({bound.provider.name} on {device.info})"
            return plugin.error("run", f"{place} {told}{at}", advice(plugin, bound.instance.op))
    return None


def _out_of_memory(error: Exception, parts: Sequence[tuple[Device, OpTable]]) -> OutOfDeviceMemory | None:
    """torch's own error of a full device, in our words; None for another error."""
    import torch  # only where something went wrong: whoever imports this module may not need torch

    if not isinstance(error, torch.OutOfMemoryError):
        return None
    devices = ", ".join(str(device.info) for device, _ in parts) or "the device"
    what = str(error).partition("\n")[0].partition(" Of the allocated")[0]
    return OutOfDeviceMemory(
        f"{devices}: {what}",
        hint="end what else holds its memory, or take a smaller model, --max-model-len or --kv-cache-memory",
    )


def hung(thread: int, parts: Sequence[tuple[Device, OpTable]], told: str) -> PluginError | None:
    """A PluginError (cause "run") where a thread stands in a kernel of these devices, or in other code of a plugin.

    It names what `named` names of an error. `told` says what is wrong: "does not come back". None where the thread
    stands in no plugin's code.
    """
    chain = of_thread(thread)
    in_kernel = _kernel_fault(chain, parts, told)
    if in_kernel is not None:
        return in_kernel
    owners = list(map(_owner, chain))
    known = {_package(entry): entry for entry in discover().entries.values()}
    package = next((owner for owner in owners if owner in known and owner not in _OURS), None)
    if package is None:
        return None
    plugin = _plugin(known[package], package)
    what, op = _subject(stand for stand, owner in zip(chain, owners, strict=True) if owner in (package, *_OURS))
    return plugin.error("run", f"{what} {told}{_at(_line(chain, (package,)))}", advice(plugin, op))


def named_op(instance: OpInstance) -> str:
    """ "norm at layers.3.input_layernorm"."""
    return f"{instance.op} at {instance.where}"


def advice(plugin: Plugin, op: str | None = None) -> str:
    """The command that shows whether an op, or the whole device, does what its contract says."""
    from hardpoint_platforms.conformance.ladder import HIGHEST, level_of

    level = HIGHEST if op is None else level_of(op)
    what = "what else fails" if op is None else f"whether {op} keeps to its contract"
    return f"`hardpoint conformance --device {plugin.platform} --level {level}` shows {what}"


def place_of_code(subject: object) -> str:
    """ "FILE:LINE in NAME" where a function, method, class or instance is defined, behind wrappers that name what they
    wrap; empty where it has no source (native code)."""
    code: Any = subject
    while isinstance(code, partial):
        code = code.func
    if not (inspect.isroutine(code) or inspect.isclass(code)):
        code = type(code).__call__ if callable(code) and inspect.isfunction(type(code).__call__) else type(code)
    try:
        code = inspect.unwrap(code)
        return f"{inspect.getsourcefile(code)}:{inspect.getsourcelines(code)[1]} in {code.__qualname__}"
    except (TypeError, ValueError, OSError, AttributeError):
        return ""


def _plugin(entry: PlatformEntry, package: str) -> Plugin:
    return Plugin(entry.name, entry.distribution, entry.version, tuple(dict.fromkeys((_package(entry), package))))


def _package(entry: PlatformEntry) -> str:
    return entry.value.partition(":")[0].strip().partition(".")[0]


def _package_of(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _chain(error: BaseException) -> list[Stand]:
    """Every frame of an error and of what led to it, innermost first, the error's own before its causes'."""
    found: list[Stand] = []
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        frames = []
        trace = link.__traceback__
        while trace is not None:
            frames.append(Stand(trace.tb_frame, trace.tb_lasti, trace.tb_lineno))
            trace = trace.tb_next
        found += reversed(frames)
        link = link.__cause__ or link.__context__
    return found


def _running(chain: Iterable[Stand], table: OpTable) -> Iterator[BoundOp]:
    """Bound ops whose kernel a frame was calling."""
    kernels = {id(bound.kernel): bound for bound in reversed(table.bound)}
    for stand in chain:
        called = _called(stand)
        if called is not None and id(called) in kernels:
            yield kernels[id(called)]


def _called(stand: Stand) -> Any:
    """What the instruction of a frame called, if it is spelled `name(` or `self.name(`; else None."""
    code = stand.frame.f_code
    positions = list(code.co_positions())[stand.instruction // 2]
    line, column = positions[0], positions[2]
    if line is None or column is None:
        return None
    # columns count bytes
    text = linecache.getline(code.co_filename, line).encode()[column:].decode(errors="replace")
    spelled = _CALL.match(text)
    if spelled is None:
        return None
    values = stand.frame.f_locals
    if spelled["self"]:
        return getattr(values.get("self"), spelled["name"], None)
    return values.get(spelled["name"])


def _subject(chain: Iterable[Stand]) -> tuple[str, str | None]:
    """What the innermost frame that has one works on, op instance or program, and the op's name for `advice`."""
    from hardpoint_platforms.ops.contract import OpInstance
    from hardpoint_platforms.program import Bucket

    for stand in chain:
        for value in stand.frame.f_locals.values():
            if isinstance(value, OpInstance):
                return named_op(value), value.op
            if isinstance(value, Bucket):
                return f"program of {_sizes(value)}", "program"
    return "its code", None


def _sizes(bucket: Bucket) -> str:
    """ "8 tokens of 8 requests, GREEDY sampling"; 0 means any number."""
    tokens, requests = (str(number or "any number of") for number in (bucket.tokens, bucket.requests))
    return f"{tokens} tokens of {requests} requests, {bucket.sampling.name} sampling"


def _owner(stand: Stand) -> str:
    return str(stand.frame.f_globals.get("__name__", "")).partition(".")[0]


def _line(chain: Iterable[Stand], packages: Iterable[str]) -> str:
    """The innermost line in these packages; empty if there is none."""
    wanted = set(packages)
    return next((str(stand) for stand in chain if _owner(stand) in wanted), "")


def _last(chain: Iterable[Stand], packages: Sequence[str]) -> bool:
    """Whether the plugin was the last to act: its line is further in than any of ours."""
    owner = next((owner for owner in map(_owner, chain) if owner in (*packages, *_OURS)), "")
    return owner in packages


def _at(place: str) -> str:
    return f", at {place}" if place else ""


def _said(error: BaseException) -> str:
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
