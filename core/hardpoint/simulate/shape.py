"""A model as the cost model sees it: products, attention, what moves, and bytes.

Sizes are of the whole model, not of a chip. Read from the same `ModelSpec` that builds the real
decoder, so every supported architecture can be simulated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hardpoint.models.spec import AttentionSpec, LatentAttentionSpec, LayerSpec, MLPSpec, ModelSpec, MoESpec


@dataclass(frozen=True)
class WeightFormat:
    """How the weights of products are kept.

    Attributes:
        name: for people.
        bits: per weight, scales included. head_bits: of the output projection and the embedding.
        compute: dtype of the multiplication; None for the activations'.
    """

    name: str
    bits: float
    head_bits: float
    compute: str | None = None

    @property
    def weight_only(self) -> bool:
        """Whether weights are widened, or activations narrowed, in the product."""
        return self.bits < 8 or (self.compute is None and self.bits < 16)


#: Scales counted for groups of 128 (int4: 16 + 4 bits each), per row or block otherwise.
WEIGHT_FORMATS: Mapping[str, WeightFormat] = {
    "float32": WeightFormat("float32", 32.0, 32.0),
    "bfloat16": WeightFormat("bfloat16", 16.0, 16.0),
    "float16": WeightFormat("float16", 16.0, 16.0),
    "float8": WeightFormat("float8", 8.0, 16.0, "float8"),
    "int8": WeightFormat("int8", 8.0, 16.0, "int8"),
    "int4": WeightFormat("int4", 4.16, 16.0),
}

DTYPE_BYTES: Mapping[str, float] = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8": 1.0, "int8": 1.0}


@dataclass(frozen=True)
class Product:
    """One matrix product of the model, `count` times.

    Attributes:
        experts, chosen: matrices there are and how many of them a token takes; 1 and 1 for a plain product.
        head: the output projection: only rows that draw a token.
        split: whether chips share it; a router is kept whole by each.
    """

    inputs: int
    outputs: int
    count: int = 1
    experts: int = 1
    chosen: int = 1
    head: bool = False
    split: bool = True


@dataclass(frozen=True)
class AttentionKind:
    """Layers of one kind of attention, `count` of them.

    Attributes:
        window: tokens a query looks back; None for all.
        pair_products: multiply-adds per (query, key) pair, all heads.
        cached: numbers kept per token and layer.
        heads, kv_heads: over which chips can split; latent caches have one head.
        moved: numbers of queries and results per token.
    """

    window: int | None
    count: int
    pair_products: int
    cached: int
    heads: int
    kv_heads: int
    moved: int


@dataclass(frozen=True)
class ModelShape:
    """A model.

    Attributes:
        passes: numbers per token that element-wise ops read and write, all layers.
        split_passes: likewise, of those that chips share.
        launches: ops per step beside products (attention is one per layer).
        collectives: all-reduces per step of many chips.
        embedding: weights of a separate embedding table; 0 where the head is the table.
        layer_windows, layer_cached: per layer.
        context: longest sequence.
    """

    name: str
    vocab_size: int
    hidden: int
    layers: int
    products: tuple[Product, ...]
    attentions: tuple[AttentionKind, ...]
    passes: float
    split_passes: float
    launches: int
    collectives: int
    embedding: int
    layer_windows: tuple[int | None, ...]
    layer_cached: tuple[tuple[int, int], ...]
    context: int

    @property
    def parameters(self) -> int:
        """Weights of products and embedding."""
        return self.embedding + sum(p.inputs * p.outputs * p.count * p.experts for p in self.products)


def shape_of(name: str, spec: ModelSpec, context: int) -> ModelShape:
    """The shape of a decoder that serves sequences of up to `context` tokens."""
    products: Counter[Product] = Counter()
    kinds: Counter[AttentionKind] = Counter()
    split_passes, launches = 0.0, 0
    for layer in spec.layers:
        products.update(_layer_products(layer, spec.hidden_size))
        kinds[_attention(layer.attention)] += 1
        moved, ops = _element_wise(layer)
        split_passes += moved
        launches += ops
    hidden = spec.hidden_size
    head = Product(hidden, spec.vocab_size, head=True)
    return ModelShape(
        name=name,
        vocab_size=spec.vocab_size,
        hidden=hidden,
        layers=len(spec.layers),
        products=(*(_times(product, count) for product, count in products.items()), head),
        attentions=tuple(_counted(kind, count) for kind, count in kinds.items()),
        # two norms with the addition before them: each reads two rows and writes two
        passes=8.0 * hidden * len(spec.layers),
        split_passes=split_passes,
        # embedding, last norm, draw
        launches=launches + 3,
        collectives=2 * len(spec.layers),
        embedding=0 if spec.tied else hidden * spec.vocab_size,
        layer_windows=tuple(layer.attention.window for layer in spec.layers),
        layer_cached=tuple((kind.kv_heads, kind.cached) for kind in (_attention(x.attention) for x in spec.layers)),
        context=context,
    )


def _layer_products(layer: LayerSpec, hidden: int) -> Iterator[Product]:
    attention, ffn = layer.attention, layer.ffn
    if isinstance(attention, AttentionSpec):
        wide = attention.heads * attention.head_dim
        yield Product(hidden, wide + 2 * attention.kv_heads * attention.head_dim)
        yield Product(wide, hidden)
    else:
        queries = attention.heads * (attention.nope_dim + attention.rope_dim)
        if attention.q_lora is None:
            yield Product(hidden, queries)
        else:
            yield Product(hidden, attention.q_lora, split=False)
            yield Product(attention.q_lora, queries)
        yield Product(hidden, attention.latent_dim + attention.rope_dim, split=False)
        yield Product(attention.latent_dim, attention.heads * (attention.nope_dim + attention.v_head_dim))
        yield Product(attention.heads * attention.v_head_dim, hidden)
    if isinstance(ffn, MoESpec):
        yield Product(hidden, ffn.experts, split=False)
        yield Product(hidden, 2 * ffn.intermediate, experts=ffn.experts, chosen=ffn.top_k)
        yield Product(ffn.intermediate, hidden, experts=ffn.experts, chosen=ffn.top_k)
        if ffn.shared is not None:
            yield from _mlp_products(ffn.shared, hidden)
    else:
        yield from _mlp_products(ffn, hidden)


def _mlp_products(mlp: MLPSpec, hidden: int) -> Iterator[Product]:
    yield Product(hidden, 2 * mlp.intermediate)
    yield Product(mlp.intermediate, hidden)


def _attention(spec: AttentionSpec | LatentAttentionSpec) -> AttentionKind:
    if isinstance(spec, AttentionSpec):
        wide = 2 * spec.head_dim
        return AttentionKind(
            spec.window, 1, spec.heads * wide, spec.kv_heads * wide, spec.heads, spec.kv_heads, spec.heads * wide
        )
    cached = spec.latent_dim + spec.rope_dim
    pairs = spec.heads * (2 * spec.latent_dim + spec.rope_dim)
    moved = spec.heads * (cached + spec.latent_dim)
    return AttentionKind(spec.window, 1, pairs, cached, spec.heads, 1, moved)


def _element_wise(layer: LayerSpec) -> tuple[float, int]:
    """Numbers per token that rope and activation move, and ops: rope, attention, two norms, activation, routing."""
    attention, ffn = layer.attention, layer.ffn
    if isinstance(attention, AttentionSpec):
        rotated = 2.0 * (attention.heads + attention.kv_heads) * attention.head_dim
    else:
        rotated = 2.0 * (attention.heads + 1) * attention.rope_dim
    if isinstance(ffn, MoESpec):
        shared = ffn.shared.intermediate if ffn.shared else 0
        return rotated + 3.0 * (ffn.intermediate * ffn.top_k + shared), 6 + (ffn.shared is not None)
    return rotated + 3.0 * ffn.intermediate, 5


def _times(product: Product, count: int) -> Product:
    return Product(product.inputs, product.outputs, count, product.experts, product.chosen, product.head, product.split)


def _counted(kind: AttentionKind, count: int) -> AttentionKind:
    return AttentionKind(kind.window, count, kind.pair_products, kind.cached, kind.heads, kind.kv_heads, kind.moved)
