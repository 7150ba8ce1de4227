"""Each rule of a static-shape chip: a step that breaks it is refused by name, with the line and the way out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import strict_bench as bench
import torch

from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.strict.errors import (
    DynamicShape,
    ForbiddenWrite,
    ForeignTensor,
    HiddenRandomness,
    HostReadBack,
    StrictViolation,
)

pytestmark = pytest.mark.reference

Body = Callable[..., Any]
HELD = torch.zeros(4, 3)


def _numbers() -> torch.Tensor:
    return torch.arange(12.0).reshape(4, 3) - 5.0


def _branch(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if (x > 0).any() else x


def _write_view(x: torch.Tensor) -> torch.Tensor:
    made = x * 2
    made.view(-1)[0] = 1.0
    return made


BAD: dict[str, tuple[Body, type[StrictViolation], str]] = {
    "item": (lambda x: x * x.max().item(), HostReadBack, "host read-back: item"),
    "float()": (lambda x: x * float(x.max()), HostReadBack, "host read-back"),
    "tolist": (lambda x: x * x[0].tolist()[0], HostReadBack, "host read-back"),
    "a branch on values": (_branch, HostReadBack, "host read-back: is_nonzero"),
    "torch.equal": (lambda x: x if torch.equal(x, x + 1) else -x, HostReadBack, "host read-back: equal"),
    "a copy to the host": (lambda x: x.cpu() + 1, HostReadBack, "copies a tensor to the host"),
    "numpy": (lambda x: torch.from_numpy(x.numpy()), StrictViolation, "cannot be traced"),
    "a size out of data": (lambda x: torch.arange(x.sum().long(), device=x.device), StrictViolation, "host read-back"),
    "nonzero": (lambda x: x.nonzero(), DynamicShape, "data-dependent shape: nonzero"),
    "torch.where(mask)": (lambda x: torch.where(x > 0)[0], DynamicShape, "data-dependent shape: nonzero"),
    "masked_select": (lambda x: x.masked_select(x > 0), DynamicShape, "data-dependent shape: masked_select"),
    "a mask as index": (lambda x: x[x > 0], DynamicShape, "index with a mask"),
    "writing by a mask": (lambda x: x.index_put((x > 0,), x.new_zeros(())), DynamicShape, "index_put with a mask"),
    "unique": (lambda x: x.unique(), DynamicShape, "data-dependent shape: _unique2"),
    "bincount": (lambda x: x.abs().long().flatten().bincount(), DynamicShape, "data-dependent shape: bincount"),
    "repeat_interleave": (
        lambda x: x.repeat_interleave(torch.ones(4, dtype=torch.int64, device=x.device), 0),
        DynamicShape,
        "repeat_interleave with lengths",
    ),
    "rand": (lambda x: x + torch.rand(4, 3, device=x.device), HiddenRandomness, "random generator: rand"),
    "rand_like": (lambda x: torch.rand_like(x), HiddenRandomness, "random generator: rand_like"),
    "normal": (lambda x: torch.normal(x, 1.0), HiddenRandomness, "random generator: normal"),
    "bernoulli": (lambda x: torch.bernoulli(x.sigmoid()), HiddenRandomness, "random generator: bernoulli"),
    "multinomial": (lambda x: x.softmax(-1).multinomial(1), HiddenRandomness, "random generator: multinomial"),
    "dropout": (lambda x: torch.nn.functional.dropout(x, 0.5), HiddenRandomness, "random generator: dropout"),
    "attention with dropout": (
        lambda x: torch.nn.functional.scaled_dot_product_attention(*(x[None],) * 3, dropout_p=0.5),
        HiddenRandomness,
        "random generator: scaled_dot_product_attention",
    ),
    "changing an input": (lambda x: x.add_(1), ForbiddenWrite, "add_ changes inputs.plans[0]"),
    "changing a part of an input": (lambda x: x[0].zero_(), ForbiddenWrite, "zero_ changes inputs.plans[0]"),
    "out= into an input": (lambda x: torch.add(x, 1, out=x), ForbiddenWrite, "changes inputs.plans[0]"),
    "writing through a view": (_write_view, ForbiddenWrite, "write through a view"),
    "in place in the model": (lambda x: (x * 2).add_(1), ForbiddenWrite, "model code returns new tensors"),
    "a constant on the host": (lambda x: x + torch.arange(3), ForeignTensor, "make it with device=x.device"),
    "a tensor of the closure": (lambda x: x + HELD, ForeignTensor, "pass it to the step as a weight or an input"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_step_that_cannot_be_compiled_is_refused(name: str) -> None:
    body, kind, told = BAD[name]
    with pytest.raises(kind) as caught:
        bench.once(body, _numbers())
    message = str(caught.value)
    assert told in message
    assert "\n" not in message
    assert f"{Path(__file__).name}:" in message
    assert "outside any op" in message


#: Broken rules that only the trace can tell: on the host itself torch sees no copies and no foreign tensors.
TRACED_ALONE = ("a copy to the host", "numpy", "tolist", "a constant on the host", "a tensor of the closure")

#: What only looks like the above, and what to write instead.
GOOD: dict[str, Body] = {
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "a constant on the device": lambda x: (
        x + torch.arange(3, device=x.device) + torch.tensor(2.0) + torch.tensor([1.0], device=x.device)
    ),
    "an index of fixed size": lambda x: x[torch.tensor([0, 2], device=x.device)],
    "repeats by a number": lambda x: x.repeat_interleave(2, 0),
    "dropout that is off": lambda x: torch.nn.functional.dropout(x, 0.5, training=False),
    "attention without dropout": lambda x: torch.nn.functional.scaled_dot_product_attention(*(x[None],) * 3),
    "views that are read": lambda x: x.view(-1).unflatten(0, (2, 6)).transpose(0, 1).reshape(-1) + 1,
}


@pytest.mark.parametrize("name", GOOD)
def test_a_static_step_runs(name: str) -> None:
    found, wanted = bench.once(GOOD[name], _numbers()), GOOD[name](_numbers())
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", [name for name in BAD if name not in TRACED_ALONE])
def test_every_run_is_watched_and_not_the_first_alone(name: str) -> None:
    body, kind, told = BAD[name]
    calls = [0]

    def turns_bad(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return body(x) if calls[0] > 2 else x * 1.0  # after the trace and the first run

    device = bench.opened()
    program, inputs = bench.built(device, turns_bad), bench.step_inputs(_numbers())
    state = program.prepare(inputs, bench.fresh_state(device), ())
    with pytest.raises(kind) as caught:
        program.run(inputs, state, ())
    assert told in str(caught.value)
    assert calls == [3]


def test_weights_are_not_written() -> None:
    with pytest.raises(ForbiddenWrite, match=r"mul_ changes weights\[0\]\[0\]"):
        bench.once(lambda x, w: x @ w[0].mul_(2), _numbers(), weights=((torch.ones(3, 3),),))


def _inside_an_op(kernel: Body) -> Any:
    """Run `kernel` as what the device takes for its own op."""
    device = bench.opened()
    instance = CONTRACTS["activation"].instance("layers.7.act", torch.float32, kind="relu")
    journal = device._journal

    def body(x: torch.Tensor) -> Any:
        y = x * 1.0
        with journal.inside(instance):
            return kernel(y)

    program, inputs = bench.built(device, body), bench.step_inputs(_numbers())
    state = program.prepare(inputs, bench.fresh_state(device), ())
    return program.run(inputs, state, ())[0]


def test_an_op_may_write_into_a_buffer_that_it_made() -> None:
    def kernel(x: torch.Tensor) -> torch.Tensor:
        made = torch.zeros_like(x)
        return made.index_put_((torch.tensor([1], device=x.device),), x[:1]).add_(1.0)

    torch.testing.assert_close(_inside_an_op(kernel)[1], _numbers()[0] + 1.0)


def test_an_op_may_not_write_into_its_argument() -> None:
    with pytest.raises(ForbiddenWrite, match=r"add_ changes an argument of the op .* in activation at layers\.7\.act"):
        _inside_an_op(lambda x: x.add_(1.0))


def test_an_op_may_not_write_through_a_view_of_its_buffer() -> None:
    def kernel(x: torch.Tensor) -> torch.Tensor:
        made = torch.zeros_like(x)
        made.view(-1).index_put_((torch.tensor([1], device=x.device),), x.new_ones(1))
        return made

    with pytest.raises(ForbiddenWrite, match="write through a view: index_put_ after view"):
        _inside_an_op(kernel)


def test_the_op_that_reads_back_is_named() -> None:
    with pytest.raises(HostReadBack, match=r"test_rules\.py:\d+ in activation at layers\.7\.act"):
        _inside_an_op(lambda x: x * x.max().item())


def test_the_op_that_cannot_be_traced_is_named() -> None:
    with pytest.raises(StrictViolation, match=r"cannot be traced: RuntimeError .* in activation at layers\.7\.act"):
        _inside_an_op(lambda x: x @ x)


def test_the_references_own_attention_is_refused() -> None:
    """What `strict` is for: the reference runs on any host, and no static-shape chip could."""
    from hardpoint_platforms.reference.moe import build_experts

    case = next(iter(CONTRACTS["experts"].samples(torch.float32)))
    x, weights, ids = case.make()
    kernel = build_experts(case.instance)
    packed = tuple(case.weights.values())
    with pytest.raises(DynamicShape, match=r"bincount at .*reference/moe\.py:\d+"):
        bench.once(lambda a, b, c, *w: kernel(a, b, c, w), x, weights, ids, weights=packed)
