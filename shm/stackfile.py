"""Where a process writes the Python stacks of its threads for another to read: a memfd that `faulthandler` fills in C.

    coordinator: StackFile() -- inherited descriptor --> worker: arm(fd)
                 text()      <------ the same memory --- a fatal signal, or DUMP_SIGNAL from the coordinator

So it works while native code holds the interpreter lock, and as the last thing before the process ends. The descriptor
appends, on both sides (it is one open file): what is cleared is written from the start again.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal

FATAL = ("SIGSEGV", "SIGFPE", "SIGABRT", "SIGBUS", "SIGILL")
"""The signals upon which a stack is written before they end the process, unless something else handles them there."""
DUMP_SIGNAL = signal.SIGRTMIN + 7
"""Has an armed process write the stacks of all its threads, and go on. Its default is to end the process."""
KEPT_BYTES = 64 * 1024


class StackFile:
    """The reader's side. Not for use by two threads at once."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("outrider-stacks", os.MFD_CLOEXEC)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, os.O_APPEND)

    def fileno(self) -> int:
        """The descriptor, for the process that is to write: hand it over by inheritance. -1 when closed."""
        return self._fd

    def size(self) -> int:
        """Bytes written since the last `clear`; 0 when closed."""
        return os.fstat(self._fd).st_size if self._fd >= 0 else 0

    def text(self) -> str:
        """What was written, without the white space around it: its last 64 KiB. Empty when closed."""
        size = self.size()
        if not size:
            return ""
        return os.pread(self._fd, KEPT_BYTES, max(0, size - KEPT_BYTES)).decode(errors="replace").strip()

    def clear(self) -> None:
        """Forget what was written."""
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)

    def close(self) -> None:
        """Give the descriptor back."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def arm(fd: int) -> None:
    """The writer's side: have the interpreter write to `fd` upon a fatal signal and upon DUMP_SIGNAL."""
    os.set_inheritable(fd, False)
    faulthandler.enable(fd, all_threads=True)
    faulthandler.register(DUMP_SIGNAL, fd, all_threads=True, chain=False)
