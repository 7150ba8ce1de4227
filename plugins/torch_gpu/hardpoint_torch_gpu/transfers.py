"""Host to device and back without waiting: pinned buffers, one copy for many small arrays, events."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from hardpoint_platforms.streams import Readback

#: Tensors that start at multiples of this may be viewed in any dtype.
_ALIGNMENT = 16
#: Bytes of one pinned copy.
_PIECE = 1 << 25


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


class Sender:
    """Sends one host tensor. Owns two pinned buffers, through which large ones go piece by piece.

    From memory that is not pinned the driver copies at a fraction of the bus's speed, on one thread; while one piece is
    under way the next is made ready by all.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ring: list[tuple[torch.Tensor, torch.cuda.Event]] = []

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the device. The host goes on when it may change its own copy."""
        if tensor.device.type != "cpu" or tensor.is_pinned():
            return tensor.to(self._device)
        size = tensor.numel() * tensor.element_size()
        if size <= _PIECE // 8:
            return tensor.pin_memory().to(self._device, non_blocking=True)
        there = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        source, target = tensor, there
        if tensor.is_contiguous() or size > _PIECE * len(tensor):
            source, target = tensor.reshape(-1), there.view(-1)
        rows = max(1, _PIECE * len(source) // size)
        if not self._ring:
            self._ring = [(torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()) for _ in "ab"]
        for number, start in enumerate(range(0, len(source), rows)):
            buffer, sent = self._ring[number % 2]
            sent.synchronize()
            piece = source[start : start + rows]
            ready = buffer[: piece.numel() * piece.element_size()].view(piece.dtype).view(piece.shape)
            ready.copy_(piece)
            target[start : start + rows].copy_(ready, non_blocking=True)
            sent.record()
        return there


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
