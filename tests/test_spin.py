"""A spin is bounded, counts, and stops by itself where it is of no use."""

from __future__ import annotations

import itertools

import pytest

from outrider.shm.spin import MAX_MICROSECONDS, PAUSE, SAMPLE, Spin

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
