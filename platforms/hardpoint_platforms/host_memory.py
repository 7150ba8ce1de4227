"""Memory that a process has freed and still holds."""

from __future__ import annotations

import ctypes


def give_back_memory() -> None:
    """Return freed memory to the system, where the C library keeps it otherwise (glibc does).

    After a start, which frees much; and before a look at what a process holds, since what it keeps free would take up,
    and hide, what leaks.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    trim(ctypes.c_size_t(0))
