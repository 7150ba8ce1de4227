"""Group `memory`: copies of all dtypes and odd sizes, zeros, streams, accounting over 1,000 cycles, running out."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from hardpoint_platforms.conformance.checks import Check, Group, Measure, Refused, Unverified, Wrong
from hardpoint_platforms.conformance.comparison import require_equal
from hardpoint_platforms.conformance.contracts import short
from hardpoint_platforms.conformance.subject import Subject
from hardpoint_platforms.device import Device, MemoryInfo
from hardpoint_platforms.errors import OutOfDeviceMemory
from hardpoint_platforms.host_memory import give_back_memory
from hardpoint_platforms.ops.samples import Source

#: What the engine moves, besides the dtypes that the device computes and caches in.
ALWAYS = (torch.float32, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (7,), (3, 5), (2, 0, 4), (33, 17), (2, 3, 129), (4097,))
CYCLES = 1000
#: Bytes of one cycle, below what allocators give back to the system at once; and what may be missing at the end.
CYCLE_BYTES, DRIFT_BYTES = 1 << 16, 8 << 20
#: What /proc/self/status calls memory of a process's own, in KiB.
_OWN_PAGES = ("RssAnon:", "RssShmem:", "VmSwap:")
#: More than any machine can address.
_TOO_MUCH = 1 << 50


def checks(subject: Subject) -> Iterator[Check]:
    """Level 0."""
    facts = subject.device.capabilities()
    for dtype in dict.fromkeys((*ALWAYS, *facts.compute_dtypes, *facts.kv_dtypes)):
        yield Check("memory", "copies", "round trip", 0, partial(_round_trip, dtype), dtype=short(dtype))
        yield Check("memory", "zeros", "zeros are zero", 0, partial(_zeros, dtype), dtype=short(dtype))
    yield Check("memory", "zeros", "of no elements", 0, _empty)
    yield Check("memory", "copies", "of a strided tensor", 0, _strided)
    yield Check("memory", "copies", "a host tensor may be reused", 0, _reused)
    yield Check("memory", "copies", "a host tensor in place", 0, _in_place)
    yield Check("memory", "streams", "order and events", 0, _streams)
    yield Check("memory", "clock", "goes forward", 0, _clock)
    yield Check("memory", "accounting", "free and total", 0, _accounting)
    yield Check("memory", "accounting", f"{CYCLES} cycles leave nothing behind", 0, _cycles, patience=120.0)
    yield Check("memory", "accounting", "running out is OutOfDeviceMemory", 0, _runs_out)


def _round_trip(dtype: torch.dtype, subject: Subject, seed: int) -> Measure:
    device, source = subject.device, Source(seed)
    for shape in SHAPES:
        wanted = _random(source, shape, dtype)
        there = device.to_device(wanted.clone())
        if there.shape != wanted.shape or there.dtype != dtype:
            told = f"to_device gives {list(there.shape)} {there.dtype} for {list(shape)} {dtype}"
            raise Wrong(told, subject_code=type(device).to_device)
        back = device.to_host(there)
        if back.device.type != "cpu":
            raise Wrong(f"to_host gives a tensor on {back.device}", subject_code=type(device).to_host)
        require_equal(back, wanted, f"{list(shape)} after a round trip", type(device).to_host)
    return Measure()


def _zeros(dtype: torch.dtype, subject: Subject, seed: int) -> Measure:
    device = subject.device
    for shape in (shape for shape in SHAPES if 0 not in shape):
        for _ in range(2):  # the second may get memory that was written to
            made = device.zeros(shape, dtype)
            code = type(device).zeros
            require_equal(device.to_host(made), torch.zeros(shape, dtype=dtype), f"zeros({list(shape)})", code)
            made.fill_(1)
            del made
    return Measure()


def _empty(subject: Subject, seed: int) -> Measure:
    device = subject.device
    for shape in (shape for shape in SHAPES if 0 in shape):
        made = device.to_host(device.zeros(shape, torch.float32))
        require_equal(made, torch.zeros(shape), f"zeros({list(shape)})", type(device).zeros)
    return Measure()


def _strided(subject: Subject, seed: int) -> Measure:
    device, source = subject.device, Source(seed)
    whole = source.normal(6, 10)
    for part in (whole.T, whole[:, 2:7], whole[::2], whole[1]):
        back = device.to_host(device.to_device(part))
        require_equal(back, part, "a strided tensor after a round trip", type(device).to_device)
    there = device.to_device(whole)
    require_equal(device.to_host(there[:, 2:7]), whole[:, 2:7], "a part of a device tensor", type(device).to_host)
    return Measure()


def _reused(subject: Subject, seed: int) -> Measure:
    device = subject.device
    if device.capabilities().unified_memory:
        raise Refused("memory is shared: to_device may return the same object")
    host = torch.arange(4096.0)
    there = device.to_device(host)
    host.fill_(-1.0)
    require_equal(device.to_host(there), torch.arange(4096.0), "a copy whose source changed", type(device).to_device)
    return Measure()


def _in_place(subject: Subject, seed: int) -> Measure:
    device = subject.device
    if not device.capabilities().host_tensors:
        raise Refused("its tensors are its own: host_tensors is False")
    made = device.zeros((64, 1000), torch.int32)
    if type(made) is not torch.Tensor or made.device.type != "cpu":
        told = f"host_tensors is True, yet zeros gives a {type(made).__name__} on {made.device}"
        raise Wrong(told, subject_code=type(device).zeros)
    if not device.capabilities().unified_memory:
        raise Wrong("host_tensors is True and unified_memory False", subject_code=type(device).capabilities)
    for step in range(16):
        made.add_(1)  # at once, where it is true
        if not (made.numpy() == 2 * step + 1).all():
            raise Wrong(
                "host_tensors is True, yet an op's result is not there when it returns", subject_code=type(device).zeros
            )
        made.numpy()[:] += 1
    require_equal(
        device.to_host(made), torch.full((64, 1000), 32, dtype=torch.int32), "what the host wrote", type(device).to_host
    )
    return Measure()


def _streams(subject: Subject, seed: int) -> Measure:
    device = subject.device
    first, second = device.stream(), device.stream()
    with first:
        made = device.to_device(torch.arange(1000.0)) * 2.0
        event = first.record()
    second.wait_for(event)
    with second:
        again = made + 1.0
        last = second.record()
    last.wait()
    if not last.done():
        raise Wrong("an event that was waited for is not done()", subject_code=type(last).done)
    second.synchronize()
    device.synchronize()
    if not event.done():
        raise Wrong("after synchronize() an earlier event is not done()", subject_code=type(event).done)
    require_equal(device.to_host(again), torch.arange(1000.0) * 2.0 + 1.0, "work of two streams")
    return Measure()


def _clock(subject: Subject, seed: int) -> Measure:
    clock = subject.device.clock()
    before = clock.now()
    clock.sleep(0.001)
    after = clock.now()
    if not after - before >= 0.0009:
        raise Wrong(f"sleep(0.001) lets {after - before:.6f} s pass", subject_code=type(clock).sleep)
    return Measure()


def _accounting(subject: Subject, seed: int) -> Measure:
    device = subject.device
    info = device.memory()
    code = type(device).memory
    if not isinstance(info, MemoryInfo) or not (isinstance(info.free, int) and isinstance(info.total, int)):
        raise Wrong(f"memory() returns {info!r:.60}, not a MemoryInfo of ints", subject_code=code)
    if not 0 <= info.free <= info.total or info.total == 0:
        raise Wrong(f"memory() says {info.free} bytes free of {info.total}", subject_code=code)
    return Measure(f"{info.free / 2**30:.1f} GiB free of {info.total / 2**30:.1f}")


def _cycles(subject: Subject, seed: int) -> Measure:
    device = subject.device
    host = torch.zeros(CYCLE_BYTES, dtype=torch.uint8)
    for _ in range(50):  # caches fill first
        _cycle(device, host)
    device.synchronize()
    give_back_memory()
    before = _held(device)
    for _ in range(CYCLES):
        _cycle(device, host)
    device.synchronize()
    lost = _held(device) - before
    if lost > DRIFT_BYTES:
        told = f"{CYCLES} cycles of {CYCLE_BYTES} bytes leave {lost / 2**20:.0f} MiB behind"
        raise Wrong(told, subject_code=type(device).zeros)
    return Measure(f"{max(0, lost) / 2**20:.1f} MiB left behind")


def _cycle(device: Device, host: torch.Tensor) -> None:
    made = device.zeros(host.shape, host.dtype)
    made.fill_(3)
    device.to_host(made)
    device.to_device(host)


def _held(device: Device) -> int:
    """Bytes in use: of this process where memory is the host's, which others use too; else of the device.

    Of the process without the pages of files, program code above all: the system takes those back when it likes, and
    would hide what leaks meanwhile.
    """
    if not device.capabilities().unified_memory:
        info = device.memory()
        return info.total - info.free
    table = Path("/proc/self/status")
    if not table.exists():
        raise Unverified("this system does not tell how much memory a process holds")
    rows = (line.split() for line in table.read_text(encoding="ascii", errors="replace").splitlines())
    return sum(int(row[1]) << 10 for row in rows if row and row[0] in _OWN_PAGES)


def _runs_out(subject: Subject, seed: int) -> Measure:
    device = subject.device
    code = type(device).zeros
    try:
        made = device.zeros((_TOO_MUCH,), torch.uint8)
    except OutOfDeviceMemory:
        return Measure()
    except Exception as error:
        told = f"zeros() of 2^50 bytes raises {type(error).__name__}, not OutOfDeviceMemory"
        raise Wrong(told, subject_code=code) from error
    raise Wrong(f"zeros() of 2^50 bytes returns a tensor of {made.numel()} elements", subject_code=code)


def _random(source: Source, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return source.normal(*shape, dtype=dtype) if shape else source.normal(1, dtype=dtype)[0]
    drawn = source.integers(0, 2 if dtype is torch.bool else 100, *(shape or (1,)))
    return (drawn if shape else drawn[0]).to(dtype)


GROUP = Group("memory", "device memory", checks)
