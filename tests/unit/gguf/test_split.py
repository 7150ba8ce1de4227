"""Case S-39: a model in several files, opened by any of its parts, by its folder; parts missing or foreign."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from hardpoint.errors import WeightsError
from hardpoint.weights.gguf.reader import GGUFFile
from hardpoint.weights.gguf.split import open_gguf

from gguf import GGUFWriter  # isort: skip

TENSORS = {f"blk.{i}.attn_norm.weight": np.full(32, i, dtype=np.float32) for i in range(6)}


def write_parts(folder: Path, count: int = 3, total: int = 6, stem: str = "m") -> list[Path]:
    """The split convention: metadata in part 1 alone, split.no from 0."""
    names, paths = list(TENSORS), []
    for number in range(count):
        path = folder / f"{stem}-{number + 1:05d}-of-{count:05d}.gguf"
        writer = GGUFWriter(path, "llama")
        if number == 0:
            writer.add_string("general.name", "whole")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", total)
        for name in names[number * 6 // count : (number + 1) * 6 // count]:
            writer.add_tensor(name, TENSORS[name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(path)
    return paths


@pytest.mark.parametrize("chosen", ["m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf", "."])
def test_any_part_and_the_folder_open_the_whole(tmp_path: Path, chosen: str) -> None:
    write_parts(tmp_path)
    model = open_gguf(tmp_path / chosen)
    assert model.metadata["general.name"] == "whole"
    assert set(model.tensors) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert np.array_equal(model.data(name).view("<f4"), tensor)
    assert "m-00002-of-00003.gguf" in model.describe("blk.2.attn_norm.weight")
    model.close()


def test_one_of_one(tmp_path: Path) -> None:
    (path,) = write_parts(tmp_path, count=1)
    assert set(open_gguf(path).tensors) == set(TENSORS)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_missing_part_is_named(tmp_path: Path, missing: int) -> None:
    parts = write_parts(tmp_path)
    parts[missing].unlink()
    with pytest.raises(WeightsError, match="missing") as caught:
        open_gguf(parts[(missing + 1) % 3])
    assert parts[missing].name in str(caught.value)


def test_part_of_another_model_is_named(tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(write_parts(other, total=9)[1], parts[1])
    with pytest.raises(WeightsError, match="does not belong") as caught:
        open_gguf(parts[0])
    assert parts[1].name in str(caught.value)


def test_the_same_part_twice(tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    shutil.copy(parts[0], parts[1])
    with pytest.raises(WeightsError, match=r"split\.no"):
        open_gguf(parts[0])


def test_tensors_that_no_part_holds(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"6 tensors, split\.tensors\.count is 7"):
        open_gguf(write_parts(tmp_path, total=7)[0])


def test_renamed_part(tmp_path: Path) -> None:
    part = write_parts(tmp_path)[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(WeightsError, match="one of 3 parts"):
        open_gguf(part)


def test_folders_with_none_and_with_two_models(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no \.gguf file"):
        open_gguf(tmp_path)
    write_parts(tmp_path)
    (tmp_path / "mmproj-f16.gguf").write_bytes(b"the vision half is left alone")
    assert len(open_gguf(tmp_path).tensors) == 6
    write_parts(tmp_path, count=1, stem="second")
    with pytest.raises(WeightsError, match="several models"):
        open_gguf(tmp_path)


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    parts[2].write_bytes(parts[2].read_bytes()[:-64])
    with pytest.raises(WeightsError) as caught:
        open_gguf(parts[0])
    assert parts[2].name in str(caught.value)
    assert GGUFFile(parts[0]).metadata["split.count"] == 3
