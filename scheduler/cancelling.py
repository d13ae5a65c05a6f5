"""CancelToken: one thread asks runs of others to stop.

It has no lock: a signal's handler may call `cancel` in the middle of anything. A run leaves its `wake` here before it
looks whether the token was used, and `cancel` says so before it looks who is there, so that one of the two sees it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from outrider.scheduler.pickling import refusing


class CancelToken:
    """Cancels the runs it was given to, those under way and those to come. May be used from any thread, for many runs,
    more than once, and by a signal's handler."""

    def __init__(self) -> None:
        self._cancelled = False
        self._waiting: list[Callable[[], object]] = []

    def cancel(self) -> None:
        """Ask the runs to stop; each raises RunCancelledError within milliseconds."""
        self._cancelled = True
        for wake in tuple(self._waiting):
            wake()

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled

    def _attach(self, wake: Callable[[], object]) -> None:
        """Call `wake` when the token is used; it must not block. A token that was used already calls nobody."""
        self._waiting.append(wake)

    def _detach(self, wake: Callable[[], object]) -> None:
        with contextlib.suppress(ValueError):  # it was interrupted before it came here
            self._waiting.remove(wake)

    __reduce__ = refusing("CancelToken", "it cancels runs of this process; make one in the other process")

    def __repr__(self) -> str:
        return f"<CancelToken {'cancelled' if self.cancelled else 'not cancelled'}>"
