"""Damaged, incomplete and cluttered checkpoints (case S-26): an error with file and tensor, or the same logits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hardpoint.errors import ConfigError, WeightsError

pytestmark = pytest.mark.reference

INDEX = "model.safetensors.index.json"
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def saved(make_model: Any) -> tuple[torch.nn.Module, Path]:
    """A llama in several shards."""
    model, folder = make_model("llama", shard="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return model, folder


@pytest.fixture
def folder(saved: Any, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(saved[1], tmp_path / "model"))


def _shard_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def _rewrite(folder: Path, name: str, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of the shard that holds `name`; the index stays."""
    path = _shard_of(folder, name)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def _drop_from_index(folder: Path, name: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"][name]
    (folder / INDEX).write_text(json.dumps(index))


def _check(saved: Any, served: Any, reference_logits: Any, prompts: Any) -> None:
    sequence = served.sequence(prompts[0])
    served.step([(sequence, len(prompts[0]))])
    wanted = reference_logits(saved[0], prompts[0])
    assert (sequence.logits[0] - wanted).abs().max() < 1e-3


def test_shards_equal_the_oracle(saved: Any, folder: Path, serve: Any, reference_logits: Any, prompts: Any) -> None:
    _check(saved, serve(folder), reference_logits, prompts)


def test_only_files_of_the_index_are_read(
    saved: Any, folder: Path, serve: Any, reference_logits: Any, prompts: Any
) -> None:
    (folder / "model.safetensors").write_bytes(b"garbage")
    (folder / "model-00009-of-00009.safetensors").write_bytes(b"garbage")
    (folder / "pytorch_model.bin").write_bytes(b"garbage")
    _check(saved, serve(folder), reference_logits, prompts)


def test_extras_and_empty_tensors_are_left_alone_and_told(
    saved: Any, folder: Path, serve: Any, reference_logits: Any, prompts: Any
) -> None:
    extras = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "foo.bar": torch.ones(2, dtype=torch.int8),
        "model.empty": torch.zeros(0, 64),
    }
    _rewrite(folder, DOWN, lambda tensors: tensors.update(extras))
    served = serve(folder)
    assert served.book.unused() == sorted(extras)
    _check(saved, served, reference_logits, prompts)


def test_a_bias_that_the_config_denies_is_an_extra(folder: Path, serve: Any) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    _rewrite(folder, DOWN, lambda tensors: tensors.update({name: torch.ones(64)}))
    config = json.loads((folder / "config.json").read_text())
    assert serve(folder, config=config | {"attention_bias": False}).book.unused() == [name]
    del config["attention_bias"]
    assert serve(folder, config=config).book.unused() == []


def test_missing_tensor(folder: Path, serve: Any) -> None:
    _rewrite(folder, DOWN, lambda tensors: tensors.pop(DOWN))
    _drop_from_index(folder, DOWN)
    with pytest.raises(WeightsError, match=DOWN):
        serve(folder)


def test_index_names_a_shard_that_lacks_the_tensor(folder: Path, serve: Any) -> None:
    shard = _shard_of(folder, DOWN)
    _rewrite(folder, DOWN, lambda tensors: tensors.pop(DOWN))
    with pytest.raises(WeightsError, match=f"{shard.name}.*{DOWN}"):
        serve(folder)


def test_missing_shard(folder: Path, serve: Any) -> None:
    shard = _shard_of(folder, DOWN)
    shard.unlink()
    with pytest.raises(WeightsError, match=f"{shard.name}.*missing"):
        serve(folder)


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.999])
def test_truncated_file(folder: Path, serve: Any, kept: float) -> None:
    shard = _shard_of(folder, DOWN)
    data = shard.read_bytes()
    shard.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(WeightsError, match=shard.name):
        serve(folder)


@pytest.mark.parametrize(
    ("tensor", "wanted"),
    [
        (torch.zeros(64, 95), r"\[64, 95\].*\[64, 96\]"),
        (torch.zeros(96, 64), r"\[96, 64\].*\[64, 96\]"),
        (torch.zeros(0, 96), r"\[0, 96\].*\[64, 96\]"),
        (torch.zeros(64, 96, dtype=torch.int8), "int8"),
        (torch.zeros(64, 96, dtype=torch.float8_e4m3fn), "F8_E4M3"),
    ],
)
def test_wrong_shape_or_dtype(folder: Path, serve: Any, tensor: torch.Tensor, wanted: str) -> None:
    shard = _shard_of(folder, DOWN)
    _rewrite(folder, DOWN, lambda tensors: tensors.update({DOWN: tensor}))
    with pytest.raises(WeightsError, match=f"{shard.name}.*{DOWN}.*{wanted}"):
        serve(folder)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"weight_map": {}}', '{"weight_map": {"a": "../secret.safetensors"}}', "\xff"]
)
def test_bad_index(folder: Path, serve: Any, text: str) -> None:
    (folder / INDEX).write_bytes(text.encode("latin-1"))
    with pytest.raises(WeightsError, match=INDEX):
        serve(folder)


def test_folders_without_usable_weights_say_what_lies_there(folder: Path, serve: Any) -> None:
    (folder / INDEX).unlink()
    with pytest.raises(WeightsError, match="says what lies where"):
        serve(folder)
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(WeightsError, match=r"pickled weights \(pytorch_model.bin\)"):
        serve(folder)


def test_tied_config_needs_no_head_and_untied_does(
    make_model: Any, serve: Any, reference_logits: Any, prompts: Any
) -> None:
    saved = make_model("llama", tie_word_embeddings=True)
    served = serve(saved[1])
    assert "lm_head.weight" not in served.source
    _check(saved, served, reference_logits, prompts)
    embedding, *_, head = served.weights
    assert embedding[0].data_ptr() == head[0].data_ptr()
    config = json.loads((saved[1] / "config.json").read_text()) | {"tie_word_embeddings": False}
    with pytest.raises(WeightsError, match=r"lm_head\.weight.*tie_word_embeddings"):
        serve(saved[1], config=config)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_checkpoints_serve_in_fp32(
    dtype: torch.dtype, make_model: Any, serve: Any, reference_logits: Any, prompts: Any
) -> None:
    model, folder = make_model("qwen2", dtype=dtype)
    _check((model.float(), folder), serve(folder), reference_logits, prompts)


def test_one_tensor_of_another_dtype_is_cast(
    saved: Any, folder: Path, serve: Any, reference_logits: Any, prompts: Any
) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    _rewrite(folder, name, lambda tensors: tensors.update({name: tensors[name].double()}))
    _check(saved, serve(folder), reference_logits, prompts)


def test_max_model_len_beyond_the_models_own(folder: Path, serve: Any) -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len 65.*1\.\.64"):
        serve(folder, 65)
    assert serve(folder, 33).model.max_context == 33
    assert serve(folder).model.max_context == 64


def test_codes_without_scales_are_refused(folder: Path, serve: Any) -> None:
    """What a quantized checkpoint holds must not be taken for weights; how it is read: quantized/test_formats.py."""
    _rewrite(folder, DOWN, lambda tensors: tensors.update({DOWN: torch.ones(64, 96, dtype=torch.int8)}))
    with pytest.raises(WeightsError, match=f"{DOWN}.*int8") as caught:
        serve(folder)
    assert "quantization_config" in (caught.value.hint or "")
