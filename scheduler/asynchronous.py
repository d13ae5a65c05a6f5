"""`run_async`: runs that begin in their turn and end in a thread of the session, one thread per run in flight.

A run that is asked for waits in the same queue as callers of `run`. When it gets a slot, a thread that is idle begins
it, blocks on the slot's doorbell as any caller does, and resolves the Future. Slots are given in the order of asking.
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

from outrider.scheduler.closing import closed_error
from outrider.scheduler.pickling import refusing
from outrider.scheduler.replica import Slot
from outrider.scheduler.slots import Hold, Slots, Ticket

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
    """The outputs of a run to come. Wait with `result(timeout)`, or `await` it in asyncio.

    `cancel` works until the run has begun.
    """

    def __init__(self) -> None:
        super().__init__()
        self._condition = _Condition()

    __reduce__ = refusing("RunFuture", "its run belongs to this process; pickle its result() instead")

    def __await__(self) -> Generator[Any, None, list[Any]]:
        return asyncio.wrap_future(self).__await__()


class Job(Ticket[Slot]):
    """A run that was asked for. `work(hold)` runs it in the slot that `hold` has.

    It keeps its session alive until it has ended, through `work`.
    """

    def __init__(
        self,
        queue: AsyncRuns,
        work: Callable[[Hold[Slot]], list[Any]],
        callback: Callable[[list[Any], Any, str], object] | None,
        user_data: Any,
    ) -> None:
        super().__init__(Hold())
        self.future = RunFuture()
        self._queue = queue
        self._work = work
        self._callback = callback
        self._user_data = user_data

    def served(self) -> None:
        self._queue.begin(self)

    def run(self, slots: Slots[Slot]) -> None:
        """Run it, unless it was cancelled, and tell the caller."""
        if not self.future.set_running_or_notify_cancel():
            slots.give(self.hold)
            return
        try:
            try:
                results = self._work(self.hold)
            finally:
                slots.give(self.hold)
        except BaseException as error:  # whatever it is belongs to the caller
            self.fail(error)
        else:
            self._call_back(results, "")
            self.future.set_result(results)

    def fail(self, error: BaseException) -> None:
        """It ends without a result."""
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

    def __init__(self, slots: Slots[Slot]) -> None:
        self._slots = slots
        self._begun: deque[Job] = deque()
        self._lock = threading.Lock()  # in `with`: a signal within Condition.__enter__ would leave it locked for ever
        self._wake = threading.Condition(self._lock)
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False

    def submit(self, job: Job) -> None:
        """Queue a run. Raises QueueFullError where the queue rejects, SessionClosedError once it is closed."""
        if not self._slots.enqueue(job):
            raise closed_error("session", "the session was closed")

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
            job.run(self._slots)
            del job  # an idle thread keeps no session alive
