"""The kernel library, loaded: variants, pools of threads, and one call that plays ops."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hardpoint_cpu.native.abi import ABI, CODES, OP, Batch, Code, Group, Matrix, pack_op
from hardpoint_platforms.errors import DeviceUnavailable

#: Names a library to load instead of the installed one.
VARIABLE = "HARDPOINT_CPU_LIBRARY"
_SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
FILE = f"{'' if sys.platform == 'win32' else 'lib'}hardpoint_cpu_kernels{_SUFFIX}"

#: Bytes of hp_op, hp_group, hp_batch and hp_matrix on every platform with 64-bit pointers.
_SIZES = ((OP.size, 288), (ctypes.sizeof(Group), 24), (ctypes.sizeof(Batch), 64), (ctypes.sizeof(Matrix), 104))

_MEND = (
    "install a C++ compiler (Debian, Ubuntu: apt-get install g++), then `pip install --force-reinstall --no-deps "
    "--no-cache-dir hardpoint-cpu`"
)


class LibraryUnavailable(Exception):
    """There is no usable kernel library. `mend` says what to do."""

    def __init__(self, reason: str, mend: str = _MEND) -> None:
        super().__init__(reason)
        self.mend = mend


class Pool:
    """Threads that work on one op together. Freed by `close`, at the latest with the object."""

    def __init__(self, library: NativeLibrary, threads: int, cpus: Sequence[int] | None = None) -> None:
        """`cpus`: a processor for each thread but the caller's, whose entry is not used; None leaves them free."""
        self._library = library
        pinned = None if cpus is None else (ctypes.c_int32 * threads)(*cpus)
        self.handle: int | None = library.c.hp_pool_new(threads, pinned)
        if not self.handle:
            raise DeviceUnavailable(f"{threads} threads could not be started", hint="--option threads=1")
        self.threads = threads

    def close(self) -> None:
        """End the threads. A second call does nothing."""
        handle, self.handle = self.handle, None
        if handle:
            self._library.c.hp_pool_free(handle)

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.close()


class NativeLibrary:
    """One loaded library. The variant is chosen for the whole process: that is how the library keeps it."""

    def __init__(self, path: Path) -> None:
        """Load it. Raises LibraryUnavailable."""
        self.path = path
        for ours, theirs in _SIZES:
            if ours != theirs:
                raise LibraryUnavailable(
                    f"structures have {ours} bytes here instead of {theirs}", "use a 64-bit Python"
                )
        try:
            self.c = ctypes.CDLL(str(path))
            abi = self.c.hp_abi()
        except (OSError, AttributeError) as error:
            raise LibraryUnavailable(f"{path} cannot be loaded: {error}") from None
        if abi != ABI:
            raise LibraryUnavailable(f"{path} has interface {abi}, this package speaks {ABI}", _MEND)
        self._declare()
        self.variants = self._variants()
        self._codes: dict[int, bool] = {}

    def _declare(self) -> None:
        c, handle = self.c, ctypes.c_void_p
        functions: tuple[tuple[str, object, tuple[object, ...]], ...] = (
            ("hp_variants", ctypes.c_char_p, ()),
            ("hp_use", ctypes.c_char_p, (ctypes.c_char_p,)),
            ("hp_pool_new", handle, (ctypes.c_int32, ctypes.POINTER(ctypes.c_int32))),
            ("hp_pool_free", None, (handle,)),
            ("hp_pool_threads", ctypes.c_int32, (handle,)),
            ("hp_run", ctypes.c_int64, (handle, handle, ctypes.c_int64, handle)),
            ("hp_profile", None, (ctypes.POINTER(ctypes.c_double),)),
            ("hp_weight_new", handle, (handle, handle, ctypes.c_int32)),
            ("hp_weight_free", None, (handle,)),
            ("hp_weight_bytes", ctypes.c_int64, (handle,)),
            ("hp_weight_layout", ctypes.c_char_p, (handle,)),
        )
        for name, result, arguments in functions:
            try:
                function = getattr(c, name)
            except AttributeError:
                raise LibraryUnavailable(f"{self.path} has no function {name}") from None
            function.restype, function.argtypes = result, arguments

    def _variants(self) -> dict[str, bool]:
        lines = (line.split() for line in self.c.hp_variants().decode().splitlines())
        return {name: runs == "1" for name, runs in lines}

    def use(self, variant: str | None = None) -> str:
        """Choose a variant by name, or the best one. Raises DeviceUnavailable for one that cannot run here."""
        chosen: bytes | None = self.c.hp_use(None if variant is None else variant.encode())
        if chosen is None:
            known = ", ".join(
                f"{name}{'' if runs else ' (not on this processor)'}" for name, runs in self.variants.items()
            )
            raise DeviceUnavailable(f"there are no {variant!r} kernels that run here", hint=f"compiled: {known}")
        self._codes.clear()
        return chosen.decode()

    def has(self, code: Code) -> bool:
        """Whether the chosen variant has this kernel. Nothing is run: an op that does not exist stands behind it."""
        if code not in self._codes:
            ops = pack_op(code, 0, 0, ()) + pack_op(0, 0, 0, ())
            self._codes[code] = self.c.hp_run(None, ops, 2, None) == 2
        return self._codes[code]

    def profile(self) -> dict[str, float]:
        """Seconds per kernel since the last call, in the whole process."""
        seconds = (ctypes.c_double * CODES)()
        self.c.hp_profile(seconds)
        return {code.name.lower(): seconds[code] for code in Code if seconds[code]}


def find_library() -> NativeLibrary:
    """Load the library that the environment names, else the one that was built at installation.

    Raises LibraryUnavailable, with the reason and what to do.
    """
    named = os.environ.get(VARIABLE)
    if named:
        return NativeLibrary(Path(named))
    import hardpoint_cpu

    # An editable installation has two folders: the sources', and the one that holds what was built.
    for folder in hardpoint_cpu.__path__:
        path = Path(folder) / "lib" / FILE
        if path.is_file():
            return NativeLibrary(path)
    raise LibraryUnavailable("no kernel library was built when hardpoint-cpu was installed (no compiler or CMake)")
