"""Reading one GGUF file: header, metadata and tensor table by struct over a memory map; data stays where it is.

Layout (versions 2 and 3, little-endian):

    magic "GGUF" | version u32 | tensor count u64 | metadata count u64
    metadata: key string, type u32, value                                  string: length u64, UTF-8 bytes
    tensors:  name string, dimensions u32, sizes u64 (fastest first), type u32, offset u64
    padding to the alignment, then tensor data; offsets count from there

Every length in the file is checked against what is left of it before it is used, so that a damaged file costs an error
and never memory. Big arrays (a tokenizer's 262,144 strings) are walked over; `StringArray` decodes them when asked.
"""

from __future__ import annotations

import mmap
import struct
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from hardpoint.errors import WeightsError
from hardpoint.weights.gguf.ggml_types import GGML_TYPES, GgmlType

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_U32 = struct.Struct("<I").unpack_from
_U64 = struct.Struct("<Q").unpack_from
_STRING, _ARRAY, _BOOL = 8, 9, 7
#: Metadata type -> code in `struct` and in `array`.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMENSIONS = 4
_MAX_NESTING = 4
#: Far beyond any real file. Each entry, name or nested array costs many times its bytes in the file as a Python object.
_MAX_PAIRS, _MAX_TENSORS, _MAX_NESTED_ARRAYS = 1 << 16, 1 << 20, 1 << 16
#: Bytes of a key or a tensor's name: what the format allows a key.
_MAX_NAME = (1 << 16) - 1
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the table.

    Attributes:
        shape: slowest dimension first, as numpy and torch have it (the file has it the other way round).
        offset: of the first byte, from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    type: GgmlType
    offset: int
    nbytes: int


class StringArray(Sequence[str]):
    """An array of strings in the file, decoded on access."""

    def __init__(self, buffer: mmap.mmap, start: int, count: int, what: str) -> None:
        self._buffer, self._start, self._count, self._what = buffer, start, count, what
        self._decoded: list[str] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self.to_list()[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_list())

    def to_list(self) -> list[str]:
        """All strings. Raises WeightsError for one that is not UTF-8."""
        if self._decoded is None:
            buffer, at, strings = self._buffer, self._start, []
            try:
                for _ in range(self._count):
                    end = at + 8 + _U64(buffer, at)[0]
                    strings.append(buffer[at + 8 : end].decode())
                    at = end
            except UnicodeDecodeError as error:
                raise WeightsError(f"{self._what}: a string is not UTF-8 ({error.reason}, offset {at})") from None
            self._decoded = strings
        return self._decoded


class GGUFFile:
    """One open file. Raises WeightsError, naming file and place, for anything that is not as the format says.

    Attributes:
        metadata: key to int, float, bool, str, array.array (flags as 0 and 1), StringArray or (nested arrays) list.
        tensors: by name, in the file's order.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "the file is empty"
            raise WeightsError(f"{path}: cannot be opened: {reason}") from None
        try:
            cursor = _Cursor(self._map, path)
            self.version, tensor_count, metadata_count = _read_header(cursor)
            self.metadata: Mapping[str, Any] = _read_metadata(cursor, metadata_count)
            self.tensors: Mapping[str, TensorInfo] = _read_tensors(cursor, tensor_count, self.metadata)
        except BaseException:
            self.close()
            raise

    def data(self, info: TensorInfo) -> npt.NDArray[np.uint8]:
        """uint8 [nbytes], a read-only view of the map."""
        import numpy as np  # here, since the front end opens files too, for their tokenizers, and needs no numpy

        return np.frombuffer(self._map, dtype=np.uint8, count=info.nbytes, offset=info.offset)

    def release(self, info: TensorInfo) -> None:
        """Let the system have the pages of a tensor that was read; reading it again brings them back."""
        if hasattr(mmap, "MADV_DONTNEED"):
            start = info.offset // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, start, info.offset + info.nbytes - start)

    def close(self) -> None:
        """Let go of the map; views that are still alive keep it open until they go."""
        try:
            self._map.close()
        except BufferError:
            return


class _Cursor:
    """A position in the file, with bounds checks."""

    def __init__(self, buffer: mmap.mmap, path: Path) -> None:
        self.buffer, self.path, self.at, self.size = buffer, path, 0, len(buffer)
        self.nested_arrays = 0

    def fail(self, message: str) -> WeightsError:
        return WeightsError(f"{self.path}: {message}", hint="the file is damaged or incomplete: fetch it again")

    def take(self, count: int, what: str) -> int:
        """Pass over `count` bytes; returns where they start."""
        start = self.at
        if count > self.size - start:
            raise self.fail(f"ends inside {what} (offset {start}, {count} bytes needed, file has {self.size})")
        self.at = start + count
        return start

    def u32(self, what: str) -> int:
        return int(_U32(self.buffer, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64(self.buffer, self.take(8, what))[0])

    def string(self, what: str, longest: int | None = None) -> str:
        start = self.at
        length = self.u64(what)
        if longest is not None and longest < length <= self.size - self.at:
            raise self.fail(f"{what} at offset {start} has {length} bytes; names have at most {longest}")
        begin = self.take(length, what)
        try:
            return self.buffer[begin : begin + length].decode()
        except UnicodeDecodeError:
            raise self.fail(f"{what} at offset {start} is not UTF-8") from None


def _read_header(cursor: _Cursor) -> tuple[int, int, int]:
    if cursor.buffer[:4] != b"GGUF":
        raise WeightsError(
            f"{cursor.path}: not a GGUF file (it starts with {bytes(cursor.buffer[:4])!r})",
            hint="older GGML files must be converted to GGUF first",
        )
    cursor.at = 4
    version = cursor.u32("the header")
    if version not in (2, 3):
        if version and version & 0xFFFF == 0:
            raise WeightsError(f"{cursor.path}: a big-endian GGUF file; only little-endian files can be read")
        raise WeightsError(f"{cursor.path}: GGUF version {version}; versions 2 and 3 can be read")
    tensors, pairs = cursor.u64("the header"), cursor.u64("the header")
    left = cursor.size - cursor.at
    # The smallest pair takes 13 bytes (empty key, type, one byte), the smallest tensor entry 24.
    if pairs * 13 + tensors * 24 > left:
        raise cursor.fail(f"claims {pairs} metadata entries and {tensors} tensors, too many for its size")
    if pairs > _MAX_PAIRS or tensors > _MAX_TENSORS:
        raise cursor.fail(
            f"claims {pairs} metadata entries and {tensors} tensors; {_MAX_PAIRS} and {_MAX_TENSORS} are the most"
        )
    return version, tensors, pairs


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for number in range(count):
        key = cursor.string(f"the key of metadata entry {number}", _MAX_NAME)
        if key in metadata:
            raise cursor.fail(f"metadata key {key!r} appears twice")
        what = f"metadata {key!r}"
        metadata[key] = _read_value(cursor, cursor.u32(what), what)
    return metadata


def _read_value(cursor: _Cursor, kind: int, what: str, depth: int = 0) -> Any:
    if kind == _STRING:
        return cursor.string(what)
    if kind == _ARRAY:
        return _read_array(cursor, what, depth)
    if kind not in _SCALARS:
        raise cursor.fail(f"{what} has the unknown value type {kind} (offset {cursor.at - 4})")
    code = struct.Struct(f"<{_SCALARS[kind]}")
    value = code.unpack_from(cursor.buffer, cursor.take(code.size, what))[0]
    return bool(value) if kind == _BOOL else value


def _read_array(cursor: _Cursor, what: str, depth: int) -> Any:
    kind, count = cursor.u32(what), cursor.u64(what)
    if kind in _SCALARS:
        values: array[Any] = array(_SCALARS[kind])
        size = count * values.itemsize
        start = cursor.take(size, what)
        values.frombytes(cursor.buffer[start : start + size])
        if sys.byteorder == "big":
            values.byteswap()
        return values
    if kind not in (_STRING, _ARRAY):
        raise cursor.fail(f"{what} is an array of the unknown value type {kind} (offset {cursor.at - 12})")
    least = 8 if kind == _STRING else 12
    if count * least > cursor.size - cursor.at:
        raise cursor.fail(f"{what} claims {count} elements, more than the file holds (offset {cursor.at - 8})")
    if kind == _STRING:
        start = cursor.at
        cursor.at = _skip_strings(cursor, count, what)
        return StringArray(cursor.buffer, start, count, f"{cursor.path}: {what}")
    cursor.nested_arrays += count
    if depth == _MAX_NESTING or cursor.nested_arrays > _MAX_NESTED_ARRAYS:
        raise cursor.fail(
            f"{what} nests arrays deeper than {_MAX_NESTING}, or has more than {_MAX_NESTED_ARRAYS} inside"
        )
    return [_read_array(cursor, what, depth + 1) for _ in range(count)]


def _skip_strings(cursor: _Cursor, count: int, what: str) -> int:
    buffer, at, last = cursor.buffer, cursor.at, cursor.size - 8
    for index in range(count):
        if at > last:
            raise cursor.fail(f"ends inside element {index} of {what} (offset {at})")
        at += 8 + _U64(buffer, at)[0]
    if at > cursor.size:
        raise cursor.fail(f"ends inside the last element of {what} (offset {at})")
    return at


def _read_tensors(cursor: _Cursor, count: int, metadata: Mapping[str, Any]) -> dict[str, TensorInfo]:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    # True is a Python int as well.
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise cursor.fail(f"metadata 'general.alignment' is {alignment!r}, not a power of two")
    entries: dict[str, TensorInfo] = {}
    for number in range(count):
        info = _read_tensor(cursor, number)
        if info.name in entries:
            raise cursor.fail(f"tensor {info.name!r} appears twice")
        if info.offset % alignment:
            raise cursor.fail(f"tensor {info.name!r} has offset {info.offset}, no multiple of {alignment}")
        entries[info.name] = info
    base = -(-cursor.at // alignment) * alignment
    placed = {
        name: TensorInfo(name, info.shape, info.type, base + info.offset, info.nbytes) for name, info in entries.items()
    }
    _check_places(cursor, placed)
    return placed


def _read_tensor(cursor: _Cursor, number: int) -> TensorInfo:
    """One entry of the table, with the offset as stored."""
    name = cursor.string(f"the name of tensor {number}", _MAX_NAME)
    what = f"tensor {name!r}"
    dimensions = cursor.u32(what)
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise cursor.fail(f"{what} has {dimensions} dimensions (offset {cursor.at - 4})")
    shape = tuple(cursor.u64(what) for _ in range(dimensions))[::-1]
    number_of_type = cursor.u32(what)
    kind = GGML_TYPES.get(number_of_type)
    if kind is None:
        raise WeightsError(
            f"{cursor.path}: {what} has the unknown type number {number_of_type} (offset {cursor.at - 4})",
            hint="the file is damaged, or newer than this release: choose another quantization of the model",
        )
    if 0 in shape:
        raise cursor.fail(f"{what} is empty: its shape is {list(shape)}")
    if shape[-1] % kind.block:
        raise cursor.fail(f"{what} has rows of {shape[-1]} elements, no multiple of {kind.name}'s {kind.block}")
    blocks = shape[-1] // kind.block
    for size in shape[:-1]:
        blocks *= size
    offset = cursor.u64(what)
    return TensorInfo(name, shape, kind, offset, blocks * kind.bytes)


def _check_places(cursor: _Cursor, tensors: Mapping[str, TensorInfo]) -> None:
    before: TensorInfo | None = None
    for info in sorted(tensors.values(), key=lambda info: info.offset):
        end = info.offset + info.nbytes
        if end > cursor.size:
            raise cursor.fail(
                f"tensor {info.name!r} ({info.type.name}, shape {list(info.shape)}) ends at byte {end}, "
                f"but the file has {cursor.size}"
            )
        if before is not None and before.offset + before.nbytes > info.offset:
            raise cursor.fail(f"tensors {before.name!r} and {info.name!r} overlap at offset {info.offset}")
        before = info
