"""Run slots: handed out in the order asked for, to as many as there are, and never lost."""

from __future__ import annotations

import threading
import time

import pytest

from outrider.scheduler.slots import Hold, Slots, Ticket
from tests.interrupts import interrupted

pytestmark = pytest.mark.fast


def test_who_waits_longest_is_served_first_even_if_another_asks_at_once() -> None:
    slots = Slots(["a"])
    order: list[int] = []
    first, last = Hold[str](), Hold[str]()
    slots.take(first)

    def wait(number: int) -> None:
        hold = Hold[str]()
        slots.take(hold)
        order.append(number)
        slots.give(hold)

    waiting = [threading.Thread(target=wait, args=(number,)) for number in range(4)]
    for count, thread in enumerate(waiting, 1):
        thread.start()
        while len(slots._waiting) < count:  # it has queued up
            time.sleep(0.001)
    slots.give(first)
    assert slots.take(last) == "a"  # comes after all of them
    assert order == [0, 1, 2, 3]
    slots.give(last)
    for thread in waiting:
        thread.join()


def test_all_are_taken_one_holder_at_a_time() -> None:
    slots = Slots(range(3))
    inside = 0
    most = 0

    def hold() -> None:
        nonlocal inside, most
        for _ in range(200):
            slots.take_all()
            inside += 1
            most = max(most, inside)
            inside -= 1
            slots.give_all()

    def use() -> None:
        hold = Hold[int]()
        for _ in range(500):
            slots.take(hold)
            slots.give(hold)

    threads = [threading.Thread(target=target) for target in (hold, hold, use, use)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    slots.take_all()
    assert not slots._free
    slots.give_all()
    assert sorted(slots._free) == [0, 1, 2]


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("waiting", [False, True])
def test_a_signal_at_any_moment_loses_no_item(spread: bool, waiting: bool) -> None:
    """`take` and `give` interrupted at every moment in turn. `waiting`: another caller's ticket stands in the queue."""
    moment, ended = -1, False
    while not ended:
        moment += 1
        slots = Slots(range(2), group=str if spread else None)
        other, hold = _Ticket(Hold[int](), 1), Hold[int]()
        first = Hold[int]()
        if waiting:
            slots.take(first)
            slots.enqueue(other)
        try:
            with interrupted("slots.py", moment):
                if waiting:
                    slots.give(first)
                slots.take(hold)
                slots.give(hold)
                ended = True
        except KeyboardInterrupt:
            for one in (first, hold):
                slots.give(one)
        if waiting:
            assert other.hold.item == 1 and other.told > 0
            slots.give(other.hold)
        assert (sorted(slots._free), len(slots._waiting)) == ([0, 1], 0), f"moment {moment}"
    assert moment > 1


class _Ticket(Ticket[int]):
    told = 0

    def served(self) -> None:
        self.told += 1
