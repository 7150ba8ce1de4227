"""The exception tree of Hardpoint. Everything that Hardpoint raises on purpose derives from `HardpointError`.

    HardpointError
      PlatformError            anything between the core and a device
        PluginError            a plugin that cannot be used: names it, says why and what to do
        DeviceUnavailable      the plugin works, the device asked for does not
        OutOfDeviceMemory      an allocation did not fit
        DeviceLost             the device stopped answering; its state is gone
        UnsupportedOperation   no provider takes an op instance, or a call the device declared absent

The core derives its own branches from the same root (`hardpoint.errors`).
"""

from __future__ import annotations


class HardpointError(Exception):
    """Root of the tree.

    `hint` is the next thing to do, in one sentence or one command; it is printed on a line of its own.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  -> {self.hint}" if self.hint else self.message


class PlatformError(HardpointError):
    """Anything that went wrong between the core and a device."""


class PluginError(PlatformError):
    """A plugin distribution that cannot be used.

    `plugin` is the entry point's name, `cause` a short word for machine reading:
    import, dependency, version, conflict, validation, manifest, probe, open, run.
    """

    def __init__(self, plugin: str, cause: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(f"platform plugin {plugin!r}: {message}", hint=hint)
        self.plugin = plugin
        self.cause = cause


class DeviceUnavailable(PlatformError):
    """The platform is fine; the device asked for is absent, busy or refused."""


class OutOfDeviceMemory(PlatformError):
    """An allocation did not fit into the device's memory."""


class DeviceLost(PlatformError):
    """The device stopped answering. The engine stops; nothing on the device can be saved."""


class UnsupportedOperation(PlatformError):
    """No provider takes the op instance, or the device declared the call absent."""
