"""What ends the wait for a run early: its deadline, that of its partitions, a CancelToken.

A `Watch` is made when the caller asks for a run and accompanies it through the queue, a reload, and its time in a slot.
It has no thread: whoever waits asks it how long to block, and is woken by a token. A run without any of these has no
Watch, and waits as if there were none.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

from outrider.providers.wire.errors import RunCancelledError
from outrider.scheduler.cancelling import CancelToken
from outrider.scheduler.errors import RunTimeoutError
from outrider.scheduler.options import RunOptions, SessionOptions
from outrider.scheduler.stalls import Stall

LOOKS = 4  # in the time that a partition may take
LONGEST = 86400.0  # seconds that anybody blocks at once: what the system can count
UNLIMITED: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
"""The context of a run without a Watch."""


class Watch:
    """The limits of one run. A context manager: `wake` is called when one of its tokens is used.

    `deadline`: seconds from now, None for no limit; `partition_deadline` likewise, for each partition, which `stall`
    measures. `ends`: the deadline on `time.monotonic`. `tokens`: any of them cancels the run. `waker`: what has whoever
    waits now look again; whoever begins to wait sets it.
    """

    def __init__(
        self,
        deadline: float | None,
        partition_deadline: float | None,
        tokens: Iterable[CancelToken] = (),
    ) -> None:
        self.deadline = deadline
        self.stall = None if partition_deadline is None else Stall(partition_deadline)
        self.ends = None if deadline is None else time.monotonic() + deadline
        self.waker: Callable[[], object] | None = None
        self._tokens = tuple(tokens)

    def open(self) -> Watch:
        """Hear of the tokens' use until `close`."""
        for token in self._tokens:
            token._attach(self.wake)
        return self

    def close(self) -> None:
        """Let go of tokens and of who waits. Idempotent."""
        self.waker = None
        for token in self._tokens:
            token._detach(self.wake)

    def __enter__(self) -> Watch:
        """For a caller that waits for its run. Raises RunCancelledError if a token was used before."""
        self.open()
        if self.cancelled:
            self.close()
            self.left("before it began")
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def wake(self) -> None:
        """Have whoever waits look again."""
        waker = self.waker
        if waker is not None:
            waker()

    @property
    def cancelled(self) -> bool:
        """Whether a token was used."""
        return any(token.cancelled for token in self._tokens)

    @property
    def limited(self) -> bool:
        """Whether it may end while it waits in a queue, other than by its Future."""
        return self.ends is not None or len(self._tokens) > 1

    @property
    def over(self) -> bool:
        """Whether the run is cancelled, or late."""
        return self.cancelled or (self.ends is not None and time.monotonic() >= self.ends)

    def left(self, where: str) -> float | None:
        """Seconds left to block, None for no limit. Raises RunTimeoutError, RunCancelledError, of a run not sent yet.

        `where`: what it does now, 'while it waited for ...'.
        """
        if self.cancelled:
            raise RunCancelledError(f"the run was cancelled {where}", reason=f"cancelled {where}")
        if self.ends is None:
            return None
        left = self.ends - time.monotonic()
        if left <= 0:
            raise RunTimeoutError(
                f"the run's deadline of {self.deadline:g} s passed {where}; give it more time, or allow more runs in "
                "flight",
                deadline=self.deadline,
                running=[],
            )
        return min(left, LONGEST)

    def block(self) -> float | None:
        """Seconds until somebody must look at the run in flight; None to block until woken."""
        times = [] if self.ends is None else [max(0.0, self.ends - time.monotonic())]
        if self.stall is not None:
            times.append(self.stall.seconds / LOOKS)
        return min([*times, LONGEST]) if times else None


def watch_for(given: RunOptions | None, session: SessionOptions, *tokens: CancelToken) -> Watch | None:
    """The Watch of a run that begins now; None if nothing limits it. What the run says goes before the session."""
    deadline, partition = session.deadline, session.partition_deadline
    if given is not None:
        deadline = deadline if given.deadline is None else given.deadline
        partition = partition if given.partition_deadline is None else given.partition_deadline
        tokens = (*tokens, given.terminator) if given.cancel is None else (*tokens, given.terminator, given.cancel)
    return Watch(deadline, partition, tokens) if deadline or partition or tokens else None
