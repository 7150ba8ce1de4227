"""From --device to a device: priorities, warnings, refusals, options."""

from __future__ import annotations

import pytest

from hardpoint_platforms.discovery import discover
from hardpoint_platforms.errors import DeviceUnavailable, PlatformError, PluginError
from hardpoint_platforms.selection import open_device, parse_request, select

pytestmark = pytest.mark.reference

EMPTY = ("return ProbeResult((INFO,))", "return ProbeResult((), ('no driver loaded',))")
TWO = ("return ProbeResult((INFO,))", 'return ProbeResult((INFO, DeviceInfo("acme", 3, "the other")))')
PROBE = ("return ProbeResult((INFO,))", "raise OSError('bus error')")


@pytest.mark.parametrize(
    ("text", "parts"),
    [("auto", (None, None)), ("cpu", ("cpu", None)), ("acme:0", ("acme", 0)), ("a-b_c.d:12", ("a-b_c.d", 12))],
)
def test_requests_that_can_be_read(text: str, parts: tuple[str | None, int | None]) -> None:
    assert parse_request(text) == parts


@pytest.mark.parametrize("text", ["", ":", "cpu:", "cpu:x", "cpu:-1", "cpu:0:1", "auto:0", "a b", "cpu:99999", "../x"])
def test_requests_that_cannot(text: str) -> None:
    with pytest.raises(DeviceUnavailable, match="auto, NAME or NAME:INDEX"):
        parse_request(text)


def test_auto_takes_the_accelerator_of_highest_priority(plugins) -> None:
    plugins.add(name="slow", priority=1)
    plugins.add(name="quick", priority=2)
    chosen = select("auto", discover())
    assert (chosen.platform, chosen.index, chosen.warnings) == ("quick", 0, ())
    assert "priority" in chosen.reason


def test_auto_takes_the_host_where_there_is_no_accelerator() -> None:
    chosen = select("auto", discover())
    assert (chosen.platform, chosen.reason) == ("cpu", "no accelerator plugin is installed")


def test_auto_never_takes_a_test_platform(plugins) -> None:
    plugins.add(kind="test", priority=1000)
    assert select("auto", discover()).platform == "cpu"
    assert select("acme", discover()).platform == "acme"
    assert select("reference", discover()).platform == "reference"


def test_auto_passes_over_what_stands_in_for_a_device(plugins, platform_code) -> None:
    played = 'return ProbeResult((DeviceInfo("acme", 0, "a chip played by the host", stand_in=True),))'
    plugins.add(code=platform_code(("return ProbeResult((INFO,))", played)))
    chosen = select("auto", discover())
    assert chosen.platform == "cpu"
    (warning,) = chosen.warnings
    assert "acme:0 is a chip played by the host, to be named where it is wanted" in warning
    assert select("acme", discover()).platform == "acme"


def test_an_accelerator_plugin_without_a_device_lets_auto_go_on(plugins, platform_code) -> None:
    plugins.add(code=platform_code(EMPTY))
    chosen = select("auto", discover())
    assert (chosen.platform, chosen.reason) == ("cpu", "no accelerator has a device")
    assert chosen.warnings == ("platform 'acme' (acme-hardpoint 1.2) finds no device: no driver loaded",)
    with pytest.raises(DeviceUnavailable, match="finds no device: no driver loaded"):
        select("acme", discover())


@pytest.mark.parametrize("request_", ["auto", "acme"])
def test_a_probe_that_raises_is_an_error(plugins, platform_code, request_) -> None:
    plugins.add(code=platform_code(PROBE))
    with pytest.raises(PluginError) as caught:
        select(request_, discover())
    assert caught.value.cause == "probe"
    assert "OSError: bus error" in caught.value.message


@pytest.mark.parametrize("result", ["None", "[INFO]", 'ProbeResult((DeviceInfo("other", 0, "x"),))'])
def test_a_probe_that_answers_nonsense_is_an_error(plugins, platform_code, result) -> None:
    plugins.add(code=platform_code(("return ProbeResult((INFO,))", f"return {result}")))
    with pytest.raises(PluginError) as caught:
        select("acme", discover())
    assert caught.value.cause == "probe"


def test_an_unreadable_manifest_may_be_an_accelerator(plugins) -> None:
    plugins.add(manifest="{")
    with pytest.raises(PluginError) as caught:
        select("auto", discover())
    assert "does not fall to the host" in caught.value.message
    assert select("cpu", discover()).platform == "cpu"


def test_every_broken_plugin_is_named(plugins) -> None:
    plugins.add(name="one", interfaces={"platform": "9.0", "device": "9.0"})
    plugins.add(name="two", requires=("no-such-thing",))
    with pytest.raises(PluginError) as caught:
        select("auto", discover())
    assert "one-hardpoint 1.2" in caught.value.message
    assert "two-hardpoint 1.2" in caught.value.message
    plugins.add(name="three")
    chosen = select("auto", discover())
    assert chosen.platform == "three"
    assert len(chosen.warnings) == 2


def test_an_index_is_looked_up(plugins, platform_code) -> None:
    plugins.add(code=platform_code(TWO))
    registry = discover()
    assert select("acme:3", registry).info.name == "the other"
    assert select("acme", registry).index == 0
    with pytest.raises(DeviceUnavailable, match=r"there is no acme:1; 'acme' has acme:0, acme:3"):
        select("acme:1", registry)


SCHEMA = {"properties": {"threads": {"type": "integer", "minimum": 1, "default": 3}}}


def test_options_reach_the_platform_checked(plugins) -> None:
    plugins.add(options_schema=SCHEMA)
    chosen = select("acme", discover())
    assert open_device(chosen).options == {"threads": 3}
    assert open_device(chosen, {"threads": "8"}).options == {"threads": 8}
    with pytest.raises(PlatformError, match="0 is below 1"):
        open_device(chosen, {"threads": 0})
    with pytest.raises(PlatformError, match="no option 'colour'"):
        open_device(chosen, {"colour": "red"})


OPENING = {
    "raises": (("device = FakeDevice()", "raise MemoryError('no room')"), PluginError, "MemoryError: no room"),
    "exits": (("device = FakeDevice()", "raise SystemExit(4)"), PluginError, "SystemExit: 4"),
    "refuses": (
        ("device = FakeDevice()", "from hardpoint_platforms.errors import DeviceUnavailable as D; raise D('busy')"),
        DeviceUnavailable,
        "busy",
    ),
    "no device": (("return device", "return 'device'"), PluginError, "open() returned 'device', not a Device"),
    "abstract": (("    def synchronize(self):", "    def sync(self):"), PluginError, "abstract"),
    "older method": (
        ("    def synchronize(self):", "    def zeros(self, shape): ...\n    def synchronize(self):"),
        PluginError,
        "FakeDevice.zeros(self, shape) cannot take the core's call Device.zeros(self, shape: 'Sequence[int]', dtype",
    ),
}


@pytest.mark.parametrize("variant", OPENING)
def test_what_goes_wrong_while_opening(plugins, platform_code, variant) -> None:
    change, kind, said = OPENING[variant]
    plugins.add(code=platform_code(change))
    chosen = select("acme", discover())
    with pytest.raises(kind) as caught:
        open_device(chosen)
    assert said in caught.value.message


PROVIDER = """
from hardpoint_platforms.ops.provider import OpProvider, Support
from hardpoint_platforms.versioning import Version

class Linear(OpProvider):
    name, op, version = "acme linear", "linear", Version(1, 0)
    def supports(self, instance):
        return Support(True)
    def build(self, instance):
        return lambda x, w: x @ w[0].T

FakeDevice.providers = lambda self: (Linear(),)
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"linear", Version', '"liner", Version', "provider Linear implements 'liner', known ops are: activation"),
        ("Version(1, 0)", "'1.0'", "provider Linear: version must be set, to a Version"),
        ("def build(self, instance)", "def build(self)", "Linear.build(self) cannot take the core's call"),
        ("(Linear(),)", "(3,)", "providers() has 3, not an OpProvider"),
        ("(Linear(),)", "1 / 0", "ZeroDivisionError"),
    ],
)
def test_providers_are_checked(plugins, old, new, said) -> None:
    assert old in PROVIDER
    plugins.add(extra=PROVIDER.replace(old, new))
    with pytest.raises(PluginError) as caught:
        open_device(select("acme", discover()))
    assert said in caught.value.message


def test_a_wrong_signature_is_told_with_its_line(plugins) -> None:
    plugins.add(extra=PROVIDER.replace("def build(self, instance)", "def build(self)"))
    with pytest.raises(PluginError, match=r"it is at \S+acme_hardpoint/platform\.py:\d+ in Linear\.build"):
        open_device(select("acme", discover()))


def test_a_good_provider_passes(plugins) -> None:
    plugins.add(extra=PROVIDER)
    device = open_device(select("acme", discover()))
    assert [provider.name for provider in device.providers()] == ["acme linear"]
