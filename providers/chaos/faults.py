"""The faults that can happen anywhere, each as a function that commits it.

Crashes are real ones: a null pointer is read and `abort` is called in native code, so that what they leave (signal,
stack, core) is what a crash of a native library leaves.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Mapping

from outrider.providers.chaos.inside import Inside
from outrider.providers.chaos.options import Options

BLOCK = 1 << 24  # bytes by which memory grows
FLOOD = 1 << 24  # bytes of a flood that is given no size
LINE = b"chaos: one line of a flood, of sixty-four bytes with its newline\n"[-64:]
LONG = 1 << 20  # seconds


class OrderedError(RuntimeError):
    """What the fault `exception` raises."""


def commit(options: Options, inside: Inside, leaked: list[bytearray]) -> None:
    """Do what `fault` says, if it is a fault for any place. `leaked` holds what `memory` takes.

    Returns for 'slow', 'stderr_flood', 'sigstop' (once the process is continued), 'malformed_message' (if nobody ends
    the worker), and 'memory' with `bytes`. Raises OrderedError for 'exception', MemoryError when 'memory' gets no more.
    """
    act = _ACTS.get(options.fault)
    if act is not None:
        act(options)
    elif options.fault == "memory":
        leaked += _grown(options.bytes)
    elif options.fault == "malformed_message":
        inside.say_nonsense()
        time.sleep(options.seconds or 5.0)  # a coordinator that believes nothing ends the worker meanwhile


def _segfault(options: Options) -> None:
    ctypes.string_at(0)


def _abort(options: Options) -> None:
    ctypes.CDLL(None).abort()


def _kill(options: Options) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(options: Options) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _exit(options: Options) -> None:
    os._exit(options.code)


def _raise(options: Options) -> None:
    raise OrderedError(f"chaos raises in phase {options.phase!r}, as it was told to")


def _hang(options: Options) -> None:
    while True:
        time.sleep(LONG)


def _hang_with_the_lock(options: Options) -> None:
    hold = ctypes.PyDLL(None).sleep  # unlike CDLL, PyDLL keeps the interpreter's lock
    while True:
        hold(LONG)


def _sleep(options: Options) -> None:
    time.sleep(options.seconds or 0.1)


def _flood(options: Options) -> None:
    left = options.bytes or FLOOD
    chunk = LINE * 1024
    while left > 0:
        left -= os.write(2, chunk[:left])


_ACTS: Mapping[str, Callable[[Options], None]] = {
    "sigsegv": _segfault,
    "sigabrt": _abort,
    "sigkill": _kill,
    "sigstop": _stop,
    "exit": _exit,
    "exception": _raise,
    "hang": _hang,
    "hang_gil": _hang_with_the_lock,
    "slow": _sleep,
    "stderr_flood": _flood,
}


def _grown(limit: int | None) -> list[bytearray]:
    """Memory by the block, every page touched, until it is `limit` bytes or there is no more."""
    held: list[bytearray] = []
    total = 0
    while limit is None or total < limit:
        held.append(bytearray(BLOCK if limit is None else min(BLOCK, limit - total)))
        held[-1][::4096] = b"\1" * len(held[-1][::4096])
        total += len(held[-1])
    return held
