"""The hooks that a plugin distribution may implement, checked by pluggy when it is registered.

A hook only registers something; nothing on the hot path goes through pluggy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from hardpoint_platforms.platform import Platform

#: pluggy's project name: marks of another project are not seen.
PROJECT = "hardpoint"
#: Entry point group in which platforms are announced.
GROUP = "hardpoint.platforms"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def hardpoint_platform() -> Platform | None:
    """The platform of the entry point, or None for "this is not my machine".

    Called once per process, after the manifest was checked. It must not open a device.
    """
