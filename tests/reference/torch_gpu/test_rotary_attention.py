"""Head norms, rotation and attention as a block, over each provider of attention."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flash_stand_in import DecodeWrapper, Wrapper, install, shorten_trials
from hardpoint_cuda.flash_infer import FlashInferAttention, FlashPlanner
from hardpoint_torch_gpu import plan as plans
from hardpoint_torch_gpu.attention import TritonAttention
from hardpoint_torch_gpu.kernels import paged_decode
from hardpoint_torch_gpu.measured import Measurements, Way
from hardpoint_torch_gpu.plan import GpuPlanner
from hardpoint_torch_gpu.rotary_attention import RotaryAttention
from hardpoint_torch_gpu.seams import Seam
from served import InterpretedGpu, _Here
from shared_rows import SharedRows
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from hardpoint.cli.explain import folded
from hardpoint.config.engine import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from hardpoint.engine.build import _scheduler
from hardpoint.engine.loop import Engine
from hardpoint.protocol.messages import EngineRequest
from hardpoint.request.sampling import SamplingParams
from hardpoint.weights.checkpoint import open_checkpoint
from hardpoint.worker.worker import PlacedModel, Worker, bind_model
from hardpoint_platforms.binding import DECOMPOSED, Binding, ask
from hardpoint_platforms.choices import KernelChoice
from hardpoint_platforms.conformance.checks import Wrong
from hardpoint_platforms.conformance.contracts import compare
from hardpoint_platforms.ops.attention import _case, _Shape
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import Kernel, OpInstance, Sample
from hardpoint_platforms.ops.rotary_attention import _WAYS, _behind
from hardpoint_platforms.ops.samples import PagedRows, run
from hardpoint_platforms.reference.platform import ReferenceDevice
from hardpoint_platforms.reference.providers import reference_blocks

pytestmark = [
    pytest.mark.reference,
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter, on the host"),
]

CONTRACT = CONTRACTS["rotary_attention"]
SAMPLES = tuple(CONTRACT.samples(torch.float32))
REFERENCE = next(block for block in reference_blocks() if block.op == "rotary_attention")
#: Plain; normed, a part rotated; likewise with a norm of the other kind.
PLAIN, NORMED, LAST = _WAYS[0], _WAYS[2], _WAYS[3]
DECODES = PagedRows(((3, 1), (11, 1), (0, 1)), extra_tokens=2, extra_requests=2)


def triton() -> RotaryAttention:
    return RotaryAttention(TritonAttention(GpuPlanner(ReferenceDevice().upload)))


def check(ours: RotaryAttention, case: Sample) -> None:
    """Result, pages but for page 0, and padding that is finite."""
    real, tolerance = case.make()[-1].num_tokens, CONTRACT.tolerance[case.instance.dtype]
    answer = ask(CONTRACT, ours, case.instance)
    assert answer, answer.reason
    with torch.inference_mode():
        found, wanted = run(ours, case), run(REFERENCE, case)
    assert found[0].isfinite().all()
    pairs = [(found[0][:real], wanted[0][:real])]
    pairs += [(a[1:], b[1:]) for a, b in zip(tree_leaves(found[1]), tree_leaves(wanted[1]), strict=True)]
    for a, b in pairs:
        torch.testing.assert_close(a, b, atol=tolerance.atol, rtol=tolerance.rtol)


@pytest.mark.parametrize("case", SAMPLES, ids=[case.instance.where for case in SAMPLES])
def test_agrees_with_the_reference(case: Sample) -> None:
    check(triton(), case)


@pytest.mark.parametrize("way", [PLAIN, NORMED, LAST])
def test_decodes_with_padding_in_16_bits(way: Any) -> None:
    """Their plan has a row for each token: those of padding are stored in page 0 and attend nothing."""
    check(triton(), _behind(_case(torch.float16, "decodes", DECODES, _Shape(8, 2, 32, 32)), way))


class Spoiled(RotaryAttention):
    """Writes into its values, or leaves a step out."""

    def __init__(self, fault: str) -> None:
        super().__init__(TritonAttention(GpuPlanner(ReferenceDevice().upload)))
        self._fault = fault

    def build(self, instance: OpInstance) -> Kernel:
        attrs = instance.attrs | ({"interleaved": not instance.attrs["interleaved"]} if self._fault == "pairs" else {})
        kernel = super().build(replace(instance, attrs=attrs))

        def spoiled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> Any:
            made = kernel(q, k, v, *others)
            if self._fault == "values":
                v.add_(1.0)
            return made

        return spoiled


def test_the_kit_judges_it() -> None:
    """In place is what the contract allows, and no more."""
    case, tolerance = SAMPLES[2], CONTRACT.tolerance[torch.float32]
    assert compare(ReferenceDevice(), triton(), case, tolerance).error < tolerance.atol
    with pytest.raises(Wrong, match="changes its argument 'v'"):
        compare(ReferenceDevice(), Spoiled("values"), case, tolerance)
    with pytest.raises(Wrong, match="is off by"):
        compare(ReferenceDevice(), Spoiled("pairs"), case, tolerance)


def test_rows_that_share_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "WORTH", 0)
    rows = SharedRows(((3, (1, 2, 9, 4)), (0, (7,))), extra=2)
    case = _behind(_case(torch.float32, "shared", rows), PLAIN)  # type: ignore[arg-type]
    ours = triton()
    ours.build(case.instance)
    assert ours.planner().plan(case.make()[-1]).sharing
    check(ours, case)


class Noted(Seam):
    """Keeps the call."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def cut(self, call: Any) -> None:
        self.calls.append(call)


@pytest.mark.parametrize("number", [2, 4, 16], ids=["decode", "mixed with padding", "sinks and window"])
def test_leaves_all_of_its_work_to_the_seam(number: int) -> None:
    """The slots of new keys are a plan's: nothing is stored, and q stays, until it comes."""
    case, provider = SAMPLES[number], triton()
    kernel, w = provider.build(case.instance), provider.pack(case.instance, case.weights)
    *tensors, state, batch = case.make()
    wanted, after = kernel(*tensors, state, provider.planner().plan(batch), w)
    *tensors, state, batch = case.make()
    before, pages = tensors[0].clone(), [part.clone() for part in tree_leaves(state)]
    seam = Noted()
    out, later = kernel(*tensors, state, seam, w)
    assert torch.equal(tensors[0], before)
    assert all(torch.equal(old, new) for old, new in zip(pages, tree_leaves(state), strict=True))
    out.fill_(float("nan"))
    (call,) = seam.calls
    call(provider.planner().plan(batch))
    assert torch.equal(out[: batch.num_tokens], wanted[: batch.num_tokens])
    assert out.isfinite().all()
    assert all(torch.equal(a, b) for a, b in zip(tree_leaves(later), tree_leaves(after), strict=True))


@contextmanager
def launches(constants: tuple[str, ...] = ()) -> Iterator[Counter[tuple[Any, ...]]]:
    """Counts kernels by name and these of their constants."""
    run_it, found = InterpretedFunction.run, Counter[tuple[Any, ...]]()

    def noted(self: InterpretedFunction[Any], *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        takes = inspect.signature(self.fn).parameters
        found[(self.__name__, *(named.get(name) for name in constants if name in takes))] += 1
        return run_it(self, *args, grid=grid, warmup=warmup, **named)

    InterpretedFunction.run = noted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        InterpretedFunction.run = run_it  # type: ignore[method-assign]


@pytest.mark.parametrize("rows", [DECODES, PagedRows(((3, 1), (11, 1), (0, 7)))], ids=["decodes", "mixed"])
def test_decodes_alone_keep_the_shape_of_their_kernel(rows: PagedRows) -> None:
    """That of steps whose keys the decode kernel stores, which is larger than that of mixed steps."""
    case = _case(torch.float16, "rows", rows, _Shape(4, 2, 64, 64))
    with launches(("BLOCK", "STORE")) as found, torch.inference_mode():
        run(triton(), _behind(case, PLAIN))
        run(TritonAttention(GpuPlanner(ReferenceDevice().upload)), case)
    block = paged_decode._FEW_BLOCK if rows is DECODES else paged_decode.BLOCK
    assert {key: count for key, count in found.items() if key[0] == "_decode"} == (
        {("_decode", block, False): 1, ("_decode", block, True): 1}
        if rows is DECODES
        else {("_decode", block, False): 2}
    )


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    shorten_trials(monkeypatch)
    return install(monkeypatch)


def flash() -> RotaryAttention:
    """Over FlashInfer, which the clock finds faster at everything."""

    def timer(way: Way) -> float:
        before = DecodeWrapper.ran + Wrapper.made
        way()
        return 1e-5 if DecodeWrapper.ran + Wrapper.made != before else 9e-5

    planner = FlashPlanner(ReferenceDevice().upload, torch.device("cpu"), "fa2")
    return RotaryAttention(FlashInferAttention(planner, "fa2", Measurements(None, timer), compile=False))


@pytest.mark.parametrize("way", [PLAIN, NORMED])
def test_by_flash_infer(installed: SimpleNamespace, way: Any) -> None:
    ours = flash()
    assert ours.name == "flashinfer + triton attention with rope"
    decodes = _behind(_case(torch.float16, "decodes", DECODES), way)
    prompts = _behind(_case(torch.float16, "prompts", PagedRows(((3, 1), (0, 7), (5, 6)), extra_tokens=2)), way)
    for case in (decodes, prompts):
        ours.build(case.instance)
    before = DecodeWrapper.ran
    with launches(("STORE",)) as found:
        check(ours, decodes)
    assert DecodeWrapper.ran == before + 1
    assert found == {("_prepare",): 1}
    before = DecodeWrapper.ran, Wrapper.made
    check(ours, prompts)
    assert (DecodeWrapper.ran, Wrapper.made) == (before[0], before[1] + 1)


def test_refuses_what_its_attention_refuses(installed: SimpleNamespace) -> None:
    wide = _behind(_case(torch.float16, "wide", DECODES, _Shape(2, 2, 264, 264)), PLAIN).instance
    assert "head size 264" in triton().supports(wide).reason
    alibi = next(case.instance for case in SAMPLES if "alibi" in case.instance.where)
    assert not flash().supports(alibi)
    assert flash().supports(alibi).reason == flash()._attention.supports(alibi).reason
    assert triton().supports(alibi)


class Interpreted(InterpretedGpu):
    """What it uploads is a copy, as on a GPU."""

    def upload(self, tensors: Any) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.clone() for tensor in tensors)


def folder_of(family: str, folder: Path) -> Path:
    """A tiny random model. Its norms of heads are such that leaving them out shows."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"head_dim": 24, "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    more = {"intermediate_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 64, "sliding_window": 8}
    config = AutoConfig.for_model(family, **sizes, **more)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight) * 0.3 + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(folder)
    return folder


def served(
    folder: Path, *choices: KernelChoice
) -> tuple[dict[str, list[int]], tuple[Binding, ...], list[Counter[Any]]]:
    """Greedy tokens of two requests, what was bound, and the launches of each step."""
    config = EngineConfig(
        ModelConfig(str(folder), dtype="float32"),
        DeviceConfig("reference", kernels=choices),
        CacheConfig(num_kv_pages=60),
        SchedulerConfig(max_batch_tokens=64, max_num_seqs=4),
    )
    device, checkpoint = Interpreted(), open_checkpoint(config.model)
    bound = bind_model(config, checkpoint, device)
    worker = Worker(config, [PlacedModel(bound, device)])
    engine = Engine(_scheduler(config, worker), _Here(worker.runner), overlap=False, seed=1)
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    engine.add(EngineRequest(request_id="a", prompt=[5, 9, 11, 30, 7, 8, 2, 3, 4, 20], params=params))
    made: list[Counter[Any]] = []
    while engine.has_work:
        with launches() as found:
            made.append(found)
            for output in engine.step().outputs:
                assert output.error is None, output.error
                tokens[output.request_id] += output.token_ids
        if len(tokens["a"]) == 1 and not tokens["b"]:  # the next step is mixed
            engine.add(EngineRequest(request_id="b", prompt=[3, 1, 4, 1, 5], params=params))
    return tokens, bound.ops.bindings, made


@pytest.mark.parametrize(("family", "norms"), [("llama", 0), ("qwen3", 2), ("gemma3_text", 2)])
def test_models_say_the_same_with_and_without_it(family: str, norms: int, tmp_path: Path) -> None:
    """In fewer launches: the rotation and the norms of heads are one, in mixed steps with what stores keys."""
    folder = folder_of(family, tmp_path)
    with_block, claimed, few = served(folder)
    without, decomposed, many = served(folder, KernelChoice("rotary_attention", "*", "none"))
    assert with_block == without
    assert [len(tokens) for tokens in with_block.values()] == [4, 4]
    layers, ops = 2, Counter(one.instance.op for one in claimed)
    assert (ops["rotary_attention"], ops["attention"], ops["rope"]) == (layers, 0, 0)
    assert Counter(one.instance.op for one in decomposed)["attention"] == layers
    told = {cells[0]: cells[1:3] for _, cells in folded(claimed)}
    assert told["rotary_attention"] == ["block", "triton attention with rope"]
    assert len(few) == len(many)
    kinds = set()
    for ours, theirs in zip(few, many, strict=True):
        stored = theirs["_store",] // layers
        kinds.add((stored, theirs["_decode",] // layers, theirs["_prefill",] // layers))
        for name, count in (("_prepare", 1), ("_rope", -1), ("_norm", -norms), ("_store", -stored), ("_decode", 0)):
            assert ours[name,] - theirs[name,] == count * layers, name
        assert ours.total() == theirs.total() - (norms + stored) * layers
    assert kinds == {(1, 0, 1), (1, 1, 1), (0, 1, 0)}  # a prompt, a mixed step, decodes


def test_a_choice_of_attention_is_not_claimed_around(tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path)
    for choice, block in (("reference", False), ("triton attention", True)):
        found = served(folder, KernelChoice("attention", "*", choice))[1]
        by = Counter((one.instance.op, one.provider) for one in found if "attention" in one.instance.op)
        if block:
            assert by == {("rotary_attention", "triton attention with rope"): 2}
        else:
            assert by == {("rotary_attention", DECOMPOSED): 2, ("attention", "reference"): 2}
