"""GPTQ and AWQ: integers of 4 or 8 bits, packed into words of the transposed weight.

GPTQ's:

    X.qweight  int32 [columns * bits / 32, rows]
    X.scales   float [groups, rows]
    X.qzeros   int32 [groups, rows * bits / 32]; files of the first version store one less
    X.g_idx    int32 [columns]: the group of each column

weight = scale * (integer - zero); symmetric ones have the zero in the middle. Where columns were sorted by activation
(`desc_act`) groups are no runs of columns: such a weight becomes plain when it is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from hardpoint.errors import ModelError
from hardpoint.weights.quantized.method import (
    Layout,
    Method,
    Stored,
    columns_in_groups,
    in_order,
    integer,
    is_in_order,
    plain_if,
)
from hardpoint.weights.quantized.words import (
    awq_codes,
    awq_integers,
    codes_of_columns,
    integers,
    offsets_of,
    one_more,
    packing_of,
)
from hardpoint_platforms.ops.contract import Weight
from hardpoint_platforms.quant import Packing, QuantScheme, QuantTensor

_WORDS = (torch.int32,)
_SCALES = (torch.float16, torch.bfloat16, torch.float32)


class Gptq(Method):
    """`gptq`."""

    ends: Mapping[str, str] = {".qweight": "values", ".scales": "scales", ".qzeros": "zeros", ".g_idx": "order"}
    named = ".weight"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        kept = config.get("checkpoint_format") or "gptq"
        if kept not in ("gptq", "gptq_v2"):
            raise ModelError(
                f"config.json: 'quantization_config' says checkpoint_format is {kept!r}; read are gptq, gptq_v2",
                hint="use a checkpoint that was saved as 'gptq'",
            )
        self._one_less = kept == "gptq"
        self._rules: Mapping[str, Mapping[str, Any]] = config.get("dynamic") or {}
        self._bits("", config)

    def layout(self, stored: Stored) -> Layout:
        config = self._config_of(stored.module)
        bits = self._bits(stored.module, config)
        words, rows = stored.shape("values", _WORDS)
        columns = words * 32 // bits
        group = columns_in_groups(stored, columns, integer(config, "group_size", 128))
        stored.expect("scales", _SCALES, (columns // group, rows))
        symmetric = bool(config.get("sym", True))
        if not symmetric:
            stored.expect("zeros", _WORDS, (columns // group, -(-rows * bits // 32)))
        # The middle of unsigned integers has to be taken off; signed ones have it at zero.
        scheme = QuantScheme(f"gptq{bits}", packing_of(bits), bits, group, offset=bits == 4 or not symmetric)
        return plain_if(Layout((rows, columns), scheme), not is_in_order(stored, columns, group))

    def read(self, stored: Stored, layout: Layout) -> Weight:
        config = self._config_of(stored.module)
        bits = self._bits(stored.module, config)
        scales = stored.load("scales")
        values, offsets = codes_of_columns(stored.load("values"), bits), None
        if not config.get("sym", True):
            words = stored.load("zeros")
            zeros = integers(one_more(words, bits) if self._one_less else words, bits)[:, : layout.shape[0]]
            offsets = offsets_of(scales, zeros if bits == 4 else zeros - 128).t().contiguous()
        elif bits == 4:
            offsets = offsets_of(scales, 8).t().contiguous()
        group = layout.shape[1] // scales.shape[0]
        scheme = layout.scheme or QuantScheme("", packing_of(bits), bits, group, offset=offsets is not None)
        weight = QuantTensor(scheme, layout.shape, values, scales.t().contiguous(), offsets)
        return weight if layout.scheme else in_order(weight, stored.load("order").long())

    def notes(self) -> list[str]:
        return ["desc_act: weights whose columns were sorted become plain"] if self.config.get("desc_act") else []

    def _bits(self, module: str, config: Mapping[str, Any]) -> int:
        bits = integer(config, "bits")
        if bits not in (4, 8):
            where = f" for {module}" if module else ""
            raise ModelError(
                f"config.json: 'quantization_config' says bits is {bits}{where}; read are 4 and 8",
                hint="use another quantization of the model",
            )
        return bits

    def _config_of(self, module: str) -> Mapping[str, Any]:
        """The config with what `dynamic` says about a module: patterns after "+:" or nothing change keys."""
        for pattern, changed in self._rules.items():
            if not pattern.startswith("-:") and re.match(pattern.removeprefix("+:"), module):
                return {**self.config, **changed}
        return self.config


class Awq(Method):
    """`awq`, in the layout of its matrix products: int32 [columns, rows / 8], each word's integers interleaved."""

    ends: Mapping[str, str] = {".qweight": "values", ".scales": "scales", ".qzeros": "zeros"}
    named = ".weight"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        version = str(config.get("version") or config.get("format") or "gemm").lower()
        if version != "gemm":
            raise ModelError(
                f"config.json: 'quantization_config' says 'awq' in version {version!r}; read is 'gemm'",
                hint="use a checkpoint of version 'gemm', the usual one",
            )
        bits = integer(config, "bits", integer(config, "w_bit", 4))
        if bits != 4:
            raise ModelError(f"config.json: 'quantization_config' says 'awq' of {bits} bits; read are 4")
        self._group = integer(config, "group_size", integer(config, "q_group_size", 128))

    def layout(self, stored: Stored) -> Layout:
        columns, words = stored.shape("values", _WORDS)
        group = columns_in_groups(stored, columns, self._group)
        if columns % 2:
            raise stored.wrong(f"{columns} columns cannot be packed two to a byte")
        stored.expect("scales", _SCALES, (columns // group, words * 8))
        stored.expect("zeros", _WORDS, (columns // group, words))
        return Layout((words * 8, columns), QuantScheme("awq4", Packing.UINT4, 4, group, offset=True))

    def read(self, stored: Stored, layout: Layout) -> Weight:
        if layout.scheme is None:
            raise TypeError(f"{stored.name} was announced as plain")
        scales = stored.load("scales")
        offsets = offsets_of(scales, awq_integers(stored.load("zeros")))
        values = awq_codes(stored.load("values"))
        return QuantTensor(layout.scheme, layout.shape, values, scales.t().contiguous(), offsets.t().contiguous())
