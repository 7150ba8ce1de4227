"""Doctor: every platform one row, each device really used, whatever plugins do."""

from __future__ import annotations

import pytest

from hardpoint_platforms.discovery import discover
from hardpoint_platforms.doctor import ABSENT, FAIL, PASS, Row, diagnose

pytestmark = pytest.mark.reference


def row(name: str = "acme") -> Row:
    rows = {row.platform: row for row in diagnose(discover())}
    assert rows["reference"].status == PASS
    assert rows["cpu"].status == PASS
    return rows[name]


def test_the_built_in_platforms_compute() -> None:
    cpu = row("cpu")
    assert (cpu.kind, cpu.distribution, cpu.interfaces["device"]) == ("host", "hardpoint-cpu", "1.1")
    (device,) = cpu.devices
    assert (device.device, device.status) == ("cpu:0", PASS)
    assert "through 'cpu linear'" in device.computed or "through 'native linear'" in device.computed
    assert 0 < device.memory_free <= device.memory_total
    assert {"threads", "NUMA"} <= {name for name, _, _ in device.tuning}
    assert "through 'reference'" in row("reference").devices[0].computed
    assert (row("sim").status, row("sim").kind) == (PASS, "test")
    assert "computes nothing" in row("sim").devices[0].computed


def test_accelerators_come_first(plugins) -> None:
    plugins.add(name="zeta")
    assert [row.platform for row in diagnose(discover())] == ["zeta", "cpu", "reference", "sim", "strict"]
    assert row("zeta").status == PASS


def test_what_a_platform_holds_for_itself_is_shown(plugins) -> None:
    plugins.add(process_exclusive=["driver-lock", "torch.privateuse1"])
    assert row().exclusive == ("driver-lock", "torch.privateuse1")
    assert row().reason == "one process has one platform that holds driver-lock, torch.privateuse1"
    assert (row("cpu").exclusive, row("cpu").reason) == ((), "")


def test_a_broken_plugin_is_one_row(plugins) -> None:
    plugins.add(code="import no_such_module")
    broken = row()
    assert (broken.status, broken.cause, broken.devices) == (FAIL, "import", ())
    assert "no_such_module" in broken.reason
    assert "pip install" in broken.mend


def test_another_version_is_one_row(plugins) -> None:
    plugins.add(interfaces={"platform": "1.0", "device": "99.0"})
    broken = row()
    assert (broken.status, broken.cause, broken.interfaces["device"]) == (FAIL, "version", "99.0")


def test_no_manifest_is_one_row(plugins) -> None:
    plugins.add(manifest=None)
    assert (row().status, row().cause, row().kind) == (FAIL, "manifest", "?")


def test_no_device_is_absent_with_the_reason(plugins, platform_code) -> None:
    change = ("return ProbeResult((INFO,))", "return ProbeResult((), ('no driver loaded',))")
    plugins.add(code=platform_code(change))
    assert (row().status, row().reason) == (ABSENT, "no driver loaded")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("return Capabilities()", "raise RuntimeError('chip asleep')", "RuntimeError: chip asleep"),
        ("return MemoryInfo(1 << 30, 1 << 30)", "return None", "AttributeError"),
        ("device = FakeDevice()", "raise RuntimeError('in use')", "in use"),
    ],
)
def test_a_device_that_fails_is_said(plugins, platform_code, old, new, said) -> None:
    plugins.add(code=platform_code((old, new)))
    assert row().status == FAIL
    assert row().devices[0].status == FAIL
    assert said in row().reason


@pytest.mark.parametrize("wrong", ["x @ w[0].T * 1.2", "x @ w[0].T * float('nan')"])
def test_a_device_that_computes_wrong_fails(plugins, wrong) -> None:
    plugins.add(
        extra=f"""
        from hardpoint_platforms.ops.provider import OpProvider, Support
        from hardpoint_platforms.versioning import Version

        class Linear(OpProvider):
            name, op, version = "acme linear", "linear", Version(1, 0)
            def supports(self, instance):
                return Support(True)
            def build(self, instance):
                return lambda x, w: {wrong}

        FakeDevice.providers = lambda self: (Linear(),)
        """
    )
    assert row().status == FAIL
    assert "through 'acme linear' is wrong" in row().reason


def test_stdout_stays_clean(plugins, capfd) -> None:
    plugins.add(extra="print('hello')\nFakeDevice.close = lambda self: print('closed')")
    assert row().status == PASS
    out, err = capfd.readouterr()
    assert out == ""
    assert "hello" in err
    assert "closed" in err
