"""Native adapters: y + b[slot] a[slot] x as the reference has it."""

from __future__ import annotations

import pytest
import torch

from hardpoint_cpu.native.abi import DTYPES, Code
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.samples import run
from hardpoint_platforms.reference.providers import reference_providers

pytestmark = pytest.mark.reference

LORA = CONTRACTS["lora"]


@pytest.fixture(params=("best", "baseline"))
def stage(request, library, stages):
    """Two threads, with the best variant that runs here and with the one that runs anywhere."""
    library.use(None if request.param == "best" else request.param)
    yield stages(2)
    library.use()


def lora(stage, y, x, slots, a, b):
    out = y.clone()
    shape = (x.shape[1], y.shape[1], a.shape[1], a.shape[0], x.stride(0), out.stride(0), DTYPES[a.dtype])
    stage.call(Code.LORA, x.shape[0], (out, x, slots, a, b), shape)
    return out


def exact(y, x, slots, a, b):
    out = y.double()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            out[row] += b[slot].double() @ (a[slot].double() @ x[row].double())
    return out


@pytest.mark.parametrize("number", range(len(list(LORA.samples(torch.float32)))))
def test_contract_samples(stage, number):
    case = list(LORA.samples(torch.float32))[number]
    reference = next(p for p in reference_providers() if p.op == "lora")
    found = lora(stage, *case.make(), case.weights["a"], case.weights["b"])
    tolerance = LORA.tolerance[torch.float32]
    torch.testing.assert_close(found, run(reference, case), atol=tolerance.atol, rtol=tolerance.rtol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("k", "n", "rank"), [(1, 1, 1), (7, 5, 3), (576, 131, 16), (130, 257, 33)])
def test_odd_shapes(stage, dtype, k, n, rank):
    torch.manual_seed(k)
    rows, count = 21, 4
    x, y = torch.randn(rows, k + 3)[:, :k], torch.randn(rows, n)
    slots = torch.randint(-1, count, (rows,))
    a, b = (torch.randn(count, rank, k) * k**-0.5).to(dtype), (torch.randn(count, n, rank) * rank**-0.5).to(dtype)
    found = lora(stage, y, x, slots, a, b)
    torch.testing.assert_close(found.double(), exact(y, x, slots, a, b), atol=2e-5, rtol=1e-4)
    assert torch.equal(found[slots < 0], y[slots < 0])


def test_rows_do_not_depend_on_batch_and_threads(stages, library):
    library.use()
    torch.manual_seed(3)
    x, y, slots = torch.randn(19, 200), torch.randn(19, 300), torch.randint(-1, 3, (19,))
    a, b = torch.randn(3, 8, 200), torch.randn(3, 300, 8)
    together = lora(stages(2), y, x, slots, a, b)
    for threads in (1, 3):
        assert torch.equal(lora(stages(threads), y, x, slots, a, b), together)
    for row in range(19):
        alone = slice(row, row + 1)
        assert torch.equal(lora(stages(2), y[alone], x[alone], slots[alone], a, b), together[alone])
