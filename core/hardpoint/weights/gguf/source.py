"""Weights out of a GGUF file, under the names of Hugging Face checkpoints and as those checkpoints have them.

Each name maps to one tensor and what must be undone (`Fix`). The work is done on the packed parts: a QuantTensor whose
rows are put back into order is still quantized. Stacked experts come out one by one, as checkpoints name them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from hardpoint.errors import WeightsError
from hardpoint.weights.gguf.config import Metadata
from hardpoint.weights.gguf.names import CONFIG_TENSORS, GLOBAL_NAMES, Fix, fix_of
from hardpoint.weights.gguf.quants import PLAIN_DTYPES, convert, scheme_of
from hardpoint.weights.gguf.split import GGUF
from hardpoint.weights.source import WeightSource
from hardpoint_platforms.ops.contract import Weight, WeightSpec
from hardpoint_platforms.quant import QuantTensor

_LAYER = re.compile(r"blk\.(\d+)\.(.+?)(\.weight|\.bias)?$")
_SUFFIX = re.compile(r"\.(weight|bias)$")
#: DeepSeek files since 2025 keep the halves of kv_b apart, the key half transposed for attention over the latent.
_SPLIT_KV = ("attn_k_b", "attn_v_b")


@dataclass(frozen=True)
class _Entry:
    """Where one checkpoint weight lies: a tensor, or expert `expert` of a stacked one, or the two halves of kv_b."""

    tensor: str
    fix: Fix = Fix.NONE
    expert: int | None = None
    value_half: str | None = None


class GGUFSource(WeightSource):
    """Weights of an opened file. The file stays open until `close`."""

    def __init__(self, gguf: GGUF) -> None:
        """Raises UnsupportedArchitecture, or WeightsError for a tensor of a type that cannot be a weight."""
        self._gguf = gguf
        self._meta = Metadata(gguf)
        self._entries = dict(self._map())
        for entry in self._entries.values():
            kind = gguf.tensors[entry.tensor].type
            if not kind.usable:
                raise WeightsError(
                    f"{gguf.describe(entry.tensor)}: {kind.name} cannot be read as a weight",
                    hint="choose another quantization of the model",
                )

    def names(self) -> Iterable[str]:
        return self._entries.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def spec(self, name: str) -> WeightSpec:
        entry = self._entry(name)
        info = self._gguf.tensors[entry.tensor]
        if entry.value_half is not None:
            other = self._gguf.tensors[entry.value_half].shape
            if len(info.shape) != 3 or len(other) != 3:
                raise WeightsError(
                    f"{self.describe(name)}: does not fit {entry.value_half!r}: both have three dimensions"
                )
            heads, latent, nope = info.shape
            value = other[1]
            return WeightSpec((heads * (nope + value), latent), torch.float32)
        shape = info.shape if entry.expert is None else info.shape[1:]
        if entry.fix is Fix.ROW and len(shape) == 1:
            shape = (1, *shape)
        scheme = scheme_of(info.type) if len(info.shape) > 1 and entry.fix is not Fix.MINUS_ONE else None
        dtype = torch.float32 if entry.fix is Fix.MINUS_ONE else PLAIN_DTYPES.get(info.type.name, torch.float32)
        return WeightSpec(shape, dtype, scheme)

    def load(self, name: str) -> Weight:
        entry = self._entry(name)
        if entry.value_half is not None:
            return self._join_kv(entry.tensor, entry.value_half)
        weight = self._read(entry.tensor, entry.expert)
        if entry.fix is Fix.MINUS_ONE:
            return _plain(weight).to(torch.float32) - 1.0
        if entry.fix is Fix.ROW:
            return _plain(weight).reshape(1, -1)
        if entry.fix in (Fix.UNPERMUTE_Q, Fix.UNPERMUTE_K):
            return self._unpermute(weight, entry)
        return weight

    def describe(self, name: str) -> str:
        entry = self._entry(name)
        part = "" if entry.expert is None else f", expert {entry.expert}"
        return self._gguf.describe(entry.tensor) + part

    def close(self) -> None:
        self._gguf.close()

    def _entry(self, name: str) -> _Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise WeightsError(f"{self._gguf.path}: has no tensor for {name!r}") from None

    def _map(self) -> Iterator[tuple[str, _Entry]]:
        """Checkpoint name and entry of every tensor. One that the architecture does not know keeps its own name."""
        for tensor in self._gguf.tensors:
            layer = _LAYER.match(tensor)
            if tensor in CONFIG_TENSORS:
                continue
            if layer is not None:
                yield from self._map_layer(tensor, layer[1], layer[2], layer[3] or "")
                continue
            base, suffix = _SUFFIX.sub("", tensor), "".join(_SUFFIX.findall(tensor))
            known = GLOBAL_NAMES.get(base)
            if known is None:
                yield tensor, _Entry(tensor)
            else:
                yield f"{known}.{suffix}", _Entry(tensor, fix_of(self._meta.table, base))

    def _map_layer(self, tensor: str, layer: str, base: str, suffix: str) -> Iterator[tuple[str, _Entry]]:
        table, prefix = self._meta.table, f"model.layers.{layer}."
        if base in table.experts:
            pattern = table.experts[base]
            for expert in range(self._experts(tensor)):
                yield prefix + pattern.format(expert=expert) + suffix, _Entry(tensor, expert=expert)
        elif base == "exp_probs_b":
            yield f"{prefix}mlp.gate.e_score_correction_bias", _Entry(tensor)
        elif base in table.layer:
            yield prefix + table.layer[base] + suffix, _Entry(tensor, fix_of(table, base))
        elif base == _SPLIT_KV[0] and f"blk.{layer}.{_SPLIT_KV[1]}.weight" in self._gguf.tensors:
            value = f"blk.{layer}.{_SPLIT_KV[1]}.weight"
            yield f"{prefix}self_attn.kv_b_proj.weight", _Entry(tensor, value_half=value)
        elif base != _SPLIT_KV[1]:
            yield tensor, _Entry(tensor)

    def _experts(self, tensor: str) -> int:
        shape, wanted = self._gguf.tensors[tensor].shape, self._meta.integer("expert_count")
        if len(shape) != 3 or shape[0] != wanted:
            raise WeightsError(
                f"{self._gguf.describe(tensor)}: has shape {list(shape)}, but the metadata says {wanted} experts"
            )
        return wanted

    def _read(self, tensor: str, expert: int | None) -> Weight:
        info, data = self._gguf.tensors[tensor], self._gguf.data(tensor)
        shape = info.shape
        if expert is not None:
            size, shape = info.nbytes // shape[0], shape[1:]
            data = data[expert * size : (expert + 1) * size]
        weight = convert(info.type, shape, data)
        self._gguf.release(tensor)
        return weight

    def _unpermute(self, weight: Weight, entry: _Entry) -> Weight:
        key = "attention.head_count" if entry.fix is Fix.UNPERMUTE_Q else "attention.head_count_kv"
        heads = self._meta.size(key, self._meta.size("attention.head_count"))
        rows = weight.shape[0]
        if rows % (2 * heads):
            raise WeightsError(f"{self._gguf.describe(entry.tensor)}: {rows} rows do not divide among {heads} heads")
        # Stored rows of a head: 0, d/2, 1, d/2 + 1 ...; wanted: 0, 1, ..., d - 1.
        order = torch.arange(rows).reshape(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)
        return take_rows(weight, order)

    def _join_kv(self, key: str, value: str) -> torch.Tensor:
        """kv_b [heads * (nope + v), latent] of k_b [heads, latent, nope] and v_b [heads, v, latent]."""
        keys, values = _plain(self._read(key, None)), _plain(self._read(value, None))
        if keys.dim() != 3 or values.dim() != 3 or keys.shape[::2] != (values.shape[0], keys.shape[2]):
            raise WeightsError(f"{self._gguf.describe(key)}: does not fit {value!r}")
        joined = torch.cat((keys.transpose(1, 2).float(), values.float()), dim=1)
        return joined.reshape(-1, joined.shape[-1])


def take_rows(weight: Weight, order: torch.Tensor) -> Weight:
    """The rows `order` (int64 [R]) of a weight [rows, ...], quantized as it was. Shape [R, ...]."""
    if isinstance(weight, torch.Tensor):
        return weight[order]
    parts = {
        name: part[order]
        for name in ("values", "scales", "offsets", "super_scales", "super_offsets")
        if (part := getattr(weight, name)) is not None
    }
    return replace(weight, shape=(len(order), *weight.shape[1:]), **parts)


def _plain(weight: Weight) -> torch.Tensor:
    return weight.dequantize() if isinstance(weight, QuantTensor) else weight
