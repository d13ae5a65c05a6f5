"""Run slots, handed out in the order in which callers asked, so that none of many callers starves.

Who asks leaves a ticket; `take` is a ticket that a thread waits on, `enqueue` takes any other. At most `limit` tickets
wait: with `reject` more are refused, else `enqueue` blocks until there is room (a thread in `take` waits anyway).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
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

    def __init__(self, items: Sequence[T], limit: int | None = None, reject: bool = False) -> None:
        self.items = tuple(items)
        self._limit = limit
        self._reject = reject
        self._free = list(reversed(items))  # the one used last is taken first: its places are bound and warm
        self._waiting: deque[Ticket[T]] = deque()
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._exclusive = threading.Lock()
        self._closed = False

    def take(self) -> T:
        """The next free item, first come, first served."""
        with self._lock:
            if self._free:
                return self._free.pop()
            if self._reject and self._full():
                raise self._refusal()
            ticket: _Waiting[T] = _Waiting(None)
            self._waiting.append(ticket)
        return self._wait(ticket)

    def enqueue(self, ticket: Ticket[T]) -> None:
        """Serve the ticket now if an item is free, else in its turn; blocks for room in the queue unless it rejects."""
        with self._lock:
            if not self._free and self._full():
                if self._reject:
                    raise self._refusal()
                self._room.wait_for(lambda: self._free or not self._full() or self._closed)
            item = self._pop(ticket)
            if item is None:
                self._waiting.append(ticket)
            else:
                ticket.served(item)

    def withdraw(self, ticket: Ticket[T]) -> bool:
        """Take a ticket out of the queue; False if it is not there (any more)."""
        with self._lock:
            if ticket not in self._waiting:
                return False
            self._waiting.remove(ticket)
            self._room.notify()
            return True

    def give(self, item: T) -> None:
        """Give an item back: to whoever waits longest for it, if any."""
        with self._lock:
            for position, ticket in enumerate(self._waiting):
                if ticket.only is None or ticket.only is item:
                    del self._waiting[position]
                    ticket.served(item)
                    break
            else:
                self._free.append(item)
            self._room.notify()

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
                    if self._pop(ticket) is None:
                        self._waiting.appendleft(ticket)
                    else:
                        ticket.served(item)
            for ticket in tickets:
                self._wait(ticket)
        except BaseException:  # KeyboardInterrupt
            for ticket in tickets:
                if not self.withdraw(ticket) and ticket.item is not None:
                    self.give(ticket.item)
            self._exclusive.release()
            raise

    def give_all(self, items: Sequence[T] | None = None) -> None:
        """Give back what `take_all` took."""
        for item in self.items if items is None else items:
            self.give(item)
        self._exclusive.release()

    def close(self) -> list[Ticket[T]]:
        """Let nobody block for room any more; returns the tickets that no thread waits on, which leave the queue."""
        with self._lock:
            self._closed = True
            left = [ticket for ticket in self._waiting if not isinstance(ticket, _Waiting)]
            for ticket in left:
                self._waiting.remove(ticket)
            self._room.notify_all()
        return left

    def _wait(self, ticket: _Waiting[T]) -> T:
        try:
            ticket.called.acquire()
        except BaseException:  # KeyboardInterrupt: leave the queue, or pass on what was handed over meanwhile
            if not self.withdraw(ticket):
                item, ticket.item = ticket.item, None
                if item is not None:
                    self.give(item)
            raise
        assert ticket.item is not None
        return ticket.item

    def _pop(self, ticket: Ticket[T]) -> T | None:
        """A free item that suits the ticket."""
        if ticket.only is None:
            return self._free.pop() if self._free else None
        if ticket.only in self._free:
            self._free.remove(ticket.only)
            return ticket.only
        return None

    def _full(self) -> bool:
        return self._limit is not None and len(self._waiting) >= self._limit

    def _refusal(self) -> QueueFullError:
        waiting = len(self._waiting)
        return QueueFullError(
            f"{waiting} runs wait for one of {len(self.items)} slots already; try again later, or raise "
            "SessionOptions(max_in_flight=..., queue_size=...)",
            queue_size=self._limit,
        )
