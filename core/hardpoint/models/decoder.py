"""The decoder: a `ModelSpec` turned into bound ops, run over a flat batch of tokens.

    ids -> embedding -> layers -> norm -> hidden        hidden -> logits

The residual stream travels beside the last block's output, so that each addition happens inside the next norm:

    h, r = norm(x), x          first layer
    h, r = add_norm(block output, r)     everywhere else: r is the sum, h its norm

A device may have a norm and what follows it as one op: h is then what that makes of the norm, and it does nothing more.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from hardpoint.errors import WeightsError
from hardpoint.layers import attention as gqa
from hardpoint.layers import mla
from hardpoint.layers.attention import Attention
from hardpoint.layers.embedding import Embedding, Ropes
from hardpoint.layers.logits import Logits
from hardpoint.layers.mla import LatentAttention
from hardpoint.layers.mlp import mlp
from hardpoint.layers.moe import MoE
from hardpoint.layers.norm import AddNorm, FirstNorm, Norm
from hardpoint.layers.op import LayerBuilder, Part, cut
from hardpoint.layers.shard import Shard
from hardpoint.models.base import CausalModel, ParameterBook
from hardpoint.models.grouping import group_layers, part_of
from hardpoint.models.spec import AttentionSpec, LayerSpec, ModelSpec, MoESpec, Names
from hardpoint_platforms.binding import OpTable
from hardpoint_platforms.program import Weights
from hardpoint_platforms.state_cache import LayerCache, State


class DecoderLayer:
    """Attention and a feed-forward block, each behind its norm, and each summed up where ranks compute parts of it."""

    __slots__ = ("_attention", "_ffn", "_post_attention", "_post_ffn", "_pre_attention", "_pre_ffn", "_shard")

    def __init__(
        self,
        build: LayerBuilder,
        number: int,
        spec: LayerSpec,
        model: ModelSpec,
        ropes: Ropes,
        place: tuple[int, int],
    ) -> None:
        names, hidden, norm = model.names, model.hidden_size, model.norm
        path = f"{names.layers}.{number}"
        self._shard = build.shard
        first = FirstNorm if number == 0 else AddNorm
        self._pre_attention = before = first(build, f"{path}.{names.pre_attention}", hidden, norm)
        where = f"{path}.{names.attention}"
        self._attention: Attention | LatentAttention
        if isinstance(spec.attention, AttentionSpec):
            self._attention = Attention(build, where, hidden, spec.attention, names, ropes, place, before)
        else:
            self._attention = LatentAttention(build, where, hidden, spec.attention, names, ropes, place, before)
        self._post_attention = _post(build, path, names.post_attention, model)
        self._pre_ffn = AddNorm(build, f"{path}.{names.pre_ffn}", hidden, norm)
        where = f"{path}.{names.ffn}"
        if isinstance(spec.ffn, MoESpec):
            self._pre_ffn.bind(build)
            self._ffn: Any = MoE(build, where, hidden, spec.ffn, names)
        else:
            self._ffn = mlp(build, where, hidden, spec.ffn, names, self._pre_ffn)
        self._post_ffn = _post(build, path, names.post_ffn, model)

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        plans: tuple[Any, ...],
        state: State,
        weights: Weights,
    ) -> tuple[torch.Tensor, torch.Tensor, State]:
        """`x` is the last block's output, not yet added to `residual`; so is the first of what is returned."""
        x, residual = self._pre_attention.enter(x, residual, weights)
        x, state = self._attention(x, positions, plans, state, weights)
        x = self._shard.sum(x)
        if self._post_attention is not None:
            x = self._post_attention(x, weights)
        x, residual = self._pre_ffn.enter(x, residual, weights)
        x = self._shard.sum(self._ffn(x, weights))
        if self._post_ffn is not None:
            x = self._post_ffn(x, weights)
        return x, residual, state


class Decoder(CausalModel):
    """A causal language model built from a spec, or the layers of one that `layers` names, or a rank's part of them.

    The first part has the embedding, the last one the final norm and the logits.
    """

    def __init__(
        self,
        spec: ModelSpec,
        ops: OpTable,
        book: ParameterBook,
        dtype: torch.dtype,
        max_model_len: int,
        layers: range | None = None,
        shard: Shard | None = None,
    ) -> None:
        """Bind every op. Raises WeightsError for a tensor that is missing or has another shape, ConfigError for a
        number of ranks over which the model cannot be cut."""
        layers, shard = range(len(spec.layers)) if layers is None else layers, shard or Shard()
        self.spec = spec
        self.vocab_size = spec.vocab_size
        self.hidden_size = spec.hidden_size
        self.max_context = max_model_len
        self.takes = 2 if layers.start else 0
        grouping = part_of(
            group_layers(
                [layer.attention.window for layer in spec.layers], [_cache_of(layer, shard) for layer in spec.layers]
            ),
            layers,
        )
        self.cache_groups, self.pool = grouping.groups, grouping.pool
        names = spec.names
        build = LayerBuilder(ops, book, dtype, _prefix(book, names), shard)
        table = _dealt(build.weight(f"{names.embed}.weight", (spec.vocab_size, spec.hidden_size)), shard)
        self._embedding: Embedding | None = None
        if layers.start == 0:
            self._embedding = Embedding(build, names.embed, table, spec.vocab_size, spec.embed_scale)
        ropes = Ropes(build, max_model_len)
        self._layers = tuple(
            DecoderLayer(build, number, spec.layers[number], spec, ropes, grouping.place[number]) for number in layers
        )
        self._norm: AddNorm | None = None
        self._logits: Logits | None = None
        if layers.stop == len(spec.layers):
            self._norm = AddNorm(build, names.final_norm, spec.hidden_size, spec.norm).bind(build)
            head, where = (table, names.embed) if spec.tied else _head(build, book, spec)
            head = head if spec.tied else _dealt(head, shard)
            self._logits = Logits(build, where, head, spec.vocab_size, spec.logit_softcap)

    def advance(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        plans: tuple[Any, ...],
        state: State,
        weights: Weights,
        carried: tuple[torch.Tensor, ...],
    ) -> tuple[tuple[torch.Tensor, ...], State]:
        residual: torch.Tensor | None = None
        if self._embedding is not None:
            x = self._embedding(token_ids, weights)
        else:
            x, residual = carried
        for layer in self._layers:
            x, residual, state = layer(x, residual, positions, plans, state, weights)
        if self._norm is None:
            return (x, cast(torch.Tensor, residual)), state
        x, _ = self._norm.enter(x, residual, weights)
        return (x,), state

    def logits(self, hidden: torch.Tensor, weights: Weights) -> torch.Tensor:
        if self._logits is None:
            raise TypeError("only the last part of a model has logits")
        return self._logits(hidden, weights)


def _cache_of(layer: LayerSpec, shard: Shard) -> LayerCache:
    if isinstance(layer.attention, AttentionSpec):
        return gqa.cache_of(layer.attention, shard)
    return mla.cache_of(layer.attention, shard)


def _dealt(table: Part, shard: Shard) -> Part:
    """A rank's rows of the vocabulary; all of them where they cannot be dealt out evenly."""
    rows = table.spec.shape[0]
    return cut(table, -2, [shard.mine(rows, "tokens")]) if shard.deals(rows) else table


def _post(build: LayerBuilder, path: str, name: str | None, model: ModelSpec) -> Norm | None:
    return None if name is None else Norm(build, f"{path}.{name}", model.hidden_size, model.norm)


def _prefix(book: ParameterBook, names: Names) -> str:
    """The prefix under which this checkpoint keeps the decoder."""
    for prefix in names.prefixes:
        if f"{prefix}{names.embed}.weight" in book.source:
            return prefix
    return names.prefixes[0]


def _head(build: LayerBuilder, book: ParameterBook, spec: ModelSpec) -> tuple[Part, str]:
    """The output projection of a model that does not share it with the embedding."""
    shape = (spec.vocab_size, spec.hidden_size)
    for head in spec.names.heads:
        if f"{head}.weight" in book.source:
            return build.absolute(f"{head}.weight", shape), head
    first = spec.names.heads[0]
    try:
        return build.absolute(f"{first}.weight", shape), first
    except WeightsError as error:
        raise WeightsError(
            f"{error.message}; config.json says 'tie_word_embeddings' false, so the output has a weight of its own",
            hint=error.hint,
        ) from error
