"""Host to device and back without waiting: pinned buffers, one copy for many small arrays, events."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from hardpoint_platforms.streams import Readback

#: Tensors that start at multiples of this may be viewed in any dtype.
_ALIGNMENT = 16
#: Larger tensors are copied as they lie: to pin them first would copy them once more.
_PIN_BYTES = 1 << 22


class Uploader:
    """Sends many small host tensors as one copy. Owns the pinned buffers, which come back when their copy is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._busy: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()

    def upload(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The tensors on the device, in order: views of one allocation."""
        places, size = [], 0
        for tensor in tensors:
            places.append(size)
            size += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        buffer = self._buffer(size)
        for place, tensor in zip(places, tensors, strict=True):
            if count := tensor.numel() * tensor.element_size():
                buffer[place : place + count].view(tensor.dtype).copy_(tensor.reshape(-1))
        there = buffer[:size].to(self._device, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._busy.append((event, buffer))
        return tuple(
            there[place : place + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
            for place, tensor in zip(places, tensors, strict=True)
        )

    def _buffer(self, size: int) -> torch.Tensor:
        """A pinned buffer whose last copy has been made, or a new one."""
        if self._busy and self._busy[0][0].query():
            buffer = self._busy.popleft()[1]
            if len(buffer) >= size:
                return buffer
        return torch.empty(max(1 << 16, 1 << (size - 1).bit_length()), dtype=torch.uint8, pin_memory=True)


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """One tensor on the device; small ones do not hold the host up."""
    if tensor.device == device:
        return tensor
    if tensor.device.type == "cpu" and tensor.numel() * tensor.element_size() <= _PIN_BYTES:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class EventReadback(Readback):
    """Copies into pinned memory, and the event behind them."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        host = []
        for tensor in tensors:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copy.copy_(tensor, non_blocking=True)
            host.append(copy)
        super().__init__(tuple(host))
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> tuple[torch.Tensor, ...]:
        self._event.synchronize()
        return super().wait()
