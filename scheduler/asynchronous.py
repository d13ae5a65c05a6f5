"""`run_async`: runs that begin in their turn and end in a thread of the session, one thread per run in flight.

A run that is asked for waits in the same queue as callers of `run`. When it gets a slot, a thread that is idle begins
it, blocks on the slot's doorbell as any caller does, and resolves the Future. Slots are given in the order of asking.
One that is cancelled or late while it waits leaves the queue, and such a thread ends it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

from outrider.scheduler.cancelling import CancelToken
from outrider.scheduler.closing import closed_error
from outrider.scheduler.errors import RunCancelledError
from outrider.scheduler.options import RunOptions, SessionOptions
from outrider.scheduler.pickling import refusing
from outrider.scheduler.replica import Slot, busy
from outrider.scheduler.slots import Hold, Slots, Ticket
from outrider.scheduler.watching import Watch, watch_for

log = logging.getLogger("outrider.session")

CALLBACK_SECONDS = 5.0  # that `close` waits for callbacks, which may wait for who closes


class _Condition(threading.Condition):
    """For a Future, which has one: its own `__enter__` and `__exit__` are no functions of Python's but the lock's.

    A signal's handler may raise within the former. Then the lock is left locked, and the thread that is to set the
    result hangs, with a run slot.
    """

    __enter__ = property(operator.attrgetter("_lock.__enter__"))
    __exit__ = property(operator.attrgetter("_lock.__exit__"))


class RunFuture(concurrent.futures.Future[list[Any]]):
    """The outputs of a run to come. Wait with `result(timeout)`, or `await` it in asyncio. `token` cancels the run."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = _Condition()
        self.token = CancelToken()
        self._open = True  # `cancel` may still have an effect

    def cancel(self) -> bool:
        """Cancel the run; False if it has ended.

        Before it has begun the Future is cancelled at once. Afterwards the run is given up, and the Future ends with
        RunCancelledError within milliseconds. Cancelling a task of asyncio that awaits it does the same.
        """
        if super().cancel():
            return True
        with self._condition:
            if not self._open:
                return False
            self.token._cancelled = True
        self.token.cancel()
        return True

    def close(self) -> bool:
        """It ends now, and `cancel` comes too late; False if it was cancelled before. Called by who runs it."""
        with self._condition:
            self._open = False
            return not self.token.cancelled

    __reduce__ = refusing("RunFuture", "its run belongs to this process; pickle its result() instead")

    def __await__(self) -> Generator[Any, None, list[Any]]:
        return asyncio.wrap_future(self).__await__()


class Job(Ticket[Slot]):
    """A run that was asked for. `work(hold, watch)` runs it in the slot that `hold` has; `watch` may end it early.

    It keeps its session alive until it has ended, through `work`.
    """

    def __init__(
        self,
        queue: AsyncRuns,
        work: Callable[[Hold[Slot], Watch], list[Any]],
        callback: Callable[[list[Any], Any, str], object] | None,
        user_data: Any,
        given: RunOptions | None,
        session: SessionOptions,
    ) -> None:
        super().__init__(Hold())
        self.future = RunFuture()
        watch = watch_for(given, session, self.future.token)
        assert watch is not None
        self.watch = watch
        self._queue = queue
        self._work = work
        self._callback = callback
        self._user_data = user_data

    def served(self) -> None:
        self._queue.begin(self)

    def run(self, slots: Slots[Slot]) -> None:
        """Run it, unless it was cancelled, and tell the caller. It has no slot if it is too late for that."""
        if not self.future.set_running_or_notify_cancel():
            slots.give(self.hold)
            self.watch.close()
            return
        try:
            try:
                self.watch.left("while it waited for its turn")
                results = self._work(self.hold, self.watch)
            except BaseException:
                slots.give(self.hold, last=busy(self.hold))
                raise
            slots.give(self.hold)
            if not self.future.close():
                raise RunCancelledError("the run was cancelled as it ended", reason="cancelled as it ended")
        except BaseException as error:  # whatever it is belongs to the caller
            self.fail(error)
        else:
            self.watch.close()
            self._call_back(results, "")
            self.future.set_result(results)

    def fail(self, error: BaseException) -> None:
        """It ends without a result."""
        self.watch.close()
        if not self.future.close() and not isinstance(error, RunCancelledError):
            cause, when = error, "cancelled as it failed"
            error = RunCancelledError(f"the run was {when}", reason=when)
            error.__cause__ = cause
        self._call_back([], str(error) or type(error).__name__)
        self.future.set_exception(error)

    def _call_back(self, results: list[Any], error: str) -> None:
        if self._callback is None:
            return
        try:
            self._callback(results, self._user_data, error)
        except Exception:  # anyone's callback: the run has ended all the same
            log.exception("the callback of a run_async raised")


class AsyncRuns:
    """The threads behind `run_async`, started when none is idle: about as many as there are slots.

    They hold no reference to the session, so that one that is dropped is closed.
    """

    def __init__(self, slots: Slots[Slot], later: Callable[[float, Callable[[], None]], object]) -> None:
        """`later(seconds, action)` has a thread that never blocks call `action` after so many seconds."""
        self._slots = slots
        self._later = later
        self._limited: list[Job] = []  # those in the queue that may have to leave it
        self._alarm: float | None = None  # when `_expire` will be called
        self._begun: deque[Job] = deque()
        self._lock = threading.Lock()  # in `with`: a signal within Condition.__enter__ would leave it locked for ever
        self._wake = threading.Condition(self._lock)
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False

    def submit(self, job: Job) -> None:
        """Queue a run. Raises QueueFullError where the queue rejects, SessionClosedError once it is closed, and what
        its Watch raises while it waits for room."""
        watch = job.watch.open()
        watch.waker = self._token_used
        try:
            if not self._slots.enqueue(job, watch):
                raise closed_error("session", "the session was closed")
        except BaseException:
            watch.close()
            raise
        if watch.limited:
            with self._lock:
                if not job.begun:
                    self._limited.append(job)
            self._expire()

    def _token_used(self) -> None:
        """A run is cancelled. Called by anyone, a signal's handler included."""
        self._later(0, self._expire)

    def _expire(self) -> None:
        """Have the runs that are cancelled or late leave the queue; ask to be called again when the next one is."""
        with self._lock:
            over = [job for job in self._limited if job.watch.over]
            ends = [job.watch.ends for job in self._limited if job.watch.ends is not None and job not in over]
            first = min(ends, default=None)
            ask = first is not None and first != self._alarm
            self._alarm = first
        for job in over:
            if self._slots.withdraw(job):
                try:
                    self.begin(job)
                except RuntimeError as error:  # no thread can be started: one that becomes idle ends it
                    log.error("a run that is over ends late: %s", str(error))
        self._slots.nudge()
        if ask and first is not None:
            self._later(first - time.monotonic(), self._expire)

    def begin(self, job: Job) -> None:
        """The job has a slot now. May be called again, see `Ticket.served`."""
        with self._lock:
            if not job.begun and job not in self._begun:
                self._begun.append(job)
            if self._idle < len(self._begun):
                thread = threading.Thread(target=self._loop, name="outrider-run", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._wake.notify()

    def close(self, error: BaseException) -> None:
        """Fail what has not begun with `error`, and wait for what has. Idempotent; runs in flight have been told.

        A callback that does not return is left behind after `CALLBACK_SECONDS`, which is logged.
        """
        for ticket in self._slots.close():
            assert isinstance(ticket, Job)
            with self._lock:  # a signal may have come when it had been given a slot, and before that was told here
                if ticket.begun:
                    continue
                if ticket in self._begun:
                    self._begun.remove(ticket)
            self._slots.give(ticket.hold)
            if ticket.future.set_running_or_notify_cancel():
                ticket.fail(error)
        with self._lock:
            self._closed = True
            self._limited.clear()
            self._wake.notify_all()
        deadline = time.monotonic() + CALLBACK_SECONDS
        for thread in self._threads:
            if thread.ident is not None:  # else a signal came before it was started
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    log.warning("a session is closed while a callback of its run_async still runs (%s)", thread.name)

    def _loop(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
                self._wake.wait_for(lambda: self._begun or self._closed)
                self._idle -= 1
                if not self._begun:
                    return
                job = self._begun.popleft()
                job.begun = True
                if job in self._limited:
                    self._limited.remove(job)
            job.run(self._slots)
            del job  # an idle thread keeps no session alive
