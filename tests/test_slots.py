"""Run slots: handed out in the order asked for, to as many as there are, and never lost."""

from __future__ import annotations

import threading
import time

import pytest

from outrider.scheduler.slots import Slots

pytestmark = pytest.mark.fast


def test_who_waits_longest_is_served_first_even_if_another_asks_at_once() -> None:
    slots = Slots(["a"])
    order: list[int] = []
    slots.take()

    def wait(number: int) -> None:
        item = slots.take()
        order.append(number)
        slots.give(item)

    waiting = [threading.Thread(target=wait, args=(number,)) for number in range(4)]
    for count, thread in enumerate(waiting, 1):
        thread.start()
        while len(slots._waiting) < count:  # it has queued up
            time.sleep(0.001)
    slots.give("a")
    item = slots.take()  # comes after all of them
    assert order == [0, 1, 2, 3]
    slots.give(item)
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
        for _ in range(500):
            slots.give(slots.take())

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
