"""What the standard library does not wrap: dying with one's parent, knowing that one is a fork, closed streams."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_forks = 0


def forks() -> int:
    """How many forks lie between this process and the one that imported this: cheaper to compare than a pid."""
    return _forks


def _forked() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_forked)


def fill_standard_streams() -> None:
    """Open /dev/null, for good, where standard input, output or error are closed.

    Else descriptors of ours get their numbers: libraries would print into a doorbell, and a process that is started
    with streams of its own could not inherit them.
    """
    fd = 0
    while fd < 3:
        fd = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)  # the lowest number that is free
    os.close(fd)


def die_with_parent(parent: int | None) -> None:
    """Have the kernel send SIGKILL to this process when the thread that started it ends.

    It works while native code holds the interpreter lock, which no thread of this process could. `parent` is the pid
    that started it: raises ProcessLookupError if that one is gone already, for then no signal will come. None: it is
    not known, and not looked for.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    if parent is not None and os.getppid() != parent:
        raise ProcessLookupError(f"the parent process {parent} is gone")
