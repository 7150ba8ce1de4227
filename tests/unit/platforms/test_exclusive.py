"""Things of which one process can hold one: two platforms that need the same one are not open together."""

from __future__ import annotations

import gc

import pytest

from hardpoint_platforms.discovery import discover
from hardpoint_platforms.errors import DeviceUnavailable
from hardpoint_platforms.selection import close_device, open_device, select

pytestmark = pytest.mark.reference

TOKEN = ["torch.privateuse1"]


@pytest.fixture
def two(plugins):
    plugins.add(name="one", process_exclusive=TOKEN)
    plugins.add(name="other", process_exclusive=["driver-lock", *TOKEN])
    return discover()


def test_the_second_is_refused_and_told_who_holds_it(two) -> None:
    device = open_device(select("one", two))
    with pytest.raises(
        DeviceUnavailable, match=r"'other' \(other-hardpoint\) needs 'torch.privateuse1'.*'one'"
    ) as seen:
        open_device(select("other", two))
    assert "give the one device back with close_device() first" in seen.value.hint
    device.close()
    with pytest.raises(DeviceUnavailable):  # as the hint says
        open_device(select("other", two))
    close_device(device)
    close_device(open_device(select("other", two)))


def test_closing_lets_go(two) -> None:
    close_device(open_device(select("one", two)))
    other = open_device(select("other", two))
    with pytest.raises(DeviceUnavailable, match="'other'"):
        open_device(select("one", two))
    close_device(other)
    close_device(open_device(select("one", two)))


def test_so_does_a_device_that_nobody_has_any_more(two) -> None:
    open_device(select("one", two))
    gc.collect()
    close_device(open_device(select("other", two)))


def test_devices_of_one_platform_share_what_their_plugin_holds(two) -> None:
    first, second = open_device(select("one", two)), open_device(select("one", discover()))
    close_device(first)
    with pytest.raises(DeviceUnavailable):
        open_device(select("other", two))
    close_device(second)
    close_device(open_device(select("other", two)))


def test_a_refused_open_holds_nothing(plugins, platform_code) -> None:
    broken = ("device = FakeDevice()", "raise OSError('no such chip')")
    plugins.add(name="one", code=platform_code(broken), process_exclusive=TOKEN)
    plugins.add(name="other", process_exclusive=TOKEN)
    registry = discover()
    with pytest.raises(Exception, match="no such chip"):
        open_device(select("one", registry))
    close_device(open_device(select("other", registry)))
