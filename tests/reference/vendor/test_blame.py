"""What a vendor is told: the line behind wrappers, the whole command, the indexing that a state must take."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from hardpoint_platforms import guarding, state_cache
from hardpoint_platforms.batch import AttentionBatch
from hardpoint_platforms.conformance import blame
from hardpoint_platforms.conformance.checks import Check, Group, Wrong
from hardpoint_platforms.conformance.mutants.catalogue import run as run_fault
from hardpoint_platforms.conformance.mutants.platform import Fault
from hardpoint_platforms.conformance.runner import Selection, conduct
from hardpoint_platforms.conformance.subject import of_platform
from hardpoint_platforms.errors import OutOfDeviceMemory
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Sample
from hardpoint_platforms.ops.provider import OpProvider
from hardpoint_platforms.ops.samples import run
from hardpoint_platforms.ops.table import op_table
from hardpoint_platforms.reference.platform import ReferenceDevice, ReferencePlatform
from hardpoint_platforms.reference.providers import reference_providers

pytestmark = pytest.mark.reference


def test_a_wrapped_kernel_is_blamed_at_its_own_line() -> None:
    def kernel() -> None:
        return None

    @functools.wraps(kernel)
    def launched(*args: Any) -> None:
        kernel(*args)

    line = kernel.__code__.co_firstlineno
    assert blame.of_code(launched) == f"{__file__}:{line} in {kernel.__qualname__}"
    assert blame.of_code(functools.partial(launched, 1)).startswith(f"{__file__}:{line} in")


def test_the_command_that_repeats_a_failure_has_the_options_of_the_plugin() -> None:
    def fails(subject: Any, seed: int) -> Any:
        raise Wrong("is wrong")

    group = Group("mine", "a check", lambda subject: iter([Check("mine", "linear", "one", 0, fails)]))
    chosen = Selection(options=("memory_mb=64", "fault=two words"))
    report = conduct(of_platform(ReferencePlatform(), "reference", "somebody"), [group], chosen)
    (verdict,) = report.failures()
    assert verdict.repeat.endswith("--case mine/linear/one --option memory_mb=64 --option 'fault=two words'")


def test_the_command_line_hands_the_options_on(capsys: pytest.CaptureFixture[str]) -> None:
    from hardpoint_platforms.conformance.command import main

    words = ["--device", "strict", "--in-process", "--json", "--case", "load/device/opens*"]
    main([*words, "--option", "memory_mib=2048"])
    assert '--option memory_mib=2048"' in capsys.readouterr().out


class Handle(torch.Tensor):
    """A tensor that torch cannot send anywhere and that has no address."""

    def data_ptr(self) -> int:
        return 0


class FarDevice(ReferenceDevice):
    """Only `to_device` makes its tensors."""

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone().as_subclass(Handle)


def test_plans_of_the_reference_come_through_the_devices_own_copy() -> None:
    device = FarDevice()
    bound = op_table(device).bind(
        CONTRACTS["attention"].instance(
            "attn", torch.float32, heads=1, kv_heads=1, head_dim=8, v_head_dim=8, scale=1.0, group=0, pool_layer=0
        )
    )
    starts, lengths, slots = (np.array(row, np.int32) for row in ([0, 1, 4], [1, 3], [0] * 4))
    batch = AttentionBatch(starts, lengths, (np.zeros((2, 1), np.int32),), (slots,), 16, 2, 4)
    planner = bound.provider.planner()
    assert planner is not None
    plan = planner.plan(batch)
    sent = [*plan.pages, *plan.offsets, plan.blocks[0].tokens, plan.blocks[0].last, *plan.blocks[0].tables]
    assert all(isinstance(tensor, Handle) for tensor in [*sent, *plan.chunks[0].tables])


def test_handles_without_an_address_are_not_one_memory() -> None:
    (provider,) = [one for one in reference_providers() if one.op == "linear"]
    first, second = (FarDevice().to_device(torch.ones(4)) for _ in range(2))
    assert sum(OpProvider.packed_bytes(provider, (first, second, first)).values()) == 32


class Part:
    """A part of a state that takes the documented forms of indexing and no other."""

    def __init__(self, dense: torch.Tensor) -> None:
        self.dense, self.dtype, self.forms = dense, dense.dtype, set[str]()

    def _check(self, index: Any) -> None:
        if isinstance(index, tuple):
            pages, offsets = index
            assert pages.ndim == 1
            assert pages.dtype == torch.int64
            one = isinstance(offsets, int) and offsets == 0
            assert one or (offsets.dtype == torch.int64 and offsets.shape == pages.shape)
            self.forms.add("pages, 0" if one else "pages, offsets")
        else:
            assert index.dtype == torch.int64
            self.forms.add(f"table {index.ndim}")

    def __getitem__(self, index: Any) -> torch.Tensor:
        self._check(index)
        return self.dense[index]

    def __setitem__(self, index: Any, rows: torch.Tensor) -> None:
        self._check(index)
        assert rows.ndim == 3
        assert rows.dtype == self.dtype
        self.forms.add("rows in")
        self.dense[index] = rows


PAGED = ("attention", "mla_attention", "conv_state", "ssm_scan", "gated_delta")


@pytest.mark.parametrize("op", PAGED)
def test_reference_ops_index_a_state_in_the_documented_forms_alone(op: str) -> None:
    (provider,) = [one for one in reference_providers() if one.op == op]
    used: set[str] = set()
    for sample in CONTRACTS[op].samples(torch.float32):
        arguments = sample.make()
        (place,) = [i for i, argument in enumerate(arguments) if isinstance(argument, tuple)]
        state = tuple(tuple(Part(part) for part in layer) for layer in arguments[place])
        run(provider, Sample(sample.instance, sample.weights, lambda a=arguments, p=place, s=state: _with(a, p, s)))
        used.update(form for layer in state for part in layer for form in part.forms)
    assert "rows in" in used
    assert used & {"table 1", "table 2", "pages, 0"}
    text = str(state_cache.__doc__)
    assert all(f"part[{form}" in text for form in ("table", "pages, 0", "pages, offsets"))


def _with(arguments: tuple[Any, ...], place: int, state: Any) -> tuple[Any, ...]:
    return (*arguments[:place], state, *arguments[place + 1 :])


def test_the_seed_of_a_run_makes_other_samples_and_the_same_again() -> None:
    """The command that repeats a failure sees the very numbers of the run."""

    def seen(seed: int, cases: tuple[str, ...] = ("ops/linear/6x48*/float32",)) -> tuple[str, list[float]]:
        numbers: list[float] = []

        def taken(provider: Any, instance: Any) -> Any:
            kernel = provider.build(instance)

            def wrong(x: torch.Tensor, w: Any) -> torch.Tensor:
                numbers.extend((float(x.sum()), float(w[0].sum())))
                return kernel(x, w) + 1

            return wrong

        selection = Selection(cases=cases, groups=("ops",), seed=seed)
        (verdict,) = run_fault(Fault("sees", ("ops",), kernels={"linear": taken}), selection).failures()
        return verdict.repeat, numbers[:2]

    repeat, first = seen(0)
    assert "--seed" not in repeat
    repeat, other = seen(5)
    assert repeat.endswith("--seed 5")
    case = repeat.split("--case ")[1].split(" ")[0].strip("'")
    assert seen(5, (case,))[1] == other
    assert first == seen(0)[1]
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_a_full_device_is_told_as_such_whoever_asked_for_memory() -> None:
    said = "Tried to allocate 112.00 MiB. GPU 0 has 107.56 MiB free. Of the allocated memory 7.15 GiB is ours"
    device = ReferenceDevice()
    told = guarding.named(torch.OutOfMemoryError(said), [(device, op_table(device))])
    assert isinstance(told, OutOfDeviceMemory)
    assert "reference:0" in str(told)
    assert "107.56 MiB free" in str(told)
    assert "Of the allocated" not in str(told)
    assert "--kv-cache-memory" in (told.hint or "")
