"""Python stacks of a worker on demand, also while native code holds its interpreter lock.

    who asks             monitor                       worker
    stacks() ──call──►   clears the stack file,
                         sends DUMP_SIGNAL  ────────►  faulthandler writes, in C, what its threads do
    reads the file until it is complete  ◄──────────── (the same memory)

Only the monitor sends the signal: it knows that the process has not been waited for. A process that is stopped, or
whose provider took the signal over, writes nothing; nobody waits for it longer than `SECONDS`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from outrider.shm.progress import START
from outrider.shm.stackfile import DUMP_SIGNAL, KEPT_BYTES

if TYPE_CHECKING:
    from outrider.scheduler.monitor import Monitor
    from outrider.scheduler.worker import Incarnation

SECONDS = 0.2  # that a dump may take
LOOK = 0.005  # seconds between two looks whether it is complete


def stacks(monitor: Monitor, ones: Sequence[Incarnation], seconds: float = SECONDS) -> list[str]:
    """The Python stacks of these workers' threads, '' for one that does not write it in time.

    Blocks: not for the monitor's thread.
    """
    ends = time.monotonic() + seconds
    asked: list[concurrent.futures.Future[int]] = [concurrent.futures.Future() for _ in ones]

    def ask() -> None:
        for one, future in zip(ones, asked, strict=True):
            if future.set_running_or_notify_cancel():
                future.set_result(request(one))

    monitor.call(ask)
    texts: list[str] = []
    for future in asked:
        try:
            fd = future.result(max(0.0, ends - time.monotonic()))
        except TimeoutError:
            fd = -1 if future.cancel() else future.result()  # it is being asked right now
        texts.append(_read(fd, ends))
    return texts


def request(one: Incarnation) -> int:
    """Ask one for its stacks; a descriptor to read them from, the caller's to close. On the monitor's thread.

    -1 for one that cannot write any: it has ended, or may not have come so far that it survives the signal.
    """
    process, file, progress = one.process, one.stacks, one.progress
    if process is None or process.returncode is not None or file is None or file.fileno() < 0:
        return -1
    if one.hello is None and (progress is None or progress.read().kind != START):
        return -1
    file.clear()
    with contextlib.suppress(ProcessLookupError):  # a zombie, which writes nothing
        if one.worker.spec.wrap and one.hello is not None:
            os.kill(one.hello.pid, DUMP_SIGNAL)  # what we have started is its wrapper
        elif not one.worker.spec.wrap:
            signal.pidfd_send_signal(one.pidfd, DUMP_SIGNAL)
        return os.dup(file.fileno())
    return -1


def complete(text: str) -> bool:
    """Whether a dump has come to the end of the main thread's stack, which is the last one."""
    last = text.rstrip().rpartition("\n")[2]
    return text.endswith("\n") and (last.endswith(" in <module>") or last.strip() == "...")


def end_with_stack(monitor: Monitor, one: Incarnation, reason: str, still: Callable[[], bool]) -> None:
    """Kill a worker for `reason`, its stack in its stack file for the story of its death. From any thread.

    Not if `still()` is False when the stack is there, or by then: `still` is asked on the monitor's thread. A worker
    with `ProviderSpec(debug=True)` is never killed.
    """
    if one.worker.spec.debug:
        return

    def kill_when_dumped(fd: int, ends: float) -> None:
        if fd >= 0 and time.monotonic() < ends and still() and not complete(_text(fd)):
            monitor.call_later(LOOK, lambda: kill_when_dumped(fd, ends))
            return
        if fd >= 0:
            os.close(fd)
        if still():
            monitor.kill(one, reason)

    def begin() -> None:
        if still():
            kill_when_dumped(request(one), time.monotonic() + SECONDS)

    monitor.call(begin)


def _read(fd: int, ends: float) -> str:
    if fd < 0:
        return ""
    try:
        while not complete(_text(fd)) and time.monotonic() < ends:
            time.sleep(LOOK)
        text = _text(fd)
        if complete(text):
            os.ftruncate(fd, 0)  # should the worker crash later, this is not of then
        return text.strip()
    finally:
        os.close(fd)


def _text(fd: int) -> str:
    size = os.fstat(fd).st_size
    return os.pread(fd, KEPT_BYTES, max(0, size - KEPT_BYTES)).decode(errors="replace")
