"""What ends a wait early, without any worker: tokens, watches, what stays where it is, and when a dump is complete."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.scheduler import CancelToken, RunOptions, SessionOptions, errors
from outrider.scheduler.asynchronous import RunFuture
from outrider.scheduler.dumps import complete
from outrider.scheduler.slots import Hold, Slots, Ticket
from outrider.scheduler.stalls import Stall
from outrider.scheduler.watching import LONGEST, LOOKS, Watch, watch_for

pytestmark = pytest.mark.fast

ENOUGH = 60.0
SOON = 0.02


def test_what_the_run_says_goes_before_what_the_session_says() -> None:
    assert watch_for(None, SessionOptions()) is None
    terminated = RunOptions()
    watch = watch_for(terminated, SessionOptions())
    assert watch is not None and (watch.deadline, watch.stall, watch.cancelled) == (None, None, False)
    terminated.terminate = True
    assert watch.cancelled
    session = SessionOptions(deadline=5, partition_deadline=2)
    one = watch_for(RunOptions(), session)
    assert one is not None and one.stall is not None
    assert (one.deadline, one.stall.seconds, one.cancelled, one.limited) == (5, 2, False, True)
    two = watch_for(RunOptions(deadline=7, partition_deadline=8), session)
    assert two is not None and two.stall is not None
    assert (two.deadline, two.stall.seconds) == (7, 8)
    token = CancelToken()
    three = watch_for(RunOptions(cancel=token), SessionOptions(), CancelToken())
    assert three is not None and three.limited and three.block() is None and three.left("now") is None
    token.cancel()
    assert three.cancelled and three.over


def test_who_waits_is_told_how_long() -> None:
    assert Watch(None, 2).block() == 2 / LOOKS
    assert Watch(1e300, 1e300).block() == Watch(1e300, None).left("now") == LONGEST
    soon = Watch(SOON, 2)
    left = soon.block()
    assert left is not None and 0 <= left <= SOON
    while not soon.over:
        time.sleep(SOON / 4)
    assert soon.block() == 0
    with pytest.raises(errors.RunTimeoutError, match="passed while it slept") as caught:
        soon.left("while it slept")
    assert (caught.value.deadline, caught.value.running) == (SOON, [])


def test_a_token_wakes_those_that_are_open() -> None:
    token, woken = CancelToken(), []
    watches = [Watch(None, None, (token,)) for _ in range(3)]
    for number, watch in enumerate(watches):
        watch.open()
        watch.waker = lambda number=number: woken.append(number)
    watches[1].close()
    watches[1].close()
    token.cancel()
    assert woken == [0, 2]
    assert all(watch.cancelled for watch in watches)
    with pytest.raises(errors.RunCancelledError, match="cancelled before it began"):
        watches[1].left("before it began")


def test_a_caller_leaves_the_queue_when_its_watch_says_so() -> None:
    slots: Slots[Any] = Slots(["a slot"])
    first, token = Hold[Any](), CancelToken()
    slots.take(first)
    with pytest.raises(errors.RunTimeoutError, match="run slot"):
        slots.take(Hold(), Watch(SOON, None))
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            with Watch(None, None, (token,)) as watch:
                slots.take(Hold(), watch)
        except errors.RunCancelledError as error:
            caught.append(error)

    callers = [threading.Thread(target=wait) for _ in range(3)]
    for caller in callers:
        caller.start()
    while len(slots._waiting) < 3:
        time.sleep(0.001)
    token.cancel()
    for caller in callers:
        caller.join(ENOUGH)
    assert len(caught) == 3 and not slots._waiting and not token._waiting
    slots.give(first)
    assert slots.take(first) == "a slot"


def test_a_slot_that_is_busy_is_taken_last() -> None:
    slots: Slots[Any] = Slots([1, 2, 3])
    holds = [Hold[Any]() for _ in range(3)]
    assert [slots.take(hold) for hold in holds] == [1, 2, 3]
    slots.give(holds[0])
    slots.give(holds[1], last=True)
    slots.give(holds[2])
    assert [slots.take(hold) for hold in holds] == [3, 1, 2]


class Waiting(Ticket[Any]):
    def served(self) -> None:
        self.begun = True


def test_a_ticket_is_withdrawn_unless_it_was_served() -> None:
    slots: Slots[Any] = Slots(["a slot"])
    served, waiting = Waiting(Hold()), Waiting(Hold())
    assert slots.enqueue(served) and slots.enqueue(waiting)
    assert not slots.withdraw(served)
    assert slots.withdraw(waiting)
    assert not slots.withdraw(waiting)
    slots.give(served.hold)
    assert waiting.hold.item is None


def test_a_future_is_cancelled_until_its_run_has_ended() -> None:
    future = RunFuture()
    assert future.set_running_or_notify_cancel()
    assert future.cancel() and future.token.cancelled
    assert not future.close()
    ended = RunFuture()
    assert ended.set_running_or_notify_cancel()
    assert ended.close()
    assert not ended.cancel() and not ended.token.cancelled


@settings(deadline=None, derandomize=True)
@given(st.lists(st.sets(st.integers(0, 3)), max_size=40), st.integers(1, 6), st.integers(1, 6))
def test_what_stays_is_told_after_so_many_looks_and_then_again(seen: list[set[int]], first: int, again: int) -> None:
    """One look per second; the other way round: each thing counted from where it last appeared."""
    stall, since = Stall(first, again), dict.fromkeys(range(4), -1)
    for now, keys in enumerate(seen):
        late = stall.look(now, sorted(keys))
        since = {key: (since[key] if since[key] >= 0 else now) if key in keys else -1 for key in since}
        expected = []
        for key in sorted(keys):
            there = now - since[key]
            if there >= first and (there - first) % again == 0:
                expected.append(key)
        assert late == expected


DUMP = """Thread 0x00007f0000000001 (most recent call first):
  File "worker.py", line 83 in run
  File "threading.py", line 1002 in _bootstrap

Current thread 0x00007f0000000002 (most recent call first):
  File "slow.py", line 5 in _run
  File "<string>", line 1 in <module>
"""


def test_a_dump_is_complete_when_the_main_thread_is_in_it() -> None:
    assert [at for at in range(len(DUMP) + 1) if complete(DUMP[:at])] == [len(DUMP)]
    deep = DUMP.replace('  File "<string>", line 1 in <module>\n', "  ...\n")
    assert complete(deep)


def test_a_worker_that_was_not_started_gives_no_stack() -> None:
    from outrider.scheduler.dumps import request

    nothing: Any = SimpleNamespace(process=None, stacks=None, progress=None)
    assert request(nothing) == -1
