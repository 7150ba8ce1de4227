"""`--placement "layers[0:15]=cpu,layers[15:30]=acme"`: which device runs which layers of a model."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from dataclasses import dataclass

from hardpoint.errors import ConfigError

_PART = re.compile(r"layers\[(\d*):(\d*)\]=([^,=\s]+)")
_EXAMPLE = "layers[0:15]=cpu,layers[15:30]=acme:1"


@dataclass(frozen=True)
class Part:
    """Layers [start, stop) run on `device` (NAME or NAME:INDEX). None stands for the model's first or last end."""

    start: int | None
    stop: int | None
    device: str

    def __str__(self) -> str:
        start, stop = ("" if end is None else end for end in (self.start, self.stop))
        return f"layers[{start}:{stop}]={self.device}"


@dataclass(frozen=True)
class Placement:
    """Which device runs which layers."""

    parts: tuple[Part, ...]

    @property
    def devices(self) -> tuple[str, ...]:
        """Each once, in the order in which they are named."""
        return tuple(dict.fromkeys(part.device for part in self.parts))


def parse_placement(text: str) -> Placement:
    """Read the value of --placement. Raises ArgumentTypeError that shows the form."""
    parts = []
    for piece in text.split(","):
        match = _PART.fullmatch(piece.strip())
        if match is None:
            raise ArgumentTypeError(f"{piece.strip()!r} does not place layers; write {_EXAMPLE}")
        start, stop = (int(end) if end else None for end in match.group(1, 2))
        parts.append(Part(start, stop, match[3]))
    return Placement(tuple(parts))


def layers_by_device(placement: Placement, count: int) -> tuple[tuple[str, range], ...]:
    """Device and layers of each part, in the order of the layers, for a model of `count` layers.

    Neighbours on one device are one part. Raises ConfigError for a layer that is placed twice, not at all, or that the
    model does not have.
    """
    parts: list[tuple[str, range]] = []
    for place in sorted(placement.parts, key=lambda place: place.start or 0):
        start, stop = place.start or 0, count if place.stop is None else place.stop
        expected = parts[-1][1].stop if parts else 0
        if stop > count or start >= stop:
            raise ConfigError(f"--placement {place}: the model has layers 0 to {count - 1}, the end is not included")
        if start != expected:
            wrong = f"layers[{expected}:{start}] on no device" if start > expected else f"layer {start} on two devices"
            raise ConfigError(f"--placement puts {wrong}", hint="name each layer once, for example " + _EXAMPLE)
        if parts and parts[-1][0] == place.device:
            parts[-1] = (place.device, range(parts[-1][1].start, stop))
        else:
            parts.append((place.device, range(start, stop)))
    end = parts[-1][1].stop if parts else 0
    if end != count:
        raise ConfigError(
            f"--placement puts layers[{end}:{count}] on no device", hint=f"let its last part end in [{end}:]"
        )
    return tuple(parts)
