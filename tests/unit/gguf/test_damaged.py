"""Whatever happens to the bytes of a file, opening it gives a file or a WeightsError, in little memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hardpoint.errors import ModelError, WeightsError
from hardpoint.frontend.gguf_tokenizer import tokenizer_of
from hardpoint.weights.gguf.reader import GGUFFile, StringArray
from hardpoint.weights.gguf.split import GGUF

edits = st.lists(
    st.tuples(
        st.floats(0, 1, exclude_max=True),
        st.sampled_from([b"\x00", b"\xff", b"\x01", b"\x7f\xff", b"\xff" * 8, b"\x08"]),
    ),
    min_size=1,
    max_size=4,
)
quick = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _read_everything(path: Path) -> None:
    file = GGUFFile(path)
    for value in file.metadata.values():
        if isinstance(value, StringArray):
            value.to_list()
    for info in file.tensors.values():
        file.data(info).sum()


@quick
@given(edits=edits, cut=st.floats(0.2, 1))
def test_mutated_files_never_crash(small_gguf: Path, edits: list[tuple[float, bytes]], cut: float) -> None:
    whole = small_gguf.with_name("whole.gguf")
    if not whole.exists():
        whole.write_bytes(small_gguf.read_bytes())
    data = bytearray(whole.read_bytes())
    for where, new in edits:
        at = int(where * len(data))
        data[at : at + len(new)] = new
    small_gguf.write_bytes(data[: max(1, int(cut * len(data)))])
    complaint = str(small_gguf)
    tracemalloc.start()
    try:
        _read_everything(small_gguf)
    except WeightsError as error:
        complaint = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert str(small_gguf) in complaint
    assert peak < 20_000_000


def test_a_file_without_tokenizer_is_one_line(small_gguf: Path) -> None:
    with pytest.raises(ModelError, match="has no tokenizer") as caught:
        tokenizer_of(GGUF([GGUFFile(small_gguf)]))
    assert "--tokenizer FOLDER" in str(caught.value)
