"""What a step costs: a roofline per op.

Of an op with `flops` operations and `bytes` moved on one of `tp` chips

    seconds = sqrt((flops / (peak * share))^2 + (bytes / (memory_bandwidth * memory_share))^2) + launch

The root of squares is a roofline with a round corner: far from the corner it is the larger of the two, in the corner
up to 1.4 times that. Measured products keep to it better than to the sharp corner (docs/experiments.md, Simulator).

A step of T tokens, of which S rows draw a token, over requests with q new and c cached tokens each. a: bytes of an
activation, w: bytes of a weight, k: bytes of a cached number.

    product    flops = 2 T in out / tp                     bytes = w in out / tp + T a (in + out / tp)
    head       the same with S rows
    experts    flops = 2 T chosen in out / tp              bytes = w in out D / tp + T chosen a (in + out / tp)
               D = E (1 - (1 - chosen / E)^T), the distinct experts of T tokens that choose evenly
    attention  pairs = sum over new positions p of min(p + 1, window);  read = sum of min(c + q, window + q - 1)
               flops = 2 pairs pair_products / tp          bytes = k cached (read + T) / tp' + T a moved / tp
               tp' = min(tp, kv heads): a head of keys is never cut, chips beyond keep copies
    norms ...  flops = 0                                   bytes = T a (passes + split_passes / tp), one launch per op
    all-reduce seconds = link_start + 2 (tp - 1) / tp * T a hidden / (link_bandwidth * link_share), two per layer
    gather     of logits, likewise with (tp - 1) / tp * S vocabulary * 4 bytes, once

The products run in `compute` of the weight format, or the activations' dtype. The roofline model is that of Williams,
Waterman and Patterson (CACM 52(4), 2009), the all-reduce that of a ring.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import hypot

import numpy as np
import numpy.typing as npt

from hardpoint.errors import ConfigError
from hardpoint.scheduler.plan import Int32s
from hardpoint.simulate.hardware import Hardware
from hardpoint.simulate.shape import DTYPE_BYTES, ModelShape, WeightFormat

Int64s = npt.NDArray[np.int64]
#: Per window of the cost model: (query, key) pairs and tokens read.
Attended = tuple[tuple[int, int], ...]


class StepCost(ABC):
    """Seconds of a step on the device.

    Attributes:
        windows: for which `attended` is counted.
    """

    windows: tuple[int | None, ...]

    @property
    def least(self) -> float:
        """Seconds that no step is shorter than; 0 where nothing is known."""
        return 0.0

    @abstractmethod
    def seconds(self, tokens: int, samples: int, attended: Attended) -> float:
        """Of a step with `tokens` tokens, `samples` rows that draw, and per window the pairs and the tokens read."""

    def attended(self, query: Int32s, computed: Int32s) -> Attended:
        """Per window, of requests with `query` new and `computed` cached tokens: int32 [R] each."""
        new, cached = query.astype(np.int64), computed.astype(np.int64)
        return tuple(_attended(new, cached + new, window) for window in self.windows)


def _attended(new: Int64s, end: Int64s, window: int | None) -> tuple[int, int]:
    if window is None:
        return int((_reach(end) - _reach(end - new)).sum()), int(end.sum())
    pairs = _reach(end, window) - _reach(end - new, window)
    return int(pairs.sum()), int(np.minimum(end, window + new - 1).sum())


def _reach(end: Int64s, window: int | None = None) -> Int64s:
    """Sum over positions 0 .. end - 1 of the keys that each reaches."""
    inside = end if window is None else np.minimum(end, window)
    reached: Int64s = inside * (inside + 1) // 2
    return reached if window is None else reached + (end - inside) * window


@dataclass(frozen=True)
class _Attention:
    """Seconds per pair, per token read and per new token of all layers of one kind, on one chip."""

    window: int
    pair: float
    read: float
    token: float


class RooflineCost(StepCost):
    """See the module. Raises ConfigError where `tp` chips cannot share the model."""

    def __init__(
        self,
        shape: ModelShape,
        weights: WeightFormat,
        hardware: Hardware,
        *,
        tp: int = 1,
        activations: str = "bfloat16",
        kv_dtype: str = "bfloat16",
    ) -> None:
        heads = {kind.heads for kind in shape.attentions}
        bad = sorted(count for count in heads if count % tp)
        if tp < 1 or bad:
            raise ConfigError(f"--tp {tp} does not divide the {bad[0] if bad else max(heads)} heads of {shape.name}")
        self._shape, self._weights, self._hardware, self._tp = shape, weights, hardware, tp
        self._item = DTYPE_BYTES[activations]
        compute = weights.compute or activations
        if weights.weight_only and hardware.weight_only_peak:
            compute = hardware.weight_only_peak
        self._flops = hardware.operations(compute) * hardware.compute_share
        self._bytes = hardware.memory_bandwidth * hardware.memory_share
        self._links = hardware.link_bandwidth * hardware.link_share
        self.windows = tuple(dict.fromkeys(kind.window for kind in shape.attentions))
        flops = hardware.operations(activations) * hardware.attention_share
        self._attentions = tuple(
            _Attention(
                self.windows.index(kind.window),
                kind.count * 2.0 * kind.pair_products / tp / flops,
                kind.count * kind.cached * DTYPE_BYTES[kv_dtype] / min(tp, kind.kv_heads) / self._bytes,
                kind.count * kind.moved * self._item / tp / self._bytes,
            )
            for kind in shape.attentions
        )
        self._known: dict[tuple[int, int], float] = {}

    @property
    def weight_bytes(self) -> float:
        """Bytes of weights on one chip."""
        shape, body, head = self._shape, self._weights.bits / 8.0, self._weights.head_bits / 8.0
        total = shape.embedding * head / self._tp
        for product in shape.products:
            size = product.inputs * product.outputs * product.count * product.experts
            total += size * (head if product.head else body) / (self._tp if product.split else 1)
        return total

    @property
    def least(self) -> float:
        # every term grows with tokens, rows and what is read; a chunk of a prompt may draw nothing
        return self.seconds(1, 0, tuple((1, 1) for _ in self.windows))

    def seconds(self, tokens: int, samples: int, attended: Attended) -> float:
        fixed = self._known.get((tokens, samples))
        if fixed is None:
            fixed = self._known[tokens, samples] = sum(self.parts(tokens, samples).values())
        total = fixed
        for kind in self._attentions:
            pairs, read = attended[kind.window]
            total += hypot(pairs * kind.pair, (read + tokens) * kind.read + tokens * kind.token)
        return total

    def parts(self, tokens: int, samples: int) -> dict[str, float]:
        """Seconds of all but attention: products, passes, links, launches."""
        shape, hardware, tp = self._shape, self._hardware, self._tp
        products = sum(self._product_seconds(index, tokens, samples) for index in range(len(shape.products)))
        moved = tokens * self._item * (shape.passes + shape.split_passes / tp) + samples * shape.vocab_size * 4.0
        launches = shape.launches + sum(product.count for product in shape.products)
        links = 0.0
        if tp > 1:
            share = (tp - 1) / tp
            links = shape.collectives * (
                hardware.link_start + 2.0 * share * tokens * shape.hidden * self._item / self._links
            )
            links += hardware.link_start + share * samples * shape.vocab_size * 4.0 / self._links
        return {
            "products": products,
            "passes": moved / self._bytes,
            "links": links,
            "launches": launches * hardware.launch,
        }

    def _product_seconds(self, index: int, tokens: int, samples: int) -> float:
        product = self._shape.products[index]
        rows = (samples if product.head else tokens) * product.chosen
        tp = self._tp if product.split else 1
        matrices: float = product.experts
        if product.experts > 1:
            matrices = product.experts * (1.0 - (1.0 - product.chosen / product.experts) ** tokens)
        bits = self._weights.head_bits if product.head else self._weights.bits
        weights = matrices * product.inputs * product.outputs * bits / 8.0 / tp
        moved = rows * self._item * (product.inputs + product.outputs / tp)
        flops = 2.0 * rows * product.inputs * product.outputs / tp
        return product.count * hypot(flops / self._flops, (weights + moved) / self._bytes)
