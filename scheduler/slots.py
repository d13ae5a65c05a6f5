"""Run slots, handed out in the order in which callers asked, so that none of many threads starves."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class _Ticket(Generic[T]):
    def __init__(self) -> None:
        self.called = threading.Lock()
        self.called.acquire()
        self.item: T | None = None


class Slots(Generic[T]):
    """A fixed set of items. `take` blocks until one is free; `take_all` until all are, keeping others out till then."""

    def __init__(self, items: Sequence[T]) -> None:
        self.items = tuple(items)
        self._free = list(reversed(items))  # the one used last is taken first: its places are bound and warm
        self._waiting: deque[_Ticket[T]] = deque()
        self._lock = threading.Lock()
        self._exclusive = threading.Lock()

    def take(self) -> T:
        """The next free item, first come, first served."""
        with self._lock:
            if self._free:
                return self._free.pop()
            ticket: _Ticket[T] = _Ticket()
            self._waiting.append(ticket)
        try:
            ticket.called.acquire()
        except BaseException:  # KeyboardInterrupt: leave the queue, or pass on what was handed over meanwhile
            with self._lock:
                if ticket.item is None:
                    self._waiting.remove(ticket)
            if ticket.item is not None:
                self.give(ticket.item)
            raise
        assert ticket.item is not None
        return ticket.item

    def give(self, item: T) -> None:
        """Give an item back: to the caller who waits longest, if any."""
        with self._lock:
            if self._waiting:
                ticket = self._waiting.popleft()
                ticket.item = item
                ticket.called.release()
            else:
                self._free.append(item)

    def take_all(self) -> None:
        """Take every item, one after the other as they come free; ended by `give_all`."""
        self._exclusive.acquire()
        taken: list[T] = []
        try:
            for _ in self.items:
                taken.append(self.take())
        except BaseException:  # KeyboardInterrupt
            for item in taken:
                self.give(item)
            self._exclusive.release()
            raise

    def give_all(self) -> None:
        """Give back what `take_all` took."""
        for item in self.items:
            self.give(item)
        self._exclusive.release()
