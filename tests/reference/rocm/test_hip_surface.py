"""The device on a torch that answers as one for ROCm: opened, used, and in each way in which it can fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hardpoint_rocm.device import RocmDevice
from hardpoint_rocm.fnuz import AsFnuz
from hardpoint_rocm.platform import RocmPlatform
from hardpoint_rocm.topology import Places
from hardpoint_torch_gpu.dense import TorchLinear

from hardpoint_platforms.batch import SampleResult, SamplingInputs
from hardpoint_platforms.device import Device
from hardpoint_platforms.errors import DeviceLost, DeviceUnavailable, OutOfDeviceMemory
from hardpoint_platforms.ops.provider import OpProvider
from hardpoint_platforms.program import Bucket, SamplingShape, StepInputs, StepOutputs

pytestmark = [pytest.mark.reference, pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")]

MI300X, MI355X, MI250 = 90402, 90500, 90010
LOST = "HIP error: an illegal memory access was encountered\nHIP kernel errors might be asynchronously reported"
FULL = "HIP out of memory. Tried to allocate 1024.00 GiB. GPU 0 has a total capacity of 191.98 GiB"
CAPTURING = "HIP error: operation not permitted when stream is capturing\nmore of it"
Machine = Callable[..., Places]


@pytest.fixture
def device(hip: Any, machine: Machine) -> Device:
    return RocmPlatform(machine(MI300X)).open(0, {})


def linear(device: Device) -> OpProvider:
    return next(provider for provider in device.providers() if provider.op == "linear")


def test_it_opens_unverified_and_says_what_it_is(device: Device) -> None:
    assert isinstance(device, RocmDevice)
    capabilities = device.capabilities()
    assert not capabilities.verified
    told = {choice.name: (choice.value, choice.reason) for choice in capabilities.tuning}
    assert told["architecture"] == ("gfx942", "waves of 64, MFMA instructions, 8-bit floats: fnuz")
    assert told["matrix products"][0] in ("hipblas", "hipblaslt", "ck", "default")
    assert told["AITER"][0] == "off"
    assert told["AITER"][1].startswith("AITER is not installed")
    assert device.memory().free == 190 << 30


@pytest.mark.parametrize(("chip", "kind", "float8"), [(MI300X, AsFnuz, None), (MI355X, TorchLinear, True),
                                                      (MI250, TorchLinear, False)])  # fmt: skip
def test_each_chip_multiplies_its_own_floats(
    hip: Any, machine: Machine, chip: int, kind: type, float8: bool | None
) -> None:
    provider = linear(RocmPlatform(machine(chip)).open(0, {}))
    assert type(provider) is kind
    if isinstance(provider, TorchLinear):
        assert provider._float8 is float8


def test_the_librarys_name_is_handed_to_torch(hip: Any, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda name=None: asked.append(name) or "x.Ck")
    RocmPlatform(machine(MI300X)).open(0, {"blas": "hipblaslt"})
    RocmPlatform(machine(MI300X)).open(0, {"blas": "auto"})
    assert [name for name in asked if name is not None] == ["hipblaslt"]


@pytest.mark.parametrize(
    "said",
    [
        "No HIP GPUs are available",
        "HIP error: HIP driver version is insufficient for HIP runtime version",
        "HIP error: invalid device ordinal",
    ],
)
def test_a_device_that_the_runtime_refuses(hip: Any, machine: Machine, said: str) -> None:
    hip.failing["mem_get_info"] = RuntimeError(f"{said}\nmore of it")
    with pytest.raises(DeviceUnavailable, match=rf"rocm:0 \(chip 0\) cannot be used: {said}\n") as raised:
        RocmPlatform(machine(MI300X)).open(0, {})
    assert "driver may be too old for this torch, which was built for ROCm 7.0.51831" in (raised.value.hint or "")


def test_memory_that_is_not_there(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **named: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError(FULL)

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(OutOfDeviceMemory, match=r"rocm:0: no room for .* HIP out of memory"):
        device.zeros((1 << 38,), torch.float32)


def test_an_illegal_address_is_a_lost_device(device: Device, hip: Any) -> None:
    hip.failing["synchronize"] = RuntimeError(LOST)
    with pytest.raises(
        DeviceLost, match=r"rocm:0 .* has stopped: an illegal memory access was encountered\n"
    ) as raised:
        device.synchronize()
    assert "conformance --device rocm:0" in (raised.value.hint or "")


def test_it_may_show_while_results_are_awaited(device: Device, hip: Any) -> None:
    readback = device.read_back([])
    hip.failing["event.wait"] = RuntimeError(LOST)
    with pytest.raises(DeviceLost, match="illegal memory access"):
        readback.wait()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(FULL), RuntimeError("a fault of another kind")])
def test_other_errors_stay_what_they_are(device: Device, hip: Any, error: Exception) -> None:
    hip.failing["synchronize"] = error
    with pytest.raises(type(error)) as raised:
        device.synchronize()
    assert raised.value is error


def test_a_refused_capture_leaves_the_step_op_by_op(device: Device, hip: Any) -> None:
    hip.failing["capture_begin"] = RuntimeError(CAPTURING)
    inputs, steps = step_inputs(), []

    def step(given: StepInputs, state: Any, weights: Any) -> tuple[StepOutputs, Any]:
        steps.append(given)
        return StepOutputs(SampleResult(given.token_ids + 1), given.token_ids > 0), state

    program = device.programs().build(step, Bucket(1, 1, 1, SamplingShape.GREEDY))
    program.prepare(inputs, (), ())
    prepared = len(steps)
    outputs, _ = program.run(inputs, (), ())
    assert len(steps) == prepared + 1
    assert outputs.sample.token_ids.tolist() == [8]
    assert "replay" not in hip.calls
    assert "operation not permitted when stream is capturing" in program.describe()
    assert "more of it" not in program.describe()


def test_without_graphs_nothing_is_captured(hip: Any, machine: Machine) -> None:
    device = RocmPlatform(machine(MI300X)).open(0, {"graphs": False})
    assert {bucket.query for bucket in device.programs().buckets(64, 8)} != {1}


def step_inputs() -> StepInputs:
    one = torch.ones(1)
    number = torch.zeros(1, dtype=torch.int64)
    sampling = SamplingInputs(one, number, one, one, number, number, all_greedy=True, filters=False)
    return StepInputs(number + 7, number, (), number, sampling)
