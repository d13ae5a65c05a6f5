"""Closing: once, from wherever, by whomever; and what happens when the interpreter exits.

A session or fleet is closed by its user, by two threads at once, by a callback in a thread of the session's own, by the
handler of a signal that came in the middle of a run, or by the garbage collector, in any thread within any call. Who is
not inside this library waits until all is closed. Who is (a frame of ours lies further out) may hold a lock or a run
slot that closing waits for: then another thread closes, and `close` returns at once.

At the interpreter's exit nobody waits for results any more. Workers are stopped, the busy ones after a moment (those
whose provider is in its `close` get their time), and the system takes back the rest. Daemon threads, which Python stops
in the middle of whatever they do, stop where they ask a closed session for something: an error would only be printed.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from types import FrameType
from typing import Any

from outrider.scheduler.errors import ForkedSessionError, SessionClosedError

log = logging.getLogger("outrider.session")

HURRIED_SECONDS = 0.5  # what a busy worker gets to stop by itself after Ctrl-C, or at the interpreter's exit
_OURS = ("outrider.scheduler.", "outrider.shm.", "outrider.providers.")
_DOORS = ("close", "__exit__")  # what a user calls to close

_open: dict[int, Closing] = {}  # by id
_exiting: int | None = None  # the thread in which the interpreter exits


class Closing:
    """What is closed once, at the latest when its `owner` is dropped, which it must not know.

    Subclasses say how; each of their methods may be called again after an interrupt.
    """

    def __init__(self, owner: object) -> None:
        self.pid = os.getpid()
        self.closed = False  # or being closed
        self._done = False
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(owner, self.close)
        self._finalizer.atexit = False  # `_leave_all` knows better
        _open[id(self)] = self

    def release(self) -> None:
        """Give back everything, and wait for what that takes."""
        raise NotImplementedError

    def hurry(self) -> None:
        """Do not wait long for workers that are busy. Takes no lock."""

    def last_words(self) -> None:
        """First thing at the interpreter's exit, while workers still answer."""

    def stop(self) -> None:
        """Then: have workers stop; does not wait for them."""

    def wait(self) -> None:
        """At last: wait until they have."""

    def close(self) -> None:
        """Close, and wait for it unless the caller is inside this library. In a fork it does nothing."""
        if os.getpid() != self.pid or _exiting is not None:
            return
        self.closed = True
        if self._done:
            return
        if _inside(sys._getframe(1)):
            threading.Thread(target=self._close_aside, name="outrider-close", daemon=True).start()
        else:
            self.close_here()

    def close_here(self) -> None:
        """Close in this thread, after one that does already."""
        self.closed = True
        held = False
        try:
            for held in map(self._lock.acquire, (True,)):  # Ctrl-C may follow a call, see `slots.py`
                if held and not self._done:
                    self.release()
                    self._done = True
                    self._finalizer.detach()
                    _open.pop(id(self), None)
        finally:
            if held:
                self._lock.release()

    def _close_aside(self) -> None:
        try:
            self.close_here()
        except Exception:
            log.exception("a session or fleet could not be closed")

    def check(self, what: str, message: str) -> None:
        """Raises ForkedSessionError in a fork, SessionClosedError (`what` and `message`) when closed."""
        check_fork(self.pid)
        if self.closed:
            raise closed_error(what, message)


def check_fork(owner: int) -> None:
    """Raises ForkedSessionError unless this process is `owner`."""
    if os.getpid() != owner:
        raise ForkedSessionError(
            f"this session belongs to process {owner}; make a new one in this forked process",
            owner_pid=owner,
            pid=os.getpid(),
        )


def closed_error(what: str, message: str) -> SessionClosedError:
    """The error for what was closed. At the interpreter's exit it returns in the thread that exits only."""
    if exiting() and threading.get_ident() != _exiting:
        threading.Event().wait()
    return SessionClosedError(message, what=what)


def exiting() -> bool:
    """Whether the interpreter exits, and all sessions were closed for that."""
    return _exiting is not None


def _inside(frame: FrameType | None) -> bool:
    """Whether a frame of this library lies around the call that closes."""
    while frame is not None and _is_ours(frame) and frame.f_code.co_name in _DOORS:
        frame = frame.f_back
    while frame is not None:
        if _is_ours(frame):
            return True
        frame = frame.f_back
    return False


def _is_ours(frame: FrameType) -> bool:
    name: Any = frame.f_globals.get("__name__")
    return isinstance(name, str) and name.startswith(_OURS)


@atexit.register
def _leave_all() -> None:
    """The interpreter exits; only daemon threads run beside this one."""
    global _exiting
    _exiting, here = threading.get_ident(), os.getpid()
    left = [one for one in list(_open.values()) if one.pid == here]
    for one in left:
        one.closed = True
        one.hurry()
    for step in ("last_words", "stop", "wait"):
        for one in left:
            try:
                getattr(one, step)()
            except Exception:  # the others are closed all the same
                log.exception("a session or fleet could not be closed at exit")
