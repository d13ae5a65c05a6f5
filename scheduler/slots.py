"""Run slots, handed out in the order in which callers asked, so that none of many callers starves.

Who asks leaves a ticket; `take` is a ticket that a thread waits on, `enqueue` takes any other. At most `limit` tickets
wait: with `reject` more are refused, else `enqueue` blocks until there is room (a thread in `take` waits anyway).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from outrider.scheduler.errors import QueueFullError

T = TypeVar("T")


class Ticket(Generic[T]):
    """A place in the queue. `only`: the one item it waits for, None for any."""

    def __init__(self, only: T | None = None) -> None:
        self.only = only

    def served(self, item: T) -> None:
        """The item is this ticket's now. Called once, within the queue's lock: must not block, raise or come back."""
        raise NotImplementedError


class _Waiting(Ticket[T]):
    """A ticket that a thread waits on."""

    def __init__(self, only: T | None) -> None:
        super().__init__(only)
        self.called = threading.Lock()
        self.called.acquire()
        self.item: T | None = None

    def served(self, item: T) -> None:
        self.item = item
        self.called.release()


class Slots(Generic[T]):
    """A fixed set of items. Raises QueueFullError where a queue that rejects is full."""

    def __init__(
        self,
        items: Sequence[T],
        limit: int | None = None,
        reject: bool = False,
        group: Callable[[T], Hashable] | None = None,
    ) -> None:
        """`group`: what an item belongs to; items of the group with most of them free are taken first."""
        self.items = tuple(items)
        self._group = group
        self._limit = limit
        self._reject = reject
        # The one used last is taken first: its places are bound and warm. Popped and appended without the lock where
        # nobody waits: who waits leaves its ticket first and then looks for a free item, who gives does the reverse.
        self._free = list(reversed(items))
        self._pop = self._free.pop if group is None else self._pop_spread  # IndexError if nothing is free
        self._waiting: deque[Ticket[T]] = deque()
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._exclusive = threading.Lock()
        self._blocked = 0  # threads that wait for room
        self._closed = False

    def take(self) -> T:
        """The next free item, first come, first served."""
        if not self._waiting:
            try:
                return self._pop()
            except IndexError:
                pass
        ticket: _Waiting[T] = _Waiting(None)
        try:
            with self._lock:
                if self._reject and not self._free and self._full():
                    raise self._refusal()
                self._waiting.append(ticket)
                self._serve()
            ticket.called.acquire()
        except BaseException:  # KeyboardInterrupt
            self._leave(ticket)
            raise
        assert ticket.item is not None
        return ticket.item

    def enqueue(self, ticket: Ticket[T]) -> bool:
        """Serve the ticket now if an item is free, else in its turn; blocks for room in the queue unless it rejects.

        False if the queue was closed: the ticket is not served then.
        """
        with self._lock:
            if self._full() and not self._free:
                if self._reject:
                    raise self._refusal()
                self._blocked += 1
                self._room.wait_for(lambda: not self._full() or self._closed)
                self._blocked -= 1
            if self._closed:
                return False
            self._waiting.append(ticket)
            self._serve()
        return True

    def give(self, item: T) -> None:
        """Give an item back: to whoever waits longest for it, if any."""
        self._free.append(item)
        if self._waiting:
            with self._lock:
                self._serve()

    def take_all(self, items: Sequence[T] | None = None) -> None:
        """Take every one of `items` (None: of all), each as soon as it comes back; ended by `give_all`.

        One caller at a time; those who wait for any item come after it, as its end may be what they need.
        """
        self._exclusive.acquire()
        tickets: list[_Waiting[T]] = []
        try:
            with self._lock:
                for item in self.items if items is None else items:
                    ticket: _Waiting[T] = _Waiting(item)
                    tickets.append(ticket)
                    self._waiting.appendleft(ticket)
                self._serve()
            for ticket in tickets:
                ticket.called.acquire()
        except BaseException:  # KeyboardInterrupt
            for ticket in tickets:
                self._leave(ticket)
            self._exclusive.release()
            raise

    def give_all(self, items: Sequence[T] | None = None) -> None:
        """Give back what `take_all` took."""
        for item in self.items if items is None else items:
            self.give(item)
        self._exclusive.release()

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
        """Take a ticket out of the queue, or pass on what it was given."""
        with self._lock:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
        if ticket.item is not None:
            self.give(ticket.item)

    def _serve(self) -> None:
        """Match free items and tickets, the earliest first. Called with the lock held."""
        for ticket in list(self._waiting):
            if not self._free:
                break
            try:
                if ticket.only is None:
                    item = self._pop()
                else:
                    self._free.remove(ticket.only)
                    item = ticket.only
            except (IndexError, ValueError):  # not free, or taken this moment by who found nobody waiting
                continue
            self._waiting.remove(ticket)
            ticket.served(item)
        if self._blocked:
            self._room.notify_all()

    def _pop_spread(self) -> T:
        """A free item of the group with most of them; of these the one used last."""
        group = self._group
        assert group is not None
        free = list(reversed(self._free))
        count: dict[Hashable, int] = {}
        for item in free:
            count[group(item)] = count.get(group(item), 0) + 1
        for item in sorted(free, key=lambda one: count[group(one)], reverse=True):
            try:
                self._free.remove(item)
            except ValueError:  # taken meanwhile
                continue
            return item
        return self._free.pop()

    def _full(self) -> bool:
        return self._limit is not None and len(self._waiting) >= self._limit

    def _refusal(self) -> QueueFullError:
        waiting = len(self._waiting)
        return QueueFullError(
            f"{waiting} runs wait for one of {len(self.items)} slots already; try again later, or raise "
            "SessionOptions(max_in_flight=..., queue_size=...)",
            queue_size=self._limit,
        )
