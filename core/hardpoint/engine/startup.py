"""What a process that will serve for long does around its start: no garbage collector, and memory given back after."""

from __future__ import annotations

import ctypes
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


def give_back_memory() -> None:
    """Return what start-up has freed to the system, where the C library keeps it otherwise (glibc does)."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    trim(ctypes.c_size_t(0))
