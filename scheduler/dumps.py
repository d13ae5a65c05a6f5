"""Python stacks of a worker on demand, also while native code holds its interpreter lock.

    who asks             monitor                       worker
    stacks() ──call──►   clears the stack file,
                         sends DUMP_SIGNAL  ────────►  faulthandler writes, in C, what its threads do
    reads the file until it is complete  ◄──────────── (the same memory)

Only the monitor sends the signal: it knows that the process has not been waited for. A process that is stopped, or
whose provider took the signal over, writes nothing; nobody waits for it longer than `SECONDS`. One that is wrapped is
not asked.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from outrider.providers.contract import ProviderUnavailableError
from outrider.shm.progress import RUN, START, same_session
from outrider.shm.stackfile import DUMP_SIGNAL, KEPT_BYTES

if TYPE_CHECKING:
    from outrider.scheduler.monitor import Monitor
    from outrider.scheduler.worker import Incarnation

SECONDS = 0.2  # that a dump may take
LOOK = 0.005  # seconds between two looks whether it is complete


def stacks(monitor: Monitor, ones: Sequence[Incarnation], keep: bool = False) -> list[str]:
    """The Python stacks of these workers' threads, '' for one that does not write them in time.

    `keep`: leave them in the stack file, for the story of a death. Blocks: not for the monitor's thread.
    """
    ends = time.monotonic() + SECONDS
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
        texts.append(_read(fd, ends, keep))
    return texts


def request(one: Incarnation) -> int:
    """Ask one for its stacks; a descriptor to read them from, the caller's to close. On the monitor's thread.

    -1 for one that cannot write any: it has ended, or may not have come so far that it survives the signal; and for a
    wrapped one, as a debugger stops at any signal.
    """
    process, file, progress = one.process, one.stacks, one.progress
    if process is None or process.returncode is not None or file is None or file.fileno() < 0:
        return -1
    if one.worker.spec.wrap:
        return -1
    if one.hello is None and (progress is None or progress.read().kind != START):
        return -1
    file.clear()
    with contextlib.suppress(ProcessLookupError):  # a zombie, which writes nothing
        signal.pidfd_send_signal(one.pidfd, DUMP_SIGNAL)
        return os.dup(file.fileno())
    return -1


def complete(text: str) -> bool:
    """Whether a dump has come to the end of the main thread's stack, which is the last one."""
    last = text.rstrip().rpartition("\n")[2]
    return text.endswith("\n") and (last.endswith(" in <module>") or last.strip() == "...")


def then(monitor: Monitor, one: Incarnation, what: Callable[[str], None], keep: bool = False) -> None:
    """Ask one for its stacks, and go on with `what(text)` when they are there, or not by then. On the monitor's thread.

    `keep`: leave the text in the stack file, for the story of the worker's death.
    """
    fd, ends = request(one), time.monotonic() + SECONDS

    def look() -> None:
        text = "" if fd < 0 else _text(fd)
        if fd >= 0 and not complete(text) and time.monotonic() < ends:
            monitor.call_later(LOOK, look)
            return
        if fd >= 0:
            if not keep:
                os.ftruncate(fd, 0)
            os.close(fd)
        what(text.strip())

    look()


def end_with_stack(
    monitor: Monitor, one: Incarnation, reason: str, still: Callable[[], bool], spared: bool = False
) -> None:
    """Kill a worker for `reason`, its stack in its stack file for the story of its death. From any thread.

    `spared`: as for `Monitor.kill`.

    `still`, asked on the monitor's thread, before the stack is asked for and when it is there: whether the reason is
    one still. A worker with `ProviderSpec(debug=True)` is never killed.
    """

    def kill(_: str) -> None:
        if still():
            monitor.kill(one, reason, spared)

    def begin() -> None:
        if still():
            then(monitor, one, kill, keep=True)

    if not one.worker.spec.debug:
        monitor.call(begin)


def end_late(monitor: Monitor, one: Incarnation, reason: str, session: int) -> ProviderUnavailableError:
    """Kill a worker that did not answer a session in time, and return the error that says so, with its stack.

    One that is at a run of another session only has that before it, and is left alone. Not on the monitor's thread.
    """
    name, doing = one.worker.name, one.doing()
    if doing.kind == RUN and not same_session(doing.session, session):
        reason += ": it was at a run of another session on this fleet"
        return ProviderUnavailableError(f"provider {name} is not available: {reason}", provider=name, reason=reason)
    (stack,) = stacks(monitor, [one], keep=True)
    monitor.kill(one, reason)
    story = f". Its Python stack:\n{stack}" if stack else ""
    return ProviderUnavailableError(f"provider {name} was ended: {reason}{story}", provider=name, reason=reason)


def _read(fd: int, ends: float, keep: bool) -> str:
    if fd < 0:
        return ""
    try:
        while not complete(_text(fd)) and time.monotonic() < ends:
            time.sleep(LOOK)
        text = _text(fd)
        if not keep and complete(text):
            os.ftruncate(fd, 0)  # should the worker crash later, this is not of then
        return text.strip()
    finally:
        os.close(fd)


def _text(fd: int) -> str:
    size = os.fstat(fd).st_size
    return os.pread(fd, KEPT_BYTES, max(0, size - KEPT_BYTES)).decode(errors="replace")
