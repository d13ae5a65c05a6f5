"""Run slots, handed out in the order in which callers asked, so that none of many callers starves.

Who asks leaves a ticket; `take` is a ticket that a thread waits on, `enqueue` takes any other. At most `limit` tickets
wait: with `reject` more are refused, else `enqueue` blocks until there is room (a thread in `take` waits anyway).

A signal's handler may raise at any moment, Ctrl-C within `take` or `give` included. So an item is always in the list of
free ones or in a Hold, and goes from one to the other without a call of Python's, which would look for signals when it
returns: a `for` takes the next item and stores it without. `give` does nothing for a Hold without an item, so whoever
was interrupted gives once more.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from outrider.scheduler.errors import QueueFullError
from outrider.scheduler.watching import Watch

T = TypeVar("T")
R = TypeVar("R")
_NOTHING = object()


class Hold(Generic[T]):
    """What one caller has: an item, or None. (Write `Hold()`: `Hold[Slot]()` takes a microsecond.)"""

    item: T | None = None


class Ticket(Generic[T]):
    """A place in the queue. `hold` gets the item; `only`: the one it waits for, None for any.

    `begun`: its owner knows that it was served; to be set before the item is given back.
    """

    def __init__(self, hold: Hold[T], only: T | None = None) -> None:
        self.hold = hold
        self.only = only
        self.begun = False

    def served(self) -> None:
        """There is an item in `hold` now. Called within the queue's lock: must not block, raise or come back.

        Called again if a signal came meanwhile, unless it has `begun`.
        """
        raise NotImplementedError


class _Waiting(Ticket[T]):
    """A ticket that a thread waits on."""

    def __init__(self, hold: Hold[T], only: T | None = None) -> None:
        super().__init__(hold, only)
        self._called = threading.Lock()
        self._called.acquire()

    def served(self) -> None:
        with contextlib.suppress(RuntimeError):  # it was called already, and has not waited yet
            self._called.release()

    def wait(self, watch: Watch | None = None) -> None:
        if watch is None:
            self._called.acquire()
        else:
            watch.waker = self.served
            while self.hold.item is None:
                left = watch.left("while it waited for a run slot")
                self._called.acquire(timeout=-1 if left is None else left)
        self.begun = True


class Slots(Generic[T]):
    """A fixed set of items. Raises QueueFullError where a queue that rejects is full."""

    def __init__(
        self,
        items: Sequence[T],
        limit: int | None = None,
        reject: bool = False,
        group: Callable[[T], Hashable] | None = None,
        shut: Callable[[T], bool] | None = None,
    ) -> None:
        """`group`: what an item belongs to; items of the group with most of them free are taken first.

        `shut`: with groups, whether an item is of no use now: it is not taken while others are. Call `look` when that
        has changed.
        """
        self.items = tuple(items)
        self._group = group
        self._shut = shut
        self._limit = limit
        self._reject = reject
        # The one used last is taken first: its places are bound and warm. Popped and appended without the lock where
        # nobody waits: who waits leaves its ticket first and then looks for a free item, who gives does the reverse.
        self._free = list(reversed(items))
        self._next = iter(self._free.pop, _NOTHING)  # IndexError if nothing is free
        self._waiting: deque[Ticket[T]] = deque()
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._exclusive = threading.Lock()
        self._all: list[Hold[T]] = []  # of who has `_exclusive`
        self._blocked = 0  # threads that wait for room
        self._closed = False

    def take(self, hold: Hold[T], watch: Watch | None = None) -> T:
        """Put the next free item into `hold`, first come, first served; returns it.

        Raises RunTimeoutError and RunCancelledError when `watch` says so. Whatever it raises, `give(hold)` after it.
        """
        if not self._waiting:
            if self._group is None:
                try:
                    for hold.item in self._next:  # `_take_free`, without the call
                        return hold.item
                except IndexError:
                    pass
            elif self._take_free(hold):
                assert hold.item is not None
                return hold.item
        ticket = _Waiting(hold)
        try:
            with self._lock:
                if self._reject and not self._free and self._full():
                    raise self._refusal()
                self._waiting.append(ticket)
                self._serve()
            ticket.wait(watch)
        except BaseException:  # KeyboardInterrupt, or the watch
            self._leave(ticket)
            raise
        assert hold.item is not None
        return hold.item

    def enqueue(self, ticket: Ticket[T], watch: Watch | None = None) -> bool:
        """Serve the ticket now if an item is free, else in its turn; blocks for room in the queue unless it rejects.

        False if the queue was closed: the ticket is not served then. Raises RunTimeoutError and RunCancelledError when
        `watch` says so, of a cancellation after `nudge`.
        """
        with self._lock:
            if self._full() and not self._free:
                if self._reject:
                    raise self._refusal()
                self._blocked += 1
                try:
                    while self._full() and not self._closed:
                        self._room.wait(None if watch is None else watch.left("while it waited for room in the queue"))
                finally:
                    self._blocked -= 1
            if self._closed:
                return False
            self._waiting.append(ticket)
            self._serve()
        return True

    def give(self, hold: Hold[T], last: bool = False) -> None:
        """Give what is held back, if anything: to whoever waits longest for it, if any.

        `last`: it is busy still, and better taken after all others that are free.
        """
        item = hold.item
        if item is not None:
            free = self._free
            if last:
                free[:0] = (item,)  # no call, as in `append`: both or neither
            else:
                free += (item,)
            hold.item = None
        if self._waiting:
            with self._lock:
                self._serve()

    def alone(self, work: Callable[[], R], items: Sequence[T] | None = None) -> R:
        """What `work()` returns, called with every one of `items` taken (`take_all`), which come back whatever it does.

        One Ctrl-C may come at any moment of all this.
        """
        mine: list[Hold[T]] | None = None
        try:
            for mine in map(self.take_all, (items,)):  # a call could be interrupted when it has returned
                result = work()
                self._give_all(mine)
        except BaseException:
            if mine is not None:
                self._give_all(mine)
            raise
        return result

    def take_all(self, items: Sequence[T] | None = None) -> list[Hold[T]]:
        """Take every one of `items` (None: of all), each as soon as it comes back; ended by `give_all`.

        One caller at a time; those who wait for any item come after it, as its end may be what they need.
        """
        tickets = [_Waiting(Hold[T](), item) for item in (self.items if items is None else items)]
        held = False
        try:
            for held in map(self._exclusive.acquire, (True,)):
                self._all = [ticket.hold for ticket in tickets] if held else []
            with self._lock:
                self._waiting.extendleft(tickets)
                self._serve()
            for ticket in tickets:
                ticket.wait()
        except BaseException:  # KeyboardInterrupt
            if held:
                for ticket in tickets:
                    self._leave(ticket)
                self.give_all()
            raise
        return self._all

    def give_all(self) -> None:
        """Give back what `take_all` took."""
        self._give_all(self._all)

    def _give_all(self, holds: list[Hold[T]]) -> None:
        """Give back what a `take_all` took, or the rest of it."""
        for hold in holds:
            self.give(hold)
        if self._all is holds:
            self._all = []
            self._exclusive.release()

    def look(self) -> None:
        """Serve those who wait with what is no longer shut, or shut like all the rest."""
        if self._waiting:
            with self._lock:
                self._serve()

    def nudge(self) -> None:
        """Have those who wait for room in the queue look at their watches."""
        if self._blocked:
            with self._lock:
                self._room.notify_all()

    def withdraw(self, ticket: Ticket[T]) -> bool:
        """Take a ticket out of the queue that was not served; False if it was, or is not there."""
        with self._lock:
            if ticket not in self._waiting or ticket.hold.item is not None:
                return False
            self._waiting.remove(ticket)
            if self._blocked:
                self._room.notify_all()
        return True

    def close(self) -> list[Ticket[T]]:
        """Enqueue nothing any more; returns the tickets that no thread waits on, which leave the queue."""
        with self._lock:
            self._closed = True
            left = [ticket for ticket in self._waiting if not isinstance(ticket, _Waiting)]
            for ticket in left:
                self._waiting.remove(ticket)
            self._room.notify_all()
        return left

    def _leave(self, ticket: _Waiting[T]) -> None:
        """Take a ticket out of the queue; what it was given stays in its hold."""
        with self._lock:
            if ticket in self._waiting:
                self._waiting.remove(ticket)

    def _serve(self) -> None:
        """Match free items and tickets, the earliest first. Called with the lock held."""
        for ticket in list(self._waiting):
            if not ticket.begun:
                if ticket.hold.item is None and not self._take_free(ticket.hold, ticket.only):
                    if not self._free:
                        break
                    continue
                ticket.served()
            self._waiting.remove(ticket)
        if self._blocked:
            self._room.notify_all()

    def _take_free(self, hold: Hold[T], only: T | None = None) -> bool:
        """Put a free item into `hold`; False if none is free, or `only` is not."""
        if only is None and self._group is None:
            try:
                for hold.item in self._next:
                    break
            except IndexError:
                return False
            return True
        for item in self._spread() if only is None else (only,):
            try:
                for _ in map(self._free.remove, (item,)):
                    hold.item = item
                    return True
            except ValueError:  # not free, or taken this moment by who found nobody waiting
                continue
        return False

    def _spread(self) -> list[T]:
        """Free items, those of the group with most of them first; of these the one used last."""
        group = self._group
        assert group is not None
        free = list(reversed(self._free))
        count: dict[Hashable, int] = {}
        if self._shut is not None and not all(map(self._shut, self.items)):
            free = [item for item in free if not self._shut(item)]
        for item in free:
            count[group(item)] = count.get(group(item), 0) + 1
        return sorted(free, key=lambda one: count[group(one)], reverse=True)

    def _full(self) -> bool:
        return self._limit is not None and len(self._waiting) >= self._limit

    def _refusal(self) -> QueueFullError:
        waiting = len(self._waiting)
        return QueueFullError(
            f"{waiting} runs wait for one of {len(self.items)} slots already; try again later, or raise "
            "SessionOptions(max_in_flight=..., queue_size=...)",
            queue_size=self._limit,
        )
