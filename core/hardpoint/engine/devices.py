"""The devices of an engine: opened, closed, and what they all allow together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hardpoint.config.engine import DeviceConfig
from hardpoint.config.placement import layers_by_device
from hardpoint.errors import ConfigError
from hardpoint.scheduler.settings import StepLimits
from hardpoint_platforms.capabilities import BatchLimits
from hardpoint_platforms.communication import TENSOR_AXIS, Mesh
from hardpoint_platforms.device import Device
from hardpoint_platforms.discovery import PlatformRegistry, discover
from hardpoint_platforms.selection import Selection, close_device, open_device, select


@dataclass(frozen=True)
class OpenedDevice:
    """A device, and why it is this one."""

    selection: Selection
    device: Device


@dataclass(frozen=True)
class PlacedLayers:
    """Layers of the model and the device that runs them; `layers` None for the whole model."""

    opened: OpenedDevice
    layers: range | None
    last: bool


class OpenedDevices:
    """Owns the devices that a configuration names, opened once each. A context manager that closes them on an error."""

    def __init__(self, config: DeviceConfig) -> None:
        """Raises HardpointError where a device cannot be had; those opened before are closed then."""
        self._config = config
        names = config.placement.devices if config.placement else (config.device,)
        mesh = Mesh((TENSOR_AXIS,), (config.tensor_parallel_size,))
        if config.placement and mesh.ranks > 1:
            raise ConfigError(
                "--placement and --tensor-parallel-size do not go together",
                hint="cut the model's layers over devices, or each layer over chips",
            )
        registry = discover()
        self._opened: dict[str, OpenedDevice] = {}
        chosen = {name: select(name, registry) for name in names}
        options = _options(config, registry, chosen)
        try:
            for name, selection in chosen.items():
                self._opened[name] = OpenedDevice(selection, open_device(selection, options[name], mesh))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> OpenedDevices:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.close()

    def close(self) -> None:
        """Give all back."""
        for opened in self._opened.values():
            close_device(opened.device)

    @property
    def only(self) -> Device:
        """The device, where there is one. Raises ConfigError where the layers are placed on several."""
        if len(self._opened) > 1:
            raise ConfigError("this takes one device", hint="use --device instead of --placement")
        return next(iter(self._opened.values())).device

    def place(self, layers: int) -> tuple[PlacedLayers, ...]:
        """Which device runs what of a model of so many layers. Raises ConfigError for a placement that does not fit."""
        if self._config.placement is None:
            (only,) = self._opened.values()
            return (PlacedLayers(only, None, True),)
        parts = layers_by_device(self._config.placement, layers)
        return tuple(PlacedLayers(self._opened[name], part, part.stop == layers) for name, part in parts)


def _options(
    config: DeviceConfig, registry: PlatformRegistry, chosen: Mapping[str, Selection]
) -> dict[str, Mapping[str, Any]]:
    """Options by device. One device gets all; of several, each gets those that its manifest knows."""
    short = {"numerics": config.numerics, "threads": config.threads}
    given = {**config.options, **{name: value for name, value in short.items() if value is not None}}
    if len(chosen) == 1:
        return dict.fromkeys(chosen, given)
    known = {name: _known(registry, selection) for name, selection in chosen.items()}
    strange = [option for option in given if not any(option in names for names in known.values())]
    if strange:
        raise ConfigError(
            f"none of the devices {', '.join(chosen)} has an option {strange[0]!r}",
            hint="`hardpoint doctor` lists the options of each platform",
        )
    return {name: {option: value for option, value in given.items() if option in known[name]} for name in chosen}


def _known(registry: PlatformRegistry, selection: Selection) -> frozenset[str]:
    manifest = registry.entry(selection.platform).manifest
    return frozenset(manifest.options if manifest is not None else ())


def common_limits(all_limits: Iterable[BatchLimits]) -> StepLimits:
    """What one step may hold where it runs on every one of these devices."""
    each = tuple(all_limits)
    return StepLimits(
        max_tokens=_least(limits.max_tokens for limits in each),
        max_requests=_least(limits.max_requests for limits in each),
        mixed=all(limits.mixed for limits in each),
        max_prefill_requests=_least(limits.max_prefill_requests for limits in each),
        prefill_chunk_multiple=math.lcm(*(limits.prefill_chunk_multiple for limits in each)),
        token_buckets=_shortest(limits.token_buckets for limits in each),
        request_buckets=_shortest(limits.request_buckets for limits in each),
    )


def _least(values: Iterable[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _shortest(buckets: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """The buckets that end first: a scheduler looks at the largest alone, each device pads to its own."""
    return min((sizes for sizes in buckets if sizes), key=lambda sizes: sizes[-1], default=())
