"""How long runs took, where only some of them are timed."""

from __future__ import annotations

import pytest

from outrider.providers.tally import SKIPPED, Tally

pytestmark = pytest.mark.fast


class Lane:
    """Tells its runs as a lane does."""

    def __init__(self) -> None:
        self.tally, self.rest = Tally(), 0

    def served(self, seconds: float, steady: bool = True) -> None:
        if steady and self.rest:
            self.rest -= 1
        else:
            self.rest = self.tally.add(seconds, steady, self.rest)

    def total(self) -> tuple[int, float]:
        rest, self.rest = self.rest, 0
        return self.tally.total(rest)


def test_runs_that_take_alike_sum_up_exactly() -> None:
    lane = Lane()
    lane.served(5.0, steady=False)
    for _ in range(1000):
        lane.served(0.25)
    assert lane.total() == (1001, 5.0 + 1000 * 0.25)


def test_what_takes_the_general_way_is_timed_and_stands_for_itself() -> None:
    lane = Lane()
    for _ in range(10):
        lane.served(4.0, steady=False)
        lane.served(0.25)
        lane.served(16.0)  # is not looked at: the one before it stands for it
    assert lane.total() == (30, 10 * (4.0 + 0.25 + 0.25))


def test_totals_before_and_after_a_run_differ_by_what_it_took() -> None:
    lane = Lane()
    for number in range(3 * SKIPPED):
        lane.served(1.0 + number)
    for took in (0.5, 2.0, 0.125):
        runs, seconds = lane.total()
        lane.served(took)
        assert lane.total() == (runs + 1, seconds + took)


def test_shapes_that_come_in_turn_are_all_timed() -> None:
    for period in (2, 3, 4, 5, 6, 8):
        lane = Lane()
        cycles = (SKIPPED + 1) * 20
        for number in range(cycles * period):
            lane.served(float(number % period))
        assert lane.total()[1] == pytest.approx(cycles * sum(range(period)), rel=0.1)
