"""AITER found, inspected and tried, or left aside with the reason: by a stand-in, as no machine here has it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import aiter_stand_in
import pytest
import torch
from hardpoint_rocm import aiter_library, device
from hardpoint_rocm.aiter_library import ATTENTION, BLOCKS, PASSED, ROWS, Aiter, look_up, unlike, unwanted
from hardpoint_rocm.aiter_trial import Trial
from hardpoint_rocm.architectures import ARCHITECTURES
from hardpoint_rocm.platform import RocmPlatform

pytestmark = pytest.mark.reference

MI300X, MI355X, RADEON = 90402, 90500, 110000
F8, F8Z = torch.float8_e4m3fn, torch.float8_e4m3fnuz
ON = {"aiter": "on"}


@pytest.fixture
def aiter(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return aiter_stand_in.install(monkeypatch)


def found(chip: str = "gfx950", trial: Callable[..., str] = lambda name, call, float8: "") -> Aiter:
    return look_up(ARCHITECTURES[chip], trial, F8)


def against(library: Aiter) -> set[str]:
    return {function.against for function in library.functions.values()}


def test_its_published_functions_take_what_is_passed(aiter: ModuleType) -> None:
    library = found()
    assert against(library) == {""}
    assert library.value == "on"
    assert set(library.functions) == set(PASSED)
    assert library.reason.startswith("AITER of unknown version: flash_attn_varlen_func in use; gemm_a8w8_CK in use")
    assert "never run by this plugin's authors" in library.reason


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiter", None)
    monkeypatch.setattr(aiter_library.importlib.util, "find_spec", lambda name: None)
    library = found()
    (why,) = against(library)
    assert why.startswith("AITER is not installed")
    assert library.value == "not used"
    assert unwanted().value == "off"
    assert unwanted().reason.startswith("AITER is not installed")
    with pytest.raises(RuntimeError, match="that was refused is called"):
        library.functions[ROWS].call(XQ=1)


def test_installed_and_not_asked_for(aiter: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiter_library, "version", lambda name: "0.1.20" if name == "amd-aiter" else "")
    told = unwanted()
    assert (told.wanted, told.value) == (False, "off")
    assert told.reason.startswith("AITER 0.1.20 is installed: `--option aiter=on` has")
    assert "`hardpoint conformance --device rocm --option aiter=on` first" in told.reason
    assert aiter_stand_in.CALLS == []


@pytest.mark.parametrize("chip", ["gfx90a", "gfx1100", "gfx1201"])
def test_other_architectures(aiter: ModuleType, chip: str) -> None:
    assert against(found(chip)) == {f"{chip}: AITER's kernels are for gfx942 and gfx950"}


def test_an_installation_that_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> ModuleType:
        raise ImportError("libamdhip64.so.7: cannot open shared object file\nmore of it")

    monkeypatch.setattr(aiter_library.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(aiter_library.importlib, "import_module", broken)
    assert against(found()) == {
        "AITER cannot be imported (ImportError: libamdhip64.so.7: cannot open shared object file)"
    }


def test_a_release_without_a_function(aiter: ModuleType) -> None:
    del aiter.gemm_a8w8_CK
    library = found()
    assert library.functions[ROWS].against == "AITER here has no gemm_a8w8_CK"
    assert library.functions[BLOCKS].against == library.functions[ATTENTION].against == ""
    assert library.value == "on"


def test_a_release_that_lacks_an_argument(aiter: ModuleType) -> None:
    aiter.flash_attn_varlen_func = lambda q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, out: out
    assert found().functions[ATTENTION].against == (
        "AITER's flash_attn_varlen_func takes no argument 'softmax_scale' here (written after 0.1.20.post1)"
    )


def test_a_release_that_wants_one_more(aiter: ModuleType) -> None:
    aiter.gemm_a8w8_CK = lambda XQ, WQ, x_scale, w_scale, dtype, layout: XQ
    assert found().functions[ROWS].against == (
        "AITER's gemm_a8w8_CK wants an argument 'layout' here (written after 0.1.20.post1)"
    )


@pytest.fixture
def registered() -> Iterator[Callable[[str], None]]:
    """Defines an op of torch under AITER's name, as AITER does; its package holds a wrapper that takes anything."""
    library = torch.library.Library("aiter", "FRAGMENT")
    yield library.define
    library._destroy()


def test_a_function_that_is_an_op_of_torch_is_read_from_its_schema(registered: Callable[[str], None]) -> None:
    registered(
        "hp_product(Tensor XQ, Tensor WQ, Tensor x_scale, Tensor w_scale, ScalarType? dtype=None, bool more=False)"
        " -> Tensor"
    )
    registered("hp_other(Tensor XQ, Tensor WQ, Tensor x_scale, Tensor weight_scale, ScalarType? dtype=None) -> Tensor")
    wrapper = lambda *args, **named: None  # noqa: E731
    names = {"hp_product": PASSED[BLOCKS], "hp_other": PASSED[BLOCKS], "hp_none": PASSED[BLOCKS]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aiter_library, "PASSED", names)
        assert unlike("hp_product", wrapper) == ""
        assert "takes no argument 'w_scale' here" in unlike("hp_other", wrapper)
        assert unlike("hp_none", wrapper) == "AITER's hp_none does not say which arguments it takes"


def test_a_function_that_fails_when_tried_is_left_aside(aiter: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    def trial(name: str, call: Any, float8: torch.dtype) -> str:
        if name == ROWS:
            raise RuntimeError("ninja: build stopped\nmore of it")
        return "is wrong by 0.3 of the largest number" if name == BLOCKS else ""

    library = found(trial=trial)
    assert library.functions[ATTENTION].against == ""
    assert library.functions[ROWS].against == (
        "AITER's gemm_a8w8_CK failed when it was tried: RuntimeError: ninja: build stopped"
    )
    assert library.functions[BLOCKS].against == ("AITER's gemm_a8w8_blockscale is wrong by 0.3 of the largest number")
    assert "build stopped; Triton's kernel serves" in caplog.text


@pytest.mark.parametrize("float8", [F8, F8Z])
@pytest.mark.parametrize("name", PASSED)
def test_a_trial_is_passed_by_what_computes_right(aiter: ModuleType, name: str, float8: torch.dtype) -> None:
    assert Trial(torch.device("cpu"))(name, getattr(aiter, name), float8) == ""


def without(name: str, **changed: Any) -> Callable[..., torch.Tensor]:
    """The stand-in's function with some of what it is given replaced."""
    call = getattr(aiter_stand_in, name)
    return lambda **named: call(**{**named, **{key: change(named[key]) for key, change in changed.items()}})


@pytest.mark.parametrize(
    ("name", "call", "said"),
    [
        (ATTENTION, without(ATTENTION, window_size=lambda sides: (-1, -1)), "with a window of 8 is wrong by"),
        (ATTENTION, without(ATTENTION, softmax_scale=lambda scale: 1.1 * scale), "is wrong by"),
        (ATTENTION, lambda **named: named["out"], "is wrong by nan of the largest number"),
        (ROWS, without(ROWS, w_scale=torch.ones_like), "of torch.float8_e4m3fn is wrong by"),
        (ROWS, without(ROWS, x_scale=lambda scale: scale.flip(0)), "of torch.float8_e4m3fn is wrong by"),
        (BLOCKS, without(BLOCKS, w_scale=lambda scale: scale.flip(0)), "is wrong by"),
        (BLOCKS, lambda **named: named["XQ"].float(), "is wrong by inf of the largest number"),
    ],
)
def test_a_trial_finds_what_computes_something_else(name: str, call: Callable[..., Any], said: str) -> None:
    assert Trial(torch.device("cpu"))(name, call, F8).startswith(said)


def test_integers_are_tried_too() -> None:
    def no_integers(**named: Any) -> torch.Tensor:
        right = aiter_stand_in.gemm_a8w8_CK(**named)
        return right if named["XQ"].dtype is F8Z else right * 0

    assert Trial(torch.device("cpu"))(ROWS, no_integers, F8Z).startswith("of torch.int8 is wrong by 1 of")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(("version", "inner"), [(MI300X, "torch linear, fnuz"), (MI355X, "torch linear")])
def test_a_device_asks_it_first(
    aiter: ModuleType, hip: Any, machine: Any, monkeypatch: pytest.MonkeyPatch, version: int, inner: str
) -> None:
    tried: list[tuple[str, torch.dtype]] = []
    monkeypatch.setattr(device, "Trial", lambda at: lambda name, call, float8: tried.append((name, float8)) or "")
    opened = RocmPlatform(machine(version)).open(0, ON)
    first = {}
    for provider in opened.providers():
        first.setdefault(provider.op, provider.name)
    assert first["attention"] == "aiter + triton attention"
    assert first["rotary_attention"] == "aiter + triton attention with rope"
    assert first["linear"] == f"aiter + {inner}"
    assert first["gated_mlp"].startswith("aiter + triton gated mlp")
    assert {kind for _, kind in tried} == {F8Z if version == MI300X else F8}
    told = {choice.name: choice for choice in opened.capabilities().tuning}
    assert told["AITER"].value == "on"
    assert "architecture" in told


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_does_not_where_nobody_wants_it(aiter: ModuleType, hip: Any, machine: Any) -> None:
    opened = RocmPlatform(machine(MI300X)).open(0, {})
    assert not [provider.name for provider in opened.providers() if "aiter" in provider.name]
    told = {choice.name: choice for choice in opened.capabilities().tuning}
    assert told["AITER"].value == "off"
    assert "`--option aiter=on`" in told["AITER"].reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_radeon_says_why_not(aiter: ModuleType, hip: Any, machine: Any) -> None:
    opened = RocmPlatform(machine(RADEON)).open(0, ON)
    told = {choice.name: choice for choice in opened.capabilities().tuning}
    assert (told["AITER"].value, told["AITER"].reason) == (
        "not used",
        "gfx1100: AITER's kernels are for gfx942 and gfx950",
    )
