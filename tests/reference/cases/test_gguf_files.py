"""Whole models out of GGUF files: mixed and unusual types, split files, odd vocabularies (cases S-24, S-39, S-41).

The oracle runs on what the `gguf` package dequantizes. Tensors one by one are compared in tests/reference/gguf.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from tiny_gguf import add_sizes, finish, gguf_name
from tiny_models import byte_letters, llama_config, random_weights, save_llama

from hardpoint import SamplingParams
from hardpoint.errors import WeightsError

pytestmark = pytest.mark.reference

Q = gguf.GGMLQuantizationType
CONFIG = llama_config(hidden_size=256, intermediate_size=256, head_dim=64)
#: Where these types keep their fp16 scales, which random bytes would make infinite.
SCALES = {Q.Q4_K: (0, 2), Q.Q5_K: (0, 2), Q.Q6_K: (208,), Q.Q2_K: (80, 82), Q.IQ4_NL: (0,), Q.IQ4_XS: (0,)}


def _permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head as llama.cpp wants them for rope on neighbouring pairs."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _unpermuted(weight: np.ndarray, heads: int) -> np.ndarray:
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _encoded(weight: np.ndarray, kind: Q, seed: int) -> np.ndarray:
    """Rows of `kind`; types that the package cannot quantize to get random blocks of about the same size of values."""
    if kind not in SCALES:
        return quantize(weight, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = weight.shape
    data = np.random.default_rng(seed).integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    for at in SCALES[kind]:
        data[..., at : at + 2] = np.frombuffer(np.float16(1e-4).tobytes(), np.uint8)
    rough = dequantize(data.reshape(rows, -1), kind)
    scale = np.float16(1e-4 * float(np.abs(weight).mean()) / float(np.abs(rough).mean()))
    for at in SCALES[kind]:
        data[..., at : at + 2] = np.frombuffer(scale.tobytes(), np.uint8)
    return data.reshape(rows, -1)


class Files:
    """One model as a GGUF file of the wanted types, and the same as a folder for the oracle."""

    def __init__(self, folder: Path, kinds: Mapping[str, Q], default: Q = Q.F32, **changes: Any) -> None:
        """kinds: by the end of the tensor's GGUF name, without ".weight"."""
        self.folder, self.config = folder, CONFIG | changes
        self.tensors: dict[str, tuple[np.ndarray, Q]] = {}
        plain: dict[str, torch.Tensor] = {}
        for seed, (name, weight) in enumerate(random_weights(self.config).items()):
            values, target = weight.numpy(), gguf_name(name)
            heads = {"attn_q": 4, "attn_k": 2}.get(target.split(".")[-2], 0)
            kind = next((k for end, k in kinds.items() if target.endswith(f"{end}.weight")), default)
            kind = Q.F32 if values.ndim == 1 else kind
            stored = _encoded(_permuted(values, heads) if heads else values, kind, seed)
            self.tensors[target] = (stored, kind)
            back = dequantize(stored, kind).astype(np.float32).reshape(values.shape)
            plain[name] = torch.from_numpy(np.ascontiguousarray(_unpermuted(back, heads) if heads else back))
        self.oracle_folder = save_llama(folder / "oracle", self.config, plain, [])

    def write(self, name: str = "m.gguf") -> Path:
        """The whole in one file."""
        return self._write(self.folder / name, list(self.tensors), {})

    def split(self, count: int, stem: str = "m") -> list[Path]:
        """The same in parts: metadata in the first alone, numbered from 0 inside."""
        names, paths = list(self.tensors), []
        for number in range(count):
            path = self.folder / f"{stem}-{number + 1:05d}-of-{count:05d}.gguf"
            part = names[number * len(names) // count : (number + 1) * len(names) // count]
            paths.append(self._write(path, part, {"no": number, "count": count, "tensors.count": len(names)}))
        return paths

    def _write(self, path: Path, names: list[str], split: dict[str, int]) -> Path:
        writer = gguf.GGUFWriter(path, "llama")
        if not split.get("no"):
            self._describe(writer)
        for key, value in split.items():
            (writer.add_int32 if "." in key else writer.add_uint16)(f"split.{key}", value)
        for name in names:
            data, kind = self.tensors[name]
            writer.add_tensor(name, data, raw_dtype=kind)
        finish(writer)
        return path

    def _describe(self, writer: gguf.GGUFWriter) -> None:
        config = self.config
        add_sizes(writer, config)
        writer.add_rope_freq_base(config["rope_theta"])
        tokens = ["<s>", "</s>", *byte_letters(), "Ġw"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([3, 3, *[1] * 257])
        writer.add_token_merges(["Ġ w"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)


def _check(path: Path, files: Files, device: str, start: Any, oracle: Any) -> None:
    """Greedy ids, and prompt and output log-probabilities against the oracle."""
    driver = start(path, device=device, pages=32)
    truth, ids = oracle(files.oracle_folder), list(range(3, 200, 9))
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=2, prompt_logprobs=0, ignore_eos=True)
    answer = driver.ask_one(ids, params)
    assert answer.token_ids == truth.greedy(ids, 6)
    expected = truth.logprobs(ids + answer.token_ids)
    for position, entry in enumerate([*(answer.prompt_logprobs or [])[1:], *answer.logprobs]):
        for token, item in (entry or {}).items():
            assert abs(item.logprob - expected[position, token].item()) < 1e-3


MIXED: list[tuple[str, dict[str, Q], Q]] = [
    ("f32", {}, Q.F32),
    ("f16", {}, Q.F16),
    ("bf16", {}, Q.BF16),
    ("qkv", {"attn_q": Q.Q4_K, "attn_k": Q.Q6_K, "attn_v": Q.F16}, Q.Q8_0),
    ("gate_up", {"ffn_gate": Q.Q8_0, "ffn_up": Q.Q4_0, "ffn_down": Q.Q5_1}, Q.F32),
    ("ends", {"token_embd": Q.Q6_K, "output": Q.Q8_0}, Q.Q4_1),
    ("iq4", {"0.attn_output": Q.IQ4_NL, "1.attn_output": Q.IQ4_XS}, Q.F16),
    ("ternary", {"1.ffn_down": Q.TQ1_0, "0.ffn_down": Q.TQ2_0}, Q.Q5_0),
    ("k", {"ffn_gate": Q.Q2_K, "ffn_up": Q.Q5_K, "token_embd": Q.Q4_K}, Q.Q6_K),
]


@pytest.mark.parametrize(("kinds", "default"), [case[1:] for case in MIXED], ids=[case[0] for case in MIXED])
def test_mixed_types_equal_the_reference(
    kinds: dict[str, Q], default: Q, device: str, tmp_path: Path, start: Any, oracle: Any
) -> None:
    files = Files(tmp_path, kinds, default)
    _check(files.write(), files, device, start, oracle)


def test_odd_vocabulary(device: str, tmp_path: Path, start: Any, oracle: Any) -> None:
    """509 rows, 259 tokens."""
    files = Files(tmp_path, {"token_embd": Q.Q8_0, "output": Q.Q4_0}, vocab_size=509)
    path = files.write()
    _check(path, files, device, start, oracle)
    driver = start(path, device=device, pages=32)
    params = SamplingParams(temperature=2.0, max_tokens=60, seed=1, logit_bias={505: 3.0}, ignore_eos=True, logprobs=5)
    answer = driver.ask_one([3, 505, 508], params)
    assert any(token >= 259 for token in answer.token_ids)
    assert answer.text == driver.tokenizer.decode([token for token in answer.token_ids if token < 259])


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Files, list[Path]]:
    """A model in three parts."""
    files = Files(tmp_path_factory.mktemp("split"), {"attn_q": Q.Q8_0})
    return files, files.split(3)


@pytest.mark.parametrize("chosen", [0, 1, None])
def test_split_files_equal_the_whole(chosen: int | None, parts: Any, device: str, start: Any, oracle: Any) -> None:
    files, paths = parts
    if chosen is not None:
        _check(paths[chosen], files, device, start, oracle)
        return
    folder = files.folder / "alone"
    folder.mkdir(exist_ok=True)
    for path in paths:
        shutil.copy(path, folder)
    _check(folder, files, device, start, oracle)


def test_one_of_one_part(device: str, tmp_path: Path, start: Any, oracle: Any) -> None:
    files = Files(tmp_path, {}, Q.F16)
    (path,) = files.split(1)
    _check(path, files, device, start, oracle)


def test_parts_missing_or_foreign_stop_the_start(parts: Any, tmp_path: Path, start: Any) -> None:
    _, paths = parts
    first, second, third = (Path(shutil.copy(path, tmp_path)) for path in paths)
    third.unlink()
    with pytest.raises(WeightsError, match=third.name):
        start(first)
    shutil.copy(paths[2], tmp_path)
    other = Files(tmp_path / "other", {}, num_hidden_layers=1).split(3)[1]
    shutil.copy(other, second)
    with pytest.raises(WeightsError, match=second.name):
        start(first)


def test_an_unknown_type_is_named_with_its_tensor(tmp_path: Path, start: Any) -> None:
    path = Files(tmp_path, {"1.ffn_up": Q.Q4_0}).write()
    name = b"blk.1.ffn_up.weight"
    data = bytearray(path.read_bytes())
    at = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    (dimensions,) = struct.unpack_from("<I", data, at)
    struct.pack_into("<I", data, at + 4 + 8 * dimensions, 250)
    path.write_bytes(data)
    with pytest.raises(WeightsError, match=r"blk\.1\.ffn_up\.weight") as caught:
        start(path)
    assert "250" in str(caught.value)
