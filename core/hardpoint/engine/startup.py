"""What a process that will serve for long does around its start: no garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lasting_objects() -> Iterator[None]:
    """Objects made inside are made to stay (modules, a model, a tokenizer): the collector looks at none of them.

    Neither while they are made, when it would go through all of them again and again, nor later, when a look at
    hundreds of thousands of objects would stop the serving for a tenth of a second.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if before:
            gc.enable()
