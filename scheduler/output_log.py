"""Hands what workers write to `logging`, as `outrider.worker.<name>`, on a thread of its own.

Handlers of logging are anyone's: one that is slow, or that blocks for good, must not stop the monitor, which watches
the workers meanwhile. So lines wait in a queue for a thread that does nothing else; what does not fit is left out, and
its count is told with what comes next. Closing waits for the queue, but not for long. A handler that raises ends the
thread, which `threading.excepthook` tells; the next line starts another.
"""

from __future__ import annotations

import logging
import queue
import threading

from outrider.scheduler.output import Record

QUEUED = 1 << 20
"""How many characters may wait, of all workers of a fleet, those of the lines being handled aside."""
CLOSE_SECONDS = 2.0


class OutputLog:
    """`wanted`, `put` and `close` are for one thread, the monitor's. The thread starts with the first line."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[str, list[Record], int] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._put = 0  # characters, counted by the monitor's thread
        self._done = 0  # the same, counted by ours
        self._left_out: dict[str, int] = {}  # lines, by worker

    @staticmethod
    def wanted(name: str) -> bool:
        """Whether logging would do anything with the lines of this worker."""
        return _logger(name).isEnabledFor(logging.INFO)

    def put(self, name: str, records: list[Record]) -> None:
        """Have these logged soon, in order; at once, without waiting."""
        if not records:
            return
        size = sum(len(text) + 100 for _, text in records)
        if self._put - self._done + size > QUEUED:
            self._left_out[name] = self._left_out.get(name, 0) + len(records)
            return
        left_out = self._left_out.pop(name, 0)
        if left_out:
            notice = f"{left_out} lines of its output were left out: the handlers of logging are too slow"
            records = [(logging.WARNING, notice), *records]
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="outrider-output", daemon=True)
            self._thread.start()
        self._put += size
        self._queue.put((name, records, size))

    def close(self) -> None:
        """Log what waits and end the thread; a handler that blocks keeps it, and is not waited for beyond 2 s."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            if threading.current_thread() is not thread:  # a handler may close a session
                thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if item is None:
                return
            name, records, size = item
            self._done += size
            logger = _logger(name)
            for level, text in records:
                logger.log(level, "%s", text)


def _logger(name: str) -> logging.Logger:
    return logging.getLogger(f"outrider.worker.{name}")
