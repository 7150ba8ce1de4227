"""Whole models of 8-bit weights with norms that round, and without: the same tokens by fewer launches."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from served import InterpretedGpu, _Here
from triton.runtime.interpreter import InterpretedFunction

from hardpoint.config.engine import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from hardpoint.engine.build import _scheduler
from hardpoint.engine.loop import Engine
from hardpoint.protocol.messages import EngineRequest
from hardpoint.request.sampling import SamplingParams
from hardpoint.weights.checkpoint import open_checkpoint
from hardpoint.worker.worker import PlacedModel, Worker, bind_model
from hardpoint_platforms.binding import DECOMPOSED, Binding
from hardpoint_platforms.choices import KernelChoice

sys.path.extend(str(Path(__file__).parents[1] / place) for place in ("models/quantized", "cases"))

from formats import FORMATS, write_pair
from tiny_models import llama_config, random_weights, save_llama

pytestmark = [
    pytest.mark.reference,
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter, on the host"),
]

LAYERS, STEPS = 2, 3
#: What `--kernel norm_*=apart` says: no provider is called so.
APART = (KernelChoice("norm_*", "*", "apart"),)


@contextmanager
def counted(launches: Counter[str]) -> Iterator[None]:
    launch = InterpretedFunction.run

    def count(self: InterpretedFunction[Any], *args: Any, **named: Any) -> Any:
        launches[self.__name__] += 1
        return launch(self, *args, **named)

    InterpretedFunction.run = count  # type: ignore[method-assign]
    try:
        yield
    finally:
        InterpretedFunction.run = launch  # type: ignore[method-assign]


def configured(model: Path, choices: tuple[KernelChoice, ...]) -> EngineConfig:
    return EngineConfig(
        ModelConfig(str(model), dtype="bfloat16"),
        DeviceConfig("reference", kernels=choices),
        CacheConfig(num_kv_pages=20),
        SchedulerConfig(max_batch_tokens=64, max_num_seqs=2),
    )


def served(model: Path, choices: tuple[KernelChoice, ...]) -> tuple[list[int], tuple[Binding, ...], Counter[str]]:
    """Greedy tokens of one request, the choices that were made, and the launches of its steps."""
    config, device = configured(model, choices), InterpretedGpu()
    bound = bind_model(config, open_checkpoint(config.model), device)
    worker = Worker(config, [PlacedModel(bound, device)])
    engine = Engine(_scheduler(config, worker), _Here(worker.runner), overlap=False, seed=1)
    params = SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True)
    engine.add(EngineRequest(request_id="r", prompt=[5, 9, 77], params=params))
    tokens: list[int] = []
    launches: Counter[str] = Counter()
    with counted(launches):
        while engine.has_work:
            for output in engine.step().outputs:
                assert output.error is None, output.error
                tokens += output.token_ids
    return tokens, bound.ops.bindings, launches


@pytest.mark.parametrize("form", ["fp8-block", "ct-fp8-channel", "ct-int8-channel"])
def test_tokens_stay_and_launches_go(form: str, tmp_path: Path) -> None:
    made = llama_config(
        num_hidden_layers=LAYERS, hidden_size=128, intermediate_size=128, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, vocab_size=131,
    )  # fmt: skip
    plain = save_llama(tmp_path / "saved", made, random_weights(made))
    model = write_pair(plain, tmp_path, FORMATS[form]).folder
    tokens, bindings, launches = served(model, ())
    wanted, others, more = served(model, APART)
    assert len(tokens) == STEPS
    assert tokens == wanted

    names = {(b.instance.op, b.instance.where): b.provider for b in bindings}
    for layer in range(LAYERS):
        assert names["norm_gated_mlp", f"layers.{layer}.mlp"] == "triton norm + triton gated mlp"
        if layer:
            assert names["norm_linear", f"layers.{layer}.self_attn.qkv_proj"] == "triton norm + torch linear"
    assert {b.instance.where for b in bindings if b.instance.op == "add_norm"} == {"norm"}
    assert {b.provider for b in others if b.instance.op.startswith("norm_")} == {DECOMPOSED}

    claimed, steps = 2 * LAYERS - 1, STEPS
    assert launches["_norm_round"] == claimed * steps
    assert "_norm_round" not in more
    assert more["_norm"] - launches["_norm"] == claimed * steps
    assert more["_round"] - launches["_round"] == claimed * steps
    assert more.total() - launches.total() == claimed * steps


def test_other_weights_are_left_as_they_were(tmp_path: Path) -> None:
    made = llama_config(num_hidden_layers=2, vocab_size=131)
    config = configured(save_llama(tmp_path, made, random_weights(made)), ())
    bindings = bind_model(config, open_checkpoint(config.model), InterpretedGpu()).ops.bindings
    refused = [b for b in bindings if b.instance.op in ("norm_linear", "norm_gated_mlp")]
    assert len(refused) == 3
    assert all(b.provider == DECOMPOSED for b in refused)
    assert {one.reason for b in refused for one in b.refused} == {
        "weight is no product of 8-bit numbers", "gate_up is no product of 8-bit numbers",
    }  # fmt: skip
