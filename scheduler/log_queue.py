"""Hands to `logging` what a fleet has to tell, on a thread of its own: its workers' output, and its own warnings.

Handlers of logging are anyone's: one that is slow, or that blocks for good, must not stop those who watch the workers
and mend what has died. So texts wait in a queue for a thread that does nothing else; what does not fit is left out, and
its count is told with what comes next. Closing waits for the queue, but not for long. A handler that raises ends the
thread, which `threading.excepthook` tells; the next text starts another.

    outrider.worker.<name>   INFO: the lines of a worker's standard output and error
    outrider.fleet           what the monitor tells: workers that stall, break the protocol, cannot be reached
    outrider.session         what a supervisor tells: deaths, and what comes of them
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence

QUEUED = 1 << 20
"""How many characters may wait in one fleet, those that are being handled aside."""
CLOSE_SECONDS = 2.0

Record = tuple[int, str]
"""Level and text."""


class LogQueue:
    """One fleet's. Any thread may put; the thread that logs starts with the first text."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[str, Sequence[Record], int] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of what follows; never held while anything is waited for
        self._thread: threading.Thread | None = None
        self._waiting = 0  # characters
        self._left_out: dict[str, int] = {}  # texts, by logger
        self._closed = False

    def logger(self, name: str) -> QueuedLogger:
        """What stands for the logger of that name, and never waits for its handlers."""
        return QueuedLogger(self, name)

    def put(self, name: str, records: Sequence[Record]) -> None:
        """Have these logged by the logger `name` soon, in order, without waiting; at once and here after `close`."""
        if not records:
            return
        size = sum(len(text) + 100 for _, text in records)
        with self._lock:
            if not self._closed:
                self._keep(name, records, size)
                return
        _log(name, records)

    def close(self) -> None:
        """Log what waits and end the thread; a handler that blocks keeps it, and is not waited for beyond 2 s."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            if threading.current_thread() is not thread:  # a handler may close a session
                thread.join(CLOSE_SECONDS)

    def _keep(self, name: str, records: Sequence[Record], size: int) -> None:
        if self._waiting + size > QUEUED:
            self._left_out[name] = self._left_out.get(name, 0) + len(records)
            return
        left_out = self._left_out.pop(name, 0)
        if left_out:
            notice = f"{left_out} lines were left out here: the handlers of logging are too slow"
            records = [(logging.WARNING, notice), *records]
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="outrider-log", daemon=True)
            self._thread.start()
        self._waiting += size
        self._queue.put((name, records, size))

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if item is None:
                return
            name, records, size = item
            with self._lock:
                self._waiting -= size
            _log(name, records)


class QueuedLogger:
    """The part of `logging.Logger` that is used here. Arguments are formatted at once, so nothing is kept alive."""

    def __init__(self, queue: LogQueue, name: str) -> None:
        self._queue = queue
        self._name = name

    def warning(self, text: str, *args: object) -> None:
        """As `Logger.warning`, without waiting."""
        self._queue.put(self._name, [(logging.WARNING, text % args if args else text)])

    def error(self, text: str, *args: object) -> None:
        """As `Logger.error`, without waiting."""
        self._queue.put(self._name, [(logging.ERROR, text % args if args else text)])


def _log(name: str, records: Sequence[Record]) -> None:
    logger = logging.getLogger(name)
    for level, text in records:
        logger.log(level, "%s", text)
