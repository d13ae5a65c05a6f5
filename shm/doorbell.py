"""Doorbells: how one process wakes another.

A doorbell is an eventfd. Rings are counted by the kernel and taken all at once, so a ring is never lost and a waiter
may find that it was woken for nothing: it looks at its words in shared memory and waits again. The coordinator makes
and keeps all doorbells; a worker that is started anew gets the same ones.
"""

from __future__ import annotations

import math
import os
import select


class Doorbell:
    """An eventfd, a new one or the given descriptor (which is adopted). Many may ring, one may wait at a time."""

    __slots__ = ("_fd", "_poll")

    def __init__(self, fd: int | None = None) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC) if fd is None else fd
        self._poll: select.poll | None = None

    def ring(self) -> None:
        """Wake the waiter, or the next one. A closed doorbell wakes nobody."""
        if self._fd >= 0:
            os.eventfd_write(self._fd, 1)

    def wait(self, timeout: float | None = None) -> bool:
        """Block until rung; True then, False after `timeout` seconds (None: no limit).

        Signals that the program handles do not end it; KeyboardInterrupt passes.
        """
        if timeout is not None:
            if self._poll is None:
                self._poll = select.poll()
                self._poll.register(self._fd, select.POLLIN)
            if not self._poll.poll(max(0, math.ceil(timeout * 1000))):
                return False
        # os.eventfd_read is not retried after a handled signal; os.read is (PEP 475).
        os.read(self._fd, 8)
        return True

    def fileno(self) -> int:
        """The descriptor; -1 when closed."""
        return self._fd

    def close(self) -> None:
        """Close the descriptor. Others who have it keep theirs."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
