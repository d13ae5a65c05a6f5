"""A spin is bounded, counts, and stops by itself where it is of no use."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from outrider.scheduler import InferenceSession, SessionOptions, errors
from outrider.shm.spin import MAX_MICROSECONDS, PAUSE, SAMPLE, Spin
from tests.builders import chain

pytestmark = pytest.mark.fast


def test_none_by_default_and_never_longer_than_the_bound() -> None:
    looked: list[int] = []
    assert Spin(0).until(lambda: looked.append(1)) is None
    assert not looked
    for bad in (-1, MAX_MICROSECONDS + 1):
        with pytest.raises(ValueError, match="microseconds"):
            Spin(bad)


def test_it_ends_with_what_was_looked_for_or_in_time() -> None:
    ticks = itertools.count(0, 1000)
    answers = iter([None, None, False])
    spin = Spin(5, lambda: next(ticks))
    assert spin.until(lambda: next(answers)) is False
    assert (spin.tries, spin.hits) == (1, 1)
    looked: list[int] = []
    assert spin.until(lambda: looked.append(1)) is None
    assert len(looked) == 5


def test_one_that_mostly_fails_pauses_and_then_tries_again() -> None:
    ticks = itertools.count(0, 1000)
    spin = Spin(1, lambda: next(ticks))
    for _ in range(SAMPLE):
        spin.until(lambda: None)
    assert (spin.tries, spin.hits) == (SAMPLE, 0)
    for _ in range(PAUSE):
        assert spin.until(lambda: True) is None
    assert spin.tries == SAMPLE
    for _ in range(2 * SAMPLE):
        assert spin.until(lambda: True)
    assert (spin.tries, spin.hits) == (3 * SAMPLE, 2 * SAMPLE)


def test_a_session_that_spins_gives_the_same_answers_and_is_woken_when_it_does_not_look() -> None:
    x = np.array([[-2, -1, 0.5, 3]], np.float32)
    pins = {"n0": "cpu", "n1": "cpu:1"}
    options = SessionOptions(pins=pins, config={"spin_us": "50"})
    with InferenceSession(chain("Relu", "Neg"), providers=["cpu", "cpu:1"], options=options) as session:
        for number in range(2 * SAMPLE):
            np.testing.assert_array_equal(session.run(None, {"x": x + number})[0], -np.maximum(x + number, 0))
        slots = session._runner.slots.items
        assert sum(slot.spin.tries for slot in slots) >= SAMPLE


@pytest.mark.parametrize("text", ["-1", "1001", "much", ""])
def test_bad_bounds_are_refused(text: str) -> None:
    with pytest.raises(errors.InvalidOptionError, match="spin_us"):
        SessionOptions(config={"spin_us": text})
