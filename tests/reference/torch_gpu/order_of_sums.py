"""Whether a norm that rounds adds up a row as the norm alone does: else their results may differ in a last bit.

python order_of_sums.py 90 gfx942      prints a line per GPU and kind of row, and fails where a sum has another order

The order is that in which numbers lie in a program's threads, which the compiler chooses by all that a kernel reads and
writes, the codes among it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import torch
from ahead_of_time import Noted, built
from hardpoint_torch_gpu.kernels.norm import norm
from hardpoint_torch_gpu.kernels.norm_round import norm_round
from targets import Target, target

from hardpoint_platforms.quant import Codes, Rounding

#: Rows of real models; from 8192 on threads hold more neighbours than 16 bytes of x.
COLUMNS = (4096, 5120, 8192)
GROUPS = (0, 128)


def orders(at: Target, columns: int, group: int | None, dtype: torch.dtype) -> list[str]:
    """How the numbers of each sum over a row lie, without a group those of the norm alone."""
    book, weight = Noted(), torch.empty(columns)
    x = torch.empty(3, columns, dtype=dtype)
    with book.noting():
        if group is None:
            norm(x, "ln", 1e-5, weight, weight, x)
        else:
            norm_round(x, x, "ln", 1e-5, weight, weight, Rounding(Codes.INT8, group))
    (launch,) = book.launches.values()
    code = built(launch, at).asm["ttgir"]
    layouts = dict(re.findall(r"(#\w+) = (#ttg[^\n]*)", code))
    found = re.findall(r'"tt.reduce"\(%\S+\).*?\}\) : \(tensor<\d+xf32, (#\w+)>\)', code, re.DOTALL)
    return [layouts[name] for name in found]


def differing(at: Target) -> Iterator[str]:
    """One line per kind of row, which begins with "not" where the orders are not the same."""
    for dtype in (torch.bfloat16, torch.float32):
        for columns in COLUMNS:
            alone = orders(at, columns, None, dtype)
            assert len(alone) == 2, "a layer norm has two sums"
            for group in GROUPS:
                same = orders(at, columns, group, dtype)[:2] == alone
                yield f"{'' if same else 'not '}the same on {at.label}: {columns} {dtype}, scales per {group or 'row'}"


def main() -> int:
    """Print all; 1 where one is not the same."""
    lines = [line for word in sys.argv[1:] for line in differing(target(word))]
    print("\n".join(lines))
    return int(not lines or any(line.startswith("not") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
