"""The reader against the `gguf` package, and the errors of files that are wrong in one known place."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from hardpoint.errors import WeightsError
from hardpoint.weights.gguf.ggml_types import GGML_TYPES
from hardpoint.weights.gguf.reader import GGUFFile


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    theirs = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {number: (kind.block, kind.bytes) for number, kind in GGML_TYPES.items()} == theirs
    assert {number: kind.name for number, kind in GGML_TYPES.items()} == {
        int(kind): kind.name for kind in gguf.GGML_QUANT_SIZES
    }


def test_metadata_and_tensors_equal_the_gguf_packages(small_gguf: Path) -> None:
    ours, theirs = GGUFFile(small_gguf), gguf.GGUFReader(small_gguf)
    assert ours.metadata["some.text"] == "héllo 🎉"
    assert list(ours.metadata["some.words"]) == ["a", "", "ünï", "🎉"]
    assert ours.metadata["some.words"][2] == "ünï"
    assert len(ours.metadata["some.words"]) == 4
    assert ours.metadata["some.numbers"].tolist() == [1, 2, 3]
    assert [part.tolist() for part in ours.metadata["some.nested"]] == [[1, 2], [3, 4]]
    assert ours.metadata["some.flag"] is True
    assert ours.metadata["llama.block_count"] == 1
    assert ours.metadata["llama.epsilon"] == pytest.approx(1e-5)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert info.offset == tensor.data_offset
        assert bytes(ours.data(info)) == tensor.data.tobytes()


@pytest.mark.real_model
@pytest.mark.parametrize("fixture", ["smollm2_path", "gemma3_path"])
def test_real_files_equal_the_raw_layout(fixture: str, request: pytest.FixtureRequest) -> None:
    file = GGUFFile(request.getfixturevalue(fixture))
    last = max(file.tensors.values(), key=lambda info: info.offset)
    assert last.offset + last.nbytes <= file.path.stat().st_size < last.offset + last.nbytes + 32
    assert len(file.metadata["tokenizer.ggml.tokens"].to_list()) == file.tensors["token_embd.weight"].shape[0]


def _patched(path: Path, at: int, new: bytes) -> Path:
    data = bytearray(path.read_bytes())
    data[at : at + len(new)] = new
    path.write_bytes(data)
    return path


def _place_of(path: Path, name: str) -> int:
    """Where the fields of a tensor's table entry begin, behind its name."""
    return path.read_bytes().index(name.encode()) + len(name)


@pytest.mark.parametrize(
    ("at", "new", "says"),
    [
        (0, b"GGML", "not a GGUF file"),
        (4, struct.pack("<I", 1), "version 1"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 1 << 60), "too many for its size"),
        (16, struct.pack("<Q", 1 << 40), "too many for its size"),
        (24, struct.pack("<Q", 1 << 62), "ends inside the key of metadata entry 0"),
    ],
)
def test_bad_header(small_gguf: Path, at: int, new: bytes, says: str) -> None:
    with pytest.raises(WeightsError, match=says) as caught:
        GGUFFile(_patched(small_gguf, at, new))
    assert str(small_gguf) in str(caught.value)


@pytest.mark.parametrize(
    ("field", "new", "says"),
    [
        (0, struct.pack("<I", 0), "0 dimensions"),
        (0, struct.pack("<I", 1000), "1000 dimensions"),
        (4, struct.pack("<Q", 0), "is empty"),
        (4, struct.pack("<Q", 1 << 50), "ends at byte"),
        (12, struct.pack("<Q", (1 << 64) - 1), "ends at byte"),
        (20, struct.pack("<I", 250), "unknown type number 250"),
        (20, struct.pack("<I", 12), "no multiple of Q4_K's 256"),
        (24, struct.pack("<Q", 1), "no multiple of 32"),
        (24, struct.pack("<Q", 1 << 50), "ends at byte"),
        (24, struct.pack("<Q", 128), "overlap"),
    ],
)
def test_bad_tensor_entry_names_the_tensor(small_gguf: Path, field: int, new: bytes, says: str) -> None:
    at = _place_of(small_gguf, "token_embd.weight") + field
    with pytest.raises(WeightsError, match=says) as caught:
        GGUFFile(_patched(small_gguf, at, new))
    assert "token_embd.weight" in str(caught.value)


def test_the_same_name_twice(small_gguf: Path) -> None:
    whole = small_gguf.read_bytes()
    small_gguf.write_bytes(whole.replace(b"some.words", b"some.twice").replace(b"some.flag", b"some.text"))
    with pytest.raises(WeightsError, match=r"'some.text' appears twice"):
        GGUFFile(small_gguf)
    # Two tensors of one name need equally long names.
    data = bytearray(whole)
    at = data.index(b"blk.0.attn_norm.weight") - 8
    entry = data[at : at + 8 + 22 + 4 + 8 + 4 + 8]
    other = struct.pack("<Q", 17) + b"token_embd.weight"
    end = at + len(entry)
    small_gguf.write_bytes(bytes(data[:at]) + other + bytes(entry[30:]) + bytes(5) + bytes(data[end:]))
    with pytest.raises(WeightsError, match=r"'token_embd.weight' appears twice"):
        GGUFFile(small_gguf)


def test_every_truncation_is_an_error(small_gguf: Path) -> None:
    whole = small_gguf.read_bytes()
    # The file may end in padding behind the last tensor, which nobody needs.
    needed = max(info.offset + info.nbytes for info in GGUFFile(small_gguf).tensors.values())
    for length in [*range(700), *range(700, needed, 97), needed - 1]:
        small_gguf.write_bytes(whole[:length])
        with pytest.raises(WeightsError):
            GGUFFile(small_gguf)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(WeightsError, match="cannot be opened"):
            GGUFFile(path)


def test_no_numpy_is_needed_for_metadata(small_gguf: Path) -> None:
    """The front end reads tokenizers out of such files, and numpy would cost it a tenth of a second."""
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "from pathlib import Path\nfrom hardpoint.weights.gguf.split import open_gguf\n"
        f"print(open_gguf(Path({str(small_gguf)!r})).metadata['some.numbers'].tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[1, 2, 3]\n", done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_released_tensors_hold_no_memory(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("a", np.arange(1 << 20, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "m.gguf")
    view = file.data(file.tensors["a"])
    total = int(view.sum())
    assert resident(file.path) > view.nbytes // 2
    file.release(file.tensors["a"])
    assert resident(file.path) < view.nbytes // 8
    assert int(view.sum()) == total
    file.close()


def resident(path: Path) -> int:
    """Bytes of a file's maps that are in this process's memory."""
    found, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            ours = line.endswith(str(path))
        elif ours and words[0] == "Rss:":
            found += int(words[1]) * 1024
    return found


def test_views_outlive_close(small_gguf: Path) -> None:
    file = GGUFFile(small_gguf)
    view = file.data(file.tensors["blk.0.attn_norm.weight"])
    before = view.copy()
    file.close()
    assert np.array_equal(view, before)
