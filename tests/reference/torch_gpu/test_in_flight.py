"""PTX whose products read registers while others write them is told from PTX that waits."""

from __future__ import annotations

import pytest
from in_flight import in_flight

pytestmark = pytest.mark.reference

MAKE = "mul.bf16x2 %r1, %r5, %r6;"
PRODUCT = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r10,%r11}, {%r1,%r2}, %rd1, %p1, 1, 1, 0;"
SHARED = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r10,%r11}, %rd2, %rd1, %p1, 1, 1, 0, 0;"
COMMIT, BACK = "wgmma.commit_group.sync.aligned;", "@%p2 bra \t$L__BB0_2;"


def wait(left: int) -> str:
    return f"wgmma.wait_group.sync.aligned {left};"


def loop(*lines: str) -> str:
    return "\n".join((".visible .entry k(", ")", "{", "$L__BB0_2:  // Loop Header", *lines, BACK, wait(0), "ret;", "}"))


@pytest.mark.parametrize(
    "body",
    [
        (MAKE, PRODUCT, COMMIT, wait(0)),
        (MAKE, PRODUCT, COMMIT, "@%p3 bra $L__BB0_3;", wait(0), "bra.uni $L__BB0_4;", "$L__BB0_3:", wait(0),
         "$L__BB0_4:"),
        (SHARED, COMMIT, MAKE, wait(1)),
        (PRODUCT, COMMIT, wait(1)),
        (MAKE, PRODUCT, COMMIT, SHARED, COMMIT, wait(1)),
        ("st.shared.b32 [%r1], %r3;", PRODUCT, COMMIT, wait(1)),
    ],
    ids=["waited", "waited on both ways", "from shared memory", "made before the loop", "a later one is under way",
         "read as an address"],
)  # fmt: skip
def test_products_that_are_done_or_read_what_stays(body: tuple[str, ...]) -> None:
    assert in_flight(loop(*body), over_turns=False) == ()


@pytest.mark.parametrize(
    "body",
    [
        (MAKE, PRODUCT, COMMIT, wait(1)),
        (MAKE, PRODUCT, COMMIT, "@%p3 bra $L__BB0_3;", wait(0), "$L__BB0_3:"),
        (PRODUCT, COMMIT, MAKE, wait(0)),
        (PRODUCT, MAKE, COMMIT, wait(0)),
        (PRODUCT, COMMIT, "ld.shared.v2.b32 {%r7,%r2}, [%r3];", wait(0)),
        (PRODUCT, COMMIT, "@%p4 mov.b32 %r2, %r9;", wait(0)),
    ],
    ids=["in the next turn", "on one way", "in the same turn", "before the group is closed",
         "by a load of several", "where a condition holds"],
)  # fmt: skip
def test_products_that_read_what_is_written(body: tuple[str, ...]) -> None:
    (found,) = in_flight(loop(*body))
    assert found.endswith("writes what a product under way reads")


def test_a_product_that_is_waited_for_in_the_next_turn() -> None:
    """As Triton 3.9 has it: right as it is, and yet no kernel may depend on it."""
    kernel = loop(SHARED, COMMIT, wait(1), MAKE, PRODUCT, COMMIT, wait(1))
    assert in_flight(kernel) == ()
    (found,) = in_flight(kernel, over_turns=False)
    assert found == "a product that reads registers is under way at @%p2 bra $L__BB0_2;"


def test_a_kernel_without_such_products_is_not_walked() -> None:
    assert in_flight(loop("bra.uni $nowhere;", MAKE)) == ()
