"""The life of a worker as a state machine: every order of events, checked against what may never happen."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.scheduler import lifecycle as life

pytestmark = pytest.mark.fast

EVENTS = st.sampled_from(
    [
        life.SaidHello(),
        life.SaidStartFailed("no device", "Traceback"),
        life.Late(30),
        life.StopAsked(),
        life.Exited(-11, "out"),
        life.Exited(3, "out"),
        life.Exited(0, ""),
    ]
)


@settings(deadline=None, derandomize=True, max_examples=400)
@given(st.lists(EVENTS, max_size=8))
def test_whatever_comes_in_whatever_order(events: list[life.Event]) -> None:
    machine, told = life.Lifecycle(), []
    for event in events:
        before = machine.state
        instructions = machine.handle(event)
        if before == "dead":
            assert instructions == [] and machine.state == "dead", "nothing is asked of the dead"
        if isinstance(event, life.Exited):
            assert machine.state == "dead"
        told += instructions
    kinds = [type(one) for one in told]
    assert kinds.count(life.Welcome) + kinds.count(life.Refuse) <= 1, "it is welcomed or refused, once"
    assert kinds.count(life.Mourn) <= 1 and kinds.count(life.SendStop) <= 1
    if life.Mourn in kinds:
        assert kinds.index(life.Welcome) < kinds.index(life.Mourn), "only who was welcome is mourned"
    if machine.state == "dead" and life.Welcome not in kinds and not any(isinstance(e, life.StopAsked) for e in events):
        assert life.Refuse in kinds, "who waits for a start hears of its failure"


def after(*events: life.Event) -> tuple[life.Lifecycle, list[life.Instruction]]:
    machine = life.Lifecycle()
    return machine, [one for event in events for one in machine.handle(event)]


def test_the_reason_of_a_refusal_is_what_the_worker_said() -> None:
    _, told = after(life.SaidStartFailed("no device", "Traceback"), life.Exited(3, "noise"))
    assert told == [life.Refuse("no device", "Traceback")]


def test_who_dies_silently_is_refused_with_how_and_its_last_words() -> None:
    _, told = after(life.Exited(-11, "last words"))
    assert told == [life.Refuse("the process ended while starting: it was ended by SIGSEGV", "last words")]


def test_who_is_late_is_killed_and_refused_with_the_deadline() -> None:
    machine, told = after(life.Late(2.5))
    assert (machine.state, told) == ("failing", [life.Kill()])
    assert machine.handle(life.Exited(-9, "")) == [life.Refuse("it did not start within 2.5 s", "")]


@pytest.mark.parametrize(
    ("before", "cause"),
    [
        ([], "died"), ([life.SaidStartFailed("no device", "")], "raised"), ([life.Late(2)], "late"),
        ([life.StopAsked()], "closed"), ([life.SaidHello()], ""), ([life.SaidHello(), life.Late(2)], ""),
    ],
)  # fmt: skip
def test_why_a_start_failed_is_kept(before: list[life.Event], cause: str) -> None:
    machine, _ = after(*before)
    assert machine.code is None
    machine.handle(life.Exited(-11, ""))
    assert (machine.cause, machine.code) == (cause, -11)


def test_a_worker_that_does_not_stop_is_killed_and_not_mourned() -> None:
    machine, told = after(life.SaidHello(), life.StopAsked(), life.Late(5), life.Exited(-9, ""))
    assert told == [life.Welcome(), life.SendStop(), life.Kill()]
    assert machine.state == "dead"


def test_a_death_tells_signal_and_output() -> None:
    _, told = after(life.SaidHello(), life.Exited(-9, "words"))
    assert told[-1] == life.Mourn(-9, "SIGKILL", "words")
    assert life.exit_text(4) == "it exited with code 4"
    assert life.signal_name(-200) == "signal 200"
