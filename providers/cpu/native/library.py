"""The loaded library: its kernels by name, its families, its thread pool."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Collection
from pathlib import Path
from typing import Any

from outrider.providers.cpu.native.build import FOLDER, V3, BuildError, carried, compile_cached, has_avx2, target
from outrider.providers.cpu.native.calls import Call

# What can be switched on and off, each with its kernels in NumPy.
FAMILIES = (
    "gemm", "conv", "depthwise", "pool", "resize", "copy", "reduce",
    "elementwise", "activation", "softmax", "norm", "recurrent", "quantized",
)  # fmt: skip
SPIN = 200_000  # nanoseconds that a helper looks for work before it sleeps; a wake costs 34 us
WORTH = 30_000  # nanoseconds of work below which a call stays on one thread


class NativeError(Exception):
    """The compiled kernels are not there; the message says why."""


class Library:
    """The compiled kernels, with those `families` that are switched on, on `threads` threads."""

    def __init__(self, path: Path, families: Collection[str] = FAMILIES, threads: int = 1) -> None:
        """Raises NativeError where the file cannot be loaded here."""
        try:
            self._dll = ctypes.CDLL(str(path))
        except OSError as reason:
            raise NativeError(f"the compiled kernels cannot be loaded: {reason}") from None
        self._dll.or_target.restype = ctypes.c_char_p
        self.target: str = self._dll.or_target().decode()
        if self.target == V3 and not has_avx2():
            raise NativeError("the compiled kernels are for x86-64-v3, which this CPU is not")
        self.path = path
        self.origin = "wheel" if path.parent == FOLDER else "cache"
        self.families = frozenset(families)
        self._run: Any = self._dll.or_run
        self._run.argtypes, self._run.restype = (ctypes.c_void_p, ctypes.c_int64), None
        self._dll.or_start.argtypes = (ctypes.c_int64, ctypes.c_int64)
        self._dll.or_start.restype = ctypes.c_int64
        self.threads = int(self._dll.or_start(threads, SPIN))
        self._kernels: dict[str, tuple[int, int]] = {}

    def call(self, name: str, tasks: int, *args: Any) -> Call:
        """Kernel `name` of `source/`, prepared: `args` are the fields of its struct, in order. A step.

        Raises ValueError when they are not as many as the kernel has.
        """
        if name not in self._kernels:
            address = ctypes.cast(getattr(self._dll, name), ctypes.c_void_p).value
            words = ctypes.c_int64.in_dll(self._dll, f"{name}_words").value
            assert address is not None
            self._kernels[name] = (address, words)
        address, words = self._kernels[name]
        if len(args) != words:
            raise ValueError(f"{name} takes {words} arguments and got {len(args)}")
        return Call(self._run, name, address, tasks, args)

    def tasks(self, items: int, nanoseconds: float, each: int = 1) -> int:
        """How many tasks to make of `items` that take `nanoseconds` in all on one thread.

        1 where sharing does not pay, else up to `each` per thread.
        """
        if self.threads == 1 or nanoseconds < WORTH:
            return 1
        return max(1, min(items, self.threads * each))

    def stop(self) -> None:
        """End the pool's threads. Calls go on working, on one thread."""
        self._dll.or_stop()
        self.threads = 1


def load(families: Collection[str] = FAMILIES, threads: int = 1) -> Library:
    """The library that was installed, else one compiled now or earlier. Raises NativeError saying why there is none.

    Compiling takes up to a minute on a busy machine, and waits for another process that does it.
    """
    installed = carried(target())
    if installed.exists():
        return Library(installed, families, threads)
    try:
        path = compile_cached()
    except BuildError as reason:
        others = [name for name in (V3, platform.machine()) if carried(name).exists()]
        why = f"; those that were installed are for {others[0]}, which this CPU is not" if others else ""
        raise NativeError(f"{reason}{why}") from None
    return Library(path, families, threads)
