"""10,000 damaged files, and the damage that fuzzing meets rarely: each file opens within its bounds or is refused.

A file is written field by field, so that a mutation can go for a count, a length, a type or an offset; bytes and bits
are changed blindly as well. Everything is seeded.
"""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hardpoint.errors import ModelError, WeightsError
from hardpoint.weights.gguf.config import config_of, generation_config_of
from hardpoint.weights.gguf.ggml_types import GGML_TYPES
from hardpoint.weights.gguf.reader import GGUFFile, StringArray
from hardpoint.weights.gguf.split import GGUF, open_gguf

MUTANTS_PER_FILE = 1250
U8, I32, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 5, 4, 6, 7, 8, 9, 10
CODES = {U8: "<B", I32: "<i", U32: "<I", F32: "<f", BOOL: "<B", U64: "<Q"}
#: Architecture -> its keys without the prefix, beyond those of every model.
MODELS: dict[str, dict[str, tuple[int, Any]]] = {
    "llama": {"rope.dimension_count": (U32, 16), "rope.scaling.type": (STRING, "linear")},
    "qwen3moe": dict.fromkeys(("expert_count", "expert_used_count", "expert_feed_forward_length"), (U32, 2)),
    "gemma2": {"attn_logit_softcapping": (F32, 50.0)},
    "gemma3": {"attention.sliding_window": (U32, 8), "attention.sliding_window_pattern": (U32, 6)},
    "phi3": {"rope.dimension_count": (U32, 16), "attention.sliding_window": (U32, 8)},
    "deepseek2": {
        **dict.fromkeys(("attention.kv_lora_rank", "rope.dimension_count", "attention.key_length_mla"), (U32, 4)),
        **dict.fromkeys(("attention.value_length", "expert_count", "expert_used_count"), (U32, 2)),
        "expert_feed_forward_length": (U32, 64),
        "expert_weights_norm": (BOOL, 1),
        "rope.scaling.type": (STRING, "yarn"),
        "rope.scaling.yarn_log_multiplier": (F32, 0.1),
    },
    "qwen2": {"rope.scaling.type": (STRING, "yarn"), "rope.scaling.factor": (F32, 4.0)},
    "gemma": {"attention.key_length": (U32, 16)},
}


@dataclass
class Writer:
    """Bytes of a file, and where its fields lie: (kind, place, bytes)."""

    data: bytearray = field(default_factory=bytearray)
    fields: list[tuple[str, int, int]] = field(default_factory=list)

    def put(self, kind: str, code: str, value: Any) -> None:
        packed = struct.pack(code, value)
        self.fields.append((kind, len(self.data), len(packed)))
        self.data += packed

    def string(self, text: str, kind: str = "text") -> None:
        self.put("length", "<Q", len(text.encode()))
        self.fields.append((kind, len(self.data), len(text.encode())))
        self.data += text.encode()

    def value(self, kind: int, value: Any) -> None:
        """An array is (type of its elements, elements)."""
        if kind == STRING:
            self.string(value)
        elif kind == ARRAY:
            self.put("type", "<I", value[0])
            self.put("count", "<Q", len(value[1]))
            for element in value[1]:
                self.value(value[0], element)
        else:
            self.put("value", CODES[kind], value)

    def pair(self, key: str, kind: int, value: Any) -> None:
        self.string(key, "name")
        self.put("type", "<I", kind)
        self.value(kind, value)

    def header(self, tensors: int, pairs: int) -> None:
        self.data += b"GGUF"
        self.put("version", "<I", 3)
        self.put("count", "<Q", tensors)
        self.put("count", "<Q", pairs)

    def tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> None:
        """`shape` as numpy has it, slowest first."""
        self.string(name, "name")
        self.put("dimensions", "<I", len(shape))
        for size in reversed(shape):
            self.put("size", "<Q", size)
        self.put("tensor type", "<I", kind)
        self.put("offset", "<Q", offset)

    def pad(self, alignment: int) -> None:
        self.data += bytes(-len(self.data) % alignment)


def nbytes(shape: tuple[int, ...], kind: int) -> int:
    count = int(np.prod(shape))
    return count // GGML_TYPES[kind].block * GGML_TYPES[kind].bytes


def whole_file(architecture: str, rng: np.random.Generator) -> Writer:
    """A small valid model file: tensors of every type that there is, in random order, and every kind of metadata."""
    alignment = int(rng.choice([8, 32, 64]))
    pairs: list[tuple[str, int, Any]] = [
        ("general.architecture", STRING, architecture),
        ("general.alignment", U32, alignment),
        ("split.count", U32, 1),
        ("general.sampling.temp", F32, 0.7),
        ("tokenizer.ggml.eos_token_id", U32, 2),
        ("tokenizer.ggml.tokens", ARRAY, (STRING, ["a", "", "ünï", "🎉", "</s>"])),
        ("tokenizer.ggml.scores", ARRAY, (F32, [0.5] * 5)),
        ("nested", ARRAY, (ARRAY, [(I32, [1, 2]), (STRING, ["x", "y"]), (ARRAY, [(U8, [3])])])),
        ("flags", ARRAY, (BOOL, [1, 0, 1])),
    ]
    sizes = {"embedding_length": 64, "block_count": 2, "attention.head_count": 4, "attention.key_length": 16}
    sizes |= {"feed_forward_length": 64, "context_length": 128, "attention.head_count_kv": 2}
    plain: dict[str, tuple[int, Any]] = {key: (U32, size) for key, size in sizes.items()}
    plain["attention.layer_norm_rms_epsilon"] = (F32, 1e-5)
    pairs += [(f"{architecture}.{key}", *value) for key, value in (plain | MODELS[architecture]).items()]
    kinds = [int(kind) for kind in rng.permutation([kind.number for kind in GGML_TYPES.values()])]
    tensors = [("token_embd.weight", (5, 64), 1), ("rope_freqs.weight", (8,), 0)]
    tensors += [(f"blk.{i}.t", (2, GGML_TYPES[kind].block), kind) for i, kind in enumerate(kinds[:12])]
    writer, offset = Writer(), 0
    writer.header(len(tensors), len(pairs))
    for pair in pairs:
        writer.pair(*pair)
    for name, shape, kind in tensors:
        writer.tensor(name, shape, kind, offset)
        offset += -(-nbytes(shape, kind) // alignment) * alignment
    writer.pad(alignment)
    for _, shape, kind in tensors:
        writer.data += rng.integers(0, 256, nbytes(shape, kind), dtype=np.uint8).tobytes()
        writer.pad(alignment)
    return writer


def _edit_field(data: bytearray, fields: list[tuple[str, int, int]], rng: np.random.Generator) -> None:
    """Another number in a field, one near a border; or what another field of the kind holds (then twice there)."""
    kind, at, size = fields[int(rng.integers(len(fields)))]
    alike = [other for other in fields if other[0] == kind and other[2] == size]
    if kind in ("name", "text") or rng.random() < 0.2:
        _, source, _ = alike[int(rng.integers(len(alike)))]
        data[at : at + size] = data[source : source + size]
        return
    old = int.from_bytes(data[at : at + size], "little")
    if kind in ("type", "tensor type", "dimensions") and rng.random() < 0.7:
        new = int(rng.integers(0, 45))
    else:
        borders = (0, 1, 31, 33, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 40, 1 << 59, 1 << 60, 1 << 62, 1 << 63)
        near = (old - 1, old + 1, old * 2, old + 32, old - 32, len(data), len(data) - at, len(data) - at - 8, -1, -32)
        choices = borders + near
        new = choices[int(rng.integers(len(choices)))]
    data[at : at + size] = (new % (1 << 8 * size)).to_bytes(size, "little")


def _edit_bytes(data: bytearray, fields: list[tuple[str, int, int]], rng: np.random.Generator) -> None:
    """Bits flipped, bytes left out, put in or repeated; mostly ahead of the data."""
    at = int(rng.integers(fields[-1][1] + 16 if rng.random() < 0.7 else len(data)))
    kind, size = int(rng.integers(4)), int(rng.integers(1, 17))
    if kind < 2:
        for place in rng.integers(at, min(len(data), at + 64), size // 4 + 1):
            data[place] ^= 1 << int(rng.integers(8))
    elif kind == 2:
        del data[at : at + size]
    else:
        data[at:at] = data[at : at + size]


def mutate(whole: Writer, rng: np.random.Generator) -> bytes:
    """One mutant: mostly a single edit, and sometimes a cut."""
    data = bytearray(whole.data)
    for _ in range(int(rng.choice([1, 2, 3], p=[0.8, 0.1, 0.1]))):
        if rng.random() < 0.7:
            _edit_field(data, whole.fields, rng)
        else:
            _edit_bytes(data, whole.fields, rng)
    if rng.random() < 0.1:
        _, at, size = whole.fields[int(rng.integers(len(whole.fields)))]
        del data[at + size if rng.random() < 0.5 else int(rng.integers(len(data))) :]
    return bytes(data) or b"G"


def _strings(value: Any) -> Iterator[StringArray]:
    if isinstance(value, StringArray):
        yield value
    elif isinstance(value, list):
        for element in value:
            yield from _strings(element)


def read_all(gguf: GGUF, data: bytes) -> None:
    """Read whatever a file offers, and compare the tensors with its bytes."""
    ends = 0
    for info in sorted(gguf.tensors.values(), key=lambda info: info.offset):
        assert info.nbytes * info.type.block == int(np.prod(info.shape, dtype=object)) * info.type.bytes > 0
        assert ends <= info.offset <= info.offset + info.nbytes <= len(data)
        ends = info.offset + info.nbytes
        view = gguf.data(info.name)
        assert view.shape == (info.nbytes,)
        assert not view.flags.writeable
        assert view.tobytes() == data[info.offset : ends]
    for value in gguf.metadata.values():
        for strings in _strings(value):
            assert len(strings.to_list()) == len(strings)
    config_of(gguf)
    generation_config_of(gguf)


def outcome(path: Path, data: bytes) -> str:
    """What became of a file: "read", or the error's text. Other exceptions than the project's own pass through."""
    path.write_bytes(data)
    said = f"{path}: read"
    try:
        gguf = open_gguf(path)
        try:
            read_all(gguf, data)
        finally:
            gguf.close()
    except ModelError as error:
        said = str(error)
    assert str(path) in said
    return said.removeprefix(f"{path}: ")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("architecture", MODELS)
def test_mutants_are_read_within_bounds_or_refused(architecture: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(list(architecture.encode()))
    path, seen = tmp_path / "mutant.gguf", {"read": 0, "refused": 0}
    for number in range(MUTANTS_PER_FILE):
        if number % 125 == 0:
            whole = whole_file(architecture, rng)
            assert outcome(path, bytes(whole.data)) == "read"
        data = mutate(whole, rng)
        measured = number % 25 == 0
        if measured:
            tracemalloc.start()
        try:
            said = outcome(path, data)
            peak = tracemalloc.get_traced_memory()[1] if measured else 0
        finally:
            tracemalloc.stop()
        assert peak < 100 * len(data) + 100_000, "memory in proportion to the file"
        seen["read" if said == "read" else "refused"] += 1
    assert min(seen.values()) > MUTANTS_PER_FILE // 10, seen


def test_the_sizes_of_the_proof() -> None:
    assert len(MODELS) * MUTANTS_PER_FILE == 10_000


def one_tensor(shape: tuple[int, ...] = (2, 32), kind: int = 0, offset: int = 0, name: str = "t") -> Writer:
    """A tensor table of one entry and 256 bytes of data."""
    writer = Writer()
    writer.header(1, 0)
    writer.tensor(name, shape, kind, offset)
    writer.pad(32)
    writer.data += bytes(256)
    return writer


def pairs(*entries: tuple[str, int, Any]) -> Writer:
    writer = Writer()
    writer.header(0, len(entries))
    for entry in entries:
        writer.pair(*entry)
    return writer


def deep(levels: int) -> tuple[int, list[Any]]:
    return (ARRAY, [deep(levels - 1)]) if levels else (U8, [1])


DAMAGE: dict[str, tuple[Callable[[], Writer], str]] = {
    # 2^60 rows of 128 bytes are 2^67 bytes: nothing, in 64 bits. With 4 dimensions even the count of elements wraps.
    "bytes wrap to 0": (lambda: one_tensor((1 << 60, 32)), "ends at byte"),
    "bytes wrap to 128": (lambda: one_tensor(((1 << 57) + 1, 32)), "ends at byte"),
    "elements wrap": (lambda: one_tensor((1 << 16, 1 << 16, 1 << 16, 1 << 16)), "ends at byte"),
    "blocks wrap": (lambda: one_tensor((1 << 58, 1 << 6), kind=2), "ends at byte"),
    "offset wraps": (lambda: one_tensor(offset=(1 << 64) - 32), "ends at byte"),
    "offset past the end": (lambda: one_tensor(offset=256), "ends at byte"),
    "one byte too many": (lambda: one_tensor((65,)), "ends at byte"),
    "five dimensions": (lambda: one_tensor((1, 1, 1, 2, 32)), "5 dimensions"),
    "no row": (lambda: one_tensor((0, 32)), "is empty"),
    "half a block": (lambda: one_tensor((2, 48), kind=2), "no multiple of Q4_0's 32"),
    "a long name": (lambda: one_tensor(name="n" * 65536), "names have at most 65535"),
    "alignment 0": (lambda: pairs(("general.alignment", U32, 0)), "not a power of two"),
    "alignment 24": (lambda: pairs(("general.alignment", U32, 24)), "not a power of two"),
    "alignment True": (lambda: pairs(("general.alignment", BOOL, 1)), "not a power of two"),
    "alignment in words": (lambda: pairs(("general.alignment", STRING, "32")), "not a power of two"),
    "deep nesting": (lambda: pairs(("k", ARRAY, deep(6))), "nests arrays deeper than 4"),
    "many nested arrays": (lambda: pairs(("k", ARRAY, (ARRAY, [(U8, [])] * 65537))), "more than 65536 inside"),
    "a key twice": (lambda: pairs(("k", U8, 1), ("k", U8, 1)), "'k' appears twice"),
    "many pairs": (lambda: pairs(*((f"{i:x}", U8, 1) for i in range(65537))), "are the most"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_in_one_known_place(name: str, tmp_path: Path) -> None:
    make, says = DAMAGE[name]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(make().data)
    with pytest.raises(WeightsError, match=says) as caught:
        GGUFFile(path)
    assert str(path) in str(caught.value)


def test_overlapping_tensors_are_named(tmp_path: Path) -> None:
    for second, good in ((128, False), (256, True), (0, False), (224, False)):
        writer = Writer()
        writer.header(2, 0)
        writer.tensor("first", (2, 32), 0, 0)
        writer.tensor("second", (2, 32), 0, second)
        writer.pad(32)
        writer.data += bytes(512)
        path = tmp_path / f"{second}.gguf"
        path.write_bytes(writer.data)
        if good:
            assert len(GGUFFile(path).tensors) == 2
            continue
        with pytest.raises(WeightsError, match=r"tensors '(first|second)' and '(first|second)' overlap"):
            GGUFFile(path)


@pytest.mark.parametrize(
    ("key", "kind", "value", "says"),
    [
        ("split.count", STRING, "two", "'split.count' is 'two', not a whole number"),
        ("split.count", ARRAY, (U32, [1, 2]), "'split.count' is .*, not a whole number"),
        ("llama.attention.head_count", U32, 0, "'llama.attention.head_count' is 0; 1 to"),
        ("llama.block_count", U32, 4_000_000_000, "'llama.block_count' is 4000000000; 1 to 65536"),
        ("llama.rope.scaling.type", ARRAY, (U32, [1, 2]), "'llama.rope.scaling.type' is .*, not a string"),
        ("llama.attention.layer_norm_rms_epsilon", F32, float("nan"), "is nan, not a number"),
    ],
)
def test_metadata_that_no_model_has(key: str, kind: int, value: Any, says: str, tmp_path: Path) -> None:
    names = ("embedding_length", "attention.head_count", "block_count", "feed_forward_length", "context_length")
    entries: dict[str, tuple[int, Any]] = {f"llama.{name}": (U32, 1) for name in names}
    entries |= {"general.architecture": (STRING, "llama"), "llama.attention.layer_norm_rms_epsilon": (F32, 1e-5)}
    writer = Writer()
    entries[key] = (kind, value)
    writer.header(1, len(entries))
    for name, entry in entries.items():
        writer.pair(name, *entry)
    writer.tensor("token_embd.weight", (2, 32), 0, 0)
    writer.pad(32)
    writer.data += bytes(256)
    path = tmp_path / "odd.gguf"
    path.write_bytes(writer.data)
    with pytest.raises(WeightsError, match=says):
        config_of(open_gguf(path))
