"""Models cut over ranks: each rank in a thread of its own gives the logits of the whole model."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.errors import ConfigError
from hardpoint.layers.shard import Shard, cut_spec, cut_weight, joined
from hardpoint.weights.dummy import DummySource
from hardpoint_platforms.communication import TENSOR_AXIS, Mesh
from hardpoint_platforms.conformance.ranks import free_address
from hardpoint_platforms.ops.contract import WeightSpec
from hardpoint_platforms.quant import Packing, QuantScheme, QuantTensor
from hardpoint_platforms.reference.communication import GlooCommunicator

pytestmark = pytest.mark.reference


class Noted(GlooCommunicator):
    """The default communicator; notes what it was asked for."""

    def __init__(self, mesh: Mesh, rank: int, rendezvous: str) -> None:
        super().__init__(mesh, rank, rendezvous, timeout_seconds=60)
        self.calls: list[str] = []

    def all_reduce(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        self.calls.append("all_reduce")
        return super().all_reduce(x, axis)

    def all_gather(self, x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
        self.calls.append("all_gather")
        return super().all_gather(x, axis, dim)


def ranks_of(serve: Any, count: int, prompts: list[torch.Tensor], whole_experts: bool = False, **how: Any) -> Any:
    """(logits per prompt of each rank, what the first rank called in its last step)."""
    mesh, address = Mesh((TENSOR_AXIS,), (count,)), free_address()

    def run(rank: int) -> tuple[list[torch.Tensor], list[str]]:
        torch.set_num_threads(1)
        communicator = Noted(mesh, rank, address)
        served = serve(shard=Shard(rank, count, whole_experts, communicator), **how)
        sequences = [served.sequence(prompt) for prompt in prompts]
        served.step([(sequence, 9) for sequence in sequences])
        communicator.calls.clear()
        served.step([(sequence, len(sequence.tokens) - 9) for sequence in sequences])
        assert not served.book.unused()
        communicator.barrier()
        communicator.close()
        return [torch.cat(sequence.logits) for sequence in sequences], communicator.calls

    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(run, range(count)))
    return [logits for logits, _ in found], found[0][1]


EVEN = {"num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 132}
CASES = [
    ("llama", 2, False, {}),
    ("llama", 4, False, {"attention_bias": True, "mlp_bias": True}),  # more ranks than key and value heads
    ("gemma3_text", 2, False, {"num_hidden_layers": 6}),
    ("phi3", 2, False, {}),  # q, k, v and gate, up lie in one tensor
    ("qwen3_moe", 2, False, {}),
    ("qwen3_moe", 4, True, {}),
    ("deepseek_v2", 2, False, {"num_key_value_heads": 4}),
    ("deepseek_v2", 4, True, {"num_key_value_heads": 4}),
]


@pytest.mark.parametrize(("family", "count", "whole_experts", "more"), CASES)
def test_ranks_together_are_the_model(
    family: str,
    count: int,
    whole_experts: bool,
    more: dict[str, Any],
    make_model: Callable[..., Any],
    serve: Any,
    reference_logits: Any,
    prompts: list[torch.Tensor],
) -> None:
    model, folder = make_model(family, **{**EVEN, **more})
    found, calls = ranks_of(serve, count, prompts, whole_experts, folder=folder)
    for place, prompt in enumerate(prompts):
        wanted = reference_logits(model, prompt)
        for rank in range(count):
            torch.testing.assert_close(found[rank][place], wanted, atol=2e-4, rtol=1e-3)
            assert torch.equal(found[rank][place].argmax(-1), wanted.argmax(-1))
    layers = model.config.num_hidden_layers
    assert calls.count("all_reduce") == 2 * layers + 1, "two sums per layer, one for the embedding"
    assert calls.count("all_gather") == 1, "the logits"


def test_a_vocabulary_that_cannot_be_dealt_out_is_on_each_rank(
    make_model: Callable[..., Any], serve: Any, reference_logits: Any, prompts: list[torch.Tensor]
) -> None:
    model, folder = make_model("llama", num_hidden_layers=2)
    found, calls = ranks_of(serve, 2, prompts[:1], folder=folder)
    torch.testing.assert_close(found[1][0], reference_logits(model, prompts[0]), atol=2e-4, rtol=1e-3)
    assert calls == ["all_reduce"] * 4


@pytest.mark.parametrize(
    ("config", "count", "told"),
    [
        ({"num_attention_heads": 6, "head_dim": 16}, 4, "6 attention heads"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 16}, 2, "3 key and value heads"),
        ({"intermediate_size": 98}, 4, "98 columns of a feed-forward block"),
    ],
)
def test_what_cannot_be_dealt_out_is_said_before_a_weight_is_read(
    config: dict[str, Any], count: int, told: str, serve: Any
) -> None:
    base = {"model_type": "llama", **EVEN, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    base["max_position_embeddings"] = 64
    with pytest.raises(ConfigError, match=rf"--tensor-parallel-size {count} cannot deal out {told}") as error:
        serve(folder=None, config={**base, **config}, source=DummySource(1), shard=Shard(1, count))
    assert "sizes that can: 1" in str(error.value.hint)


def quantized(rows: int, columns: int, scheme: QuantScheme) -> QuantTensor:
    generator = torch.Generator().manual_seed(rows * columns)
    groups = columns // scheme.group

    def some(*shape: int, low: int = 1, high: int = 60) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    if scheme.packing is Packing.UINT4:
        values = some(rows, columns // 2, low=0, high=256).to(torch.uint8)
    else:
        values = some(rows, columns, low=-127, high=128).to(torch.int8)
    supers = (rows, groups // scheme.super_group) if scheme.super_group else None
    scales = some(-(-rows // scheme.group_rows), groups)
    offsets = some(rows, groups) if scheme.offset else None
    return QuantTensor(
        scheme=scheme,
        shape=(rows, columns),
        values=values,
        scales=scales.to(torch.uint8) if supers else scales / 64,
        offsets=None if offsets is None else (offsets.to(torch.uint8) if supers else offsets / 64),
        super_scales=some(*supers) / 256 if supers else None,
        super_offsets=some(*supers) / 256 if supers and scheme.offset else None,
    )


SCHEMES = [
    QuantScheme("q4_1", Packing.UINT4, 4, 32, offset=True),
    QuantScheme("q4_k", Packing.UINT4, 4, 32, super_group=8, offset=True),
    QuantScheme("int8 per row", Packing.INT8, 8, 512),
    QuantScheme("blocks", Packing.INT8, 8, 32, group_rows=16),
]


@given(st.sampled_from(SCHEMES), st.sampled_from((-1, -2)), st.sampled_from((2, 4, 8)), st.data())
@settings(max_examples=60, deadline=None)
def test_a_part_of_a_quantized_weight_is_that_part_of_its_numbers(
    scheme: QuantScheme, axis: int, count: int, data: st.DataObject
) -> None:
    whole = quantized(48, 512, scheme)
    size = whole.shape[axis]
    rank = data.draw(st.integers(0, count - 1))
    mine = range(rank * size // count, (rank + 1) * size // count)
    spec = WeightSpec(whole.shape, torch.float32, scheme)
    wanted = whole.dequantize().narrow(axis, mine.start, len(mine))
    cut = cut_spec(spec, axis, [mine])
    part = cut_weight(whole, cut, axis, [mine])
    assert tuple(part.shape) == cut.shape
    if isinstance(part, QuantTensor):
        assert cut.scheme == part.scheme
        part = part.dequantize()
    else:
        assert cut.scheme is None
        assert axis == -1, "only columns dissolve blocks"
    torch.testing.assert_close(part, wanted, atol=0, rtol=0)


def test_blocks_that_end_with_the_parts_stay_quantized() -> None:
    for scheme in SCHEMES:
        halves = cut_spec(WeightSpec((64, 512), torch.float32, scheme), -1, [range(256)])
        assert halves.scheme == (replace(scheme, group=256) if scheme.group == 512 else scheme), scheme.name
        rows = cut_spec(WeightSpec((64, 512), torch.float32, scheme), -2, [range(16, 32)])
        assert rows.scheme == scheme


def test_neighbouring_ranges_are_one() -> None:
    assert joined([range(4), range(4, 9), range(12, 13)]) == [range(9), range(12, 13)]
