"""The restart policy and the quarantine: what the design says of them, and any order of events."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.scheduler.restarts import Quarantine, Restarts

pytestmark = pytest.mark.fast

WAITS = {0: 0, 1: 0, 2: 1, 3: 2, 4: 4}  # as the design has them; 60 from five on


def test_each_death_in_a_row_makes_the_next_start_later() -> None:
    restarts, waits = Restarts(), []
    for _ in range(6):
        restarts.died(100.0)
        waits.append((restarts.wait(100.0), restarts.open))
    assert waits == [(0, False), (1, False), (2, False), (4, False), (60, True), (60, True)]


def test_the_wait_ends_by_time_and_then_one_trial_decides() -> None:
    restarts = Restarts()
    for _ in range(5):
        restarts.died(100.0)
    assert [restarts.wait(now) for now in (100.0, 130.5, 160.0, 1e6)] == [60, 29.5, 0, 0]
    assert restarts.open  # until the trial has completed a partition
    restarts.died(170.0)
    assert restarts.wait(171.0) == 59
    restarts.completed()
    assert (restarts.open, restarts.in_a_row, restarts.deaths, restarts.wait(171.0)) == (False, 0, 6, 0)


def test_what_does_not_start_is_not_tried_again_until_asked_for() -> None:
    restarts = Restarts()
    restarts.died(1.0)
    restarts.boot_failed("no device of mine is here")
    restarts.completed()
    assert (restarts.wait(1e9), restarts.failed) == (math.inf, "no device of mine is here")
    restarts.forget()
    assert (restarts.wait(1.0), restarts.failed, restarts.deaths) == (0, None, 1)


EVENTS = st.lists(
    st.tuples(st.sampled_from(["died", "died", "completed", "boot_failed", "forget"]), st.floats(0, 50)), max_size=40
)


@given(EVENTS, st.floats(0, 100))
@settings(deadline=None, derandomize=True)
def test_the_wait_follows_from_the_history(events: list[tuple[str, float]], later: float) -> None:
    restarts, now, history = Restarts(), 0.0, []
    for event, seconds in events:
        now += seconds
        history.append((event, now))
        if event == "died":
            restarts.died(now)
        elif event == "boot_failed":
            restarts.boot_failed("why")
        else:
            getattr(restarts, event)()
    names = [event for event, _ in history]
    since = names[::-1]
    ends = [i for i, event in enumerate(since) if event in ("completed", "forget")]
    row = since[: ends[0] if ends else None].count("died")
    forgotten = since.index("forget") if "forget" in since else len(since)
    last = max((when for event, when in history if event == "died"), default=-math.inf)
    if "boot_failed" in since[:forgotten]:
        expected = math.inf
    else:
        expected = max(0.0, last + WAITS.get(row, 60) - (now + later)) if row >= 2 else 0.0
    assert restarts.wait(now + later) == expected
    assert (restarts.in_a_row, restarts.deaths, restarts.open) == (row, names.count("died"), row >= 5)


# Quarantine -----------------------------------------------------------------------------------------------------------


def test_two_deaths_in_a_row_during_one_partition_quarantine_it() -> None:
    quarantine = Quarantine()
    assert not quarantine.blame("m", ["a", "b"], "own")
    assert not quarantine.blame("m", ["c"], "own")  # another partition
    assert not quarantine.blame("m", ["a", "b"], "cpu")  # another provider
    assert not quarantine.blame("n", ["a", "b"], "own")  # another model
    assert quarantine.holds("m", "own") == []
    assert quarantine.blame("m", ["a", "b"], "own")
    assert (quarantine.holds("m", "own"), quarantine.holds("n", "own")) == ([("a", "b")], [])
    assert quarantine.of("own") == [{"model": "m", "nodes": ["a", "b"], "deaths": 2}]
    assert json.loads(json.dumps(quarantine.of("own"))) == quarantine.of("own")


def test_a_completed_partition_ends_the_row_but_no_quarantine() -> None:
    quarantine = Quarantine()
    quarantine.blame("m", ["a"], "own")
    quarantine.completed("m", ["a"], "own")
    assert not quarantine.blame("m", ["a"], "own")
    assert quarantine.blame("m", ["a"], "own")
    quarantine.completed("m", ["a"], "own")
    assert quarantine.holds("m", "own") == [("a",)]


KEYS = st.tuples(st.sampled_from("mn"), st.sampled_from([("a",), ("b", "c")]), st.sampled_from("pq"))


@given(st.lists(st.tuples(st.sampled_from(["blame", "blame", "completed", "release"]), KEYS), max_size=40))
@settings(deadline=None, derandomize=True)
def test_quarantine_is_monotone_until_released(events: list[tuple[str, tuple[str, tuple[str, ...], str]]]) -> None:
    quarantine = Quarantine()
    history: list[tuple[str, tuple[str, tuple[str, ...], str]]] = []

    def held() -> set[tuple[str, tuple[str, ...], str]]:
        return {
            (model, nodes, provider)
            for model in "mn"
            for provider in "pq"
            for nodes in quarantine.holds(model, provider)
        }

    for event, (model, nodes, provider) in events:
        before = held()
        history.append((event, (model, nodes, provider)))
        if event == "release":
            quarantine.release(provider)
            assert held() == {key for key in before if key[2] != provider}
        elif event == "blame":
            # By the history alone: the event before about this partition was a death, too, or it was held.
            about = [
                one
                for one, key in history[:-1]
                if key == (model, nodes, provider) or (one, key[2]) == ("release", provider)
            ]
            now = quarantine.blame(model, nodes, provider)
            assert now == ((model, nodes, provider) in before or about[-1:] == ["blame"])
            assert held() == before | ({(model, nodes, provider)} if now else set())
        else:
            quarantine.completed(model, nodes, provider)
            assert held() == before
    told = {(one["model"], tuple(one["nodes"]), provider) for provider in "pq" for one in quarantine.of(provider)}
    assert told == held()
    assert all(one["deaths"] >= 2 for provider in "pq" for one in quarantine.of(provider))


def test_a_death_for_which_a_partition_is_not_to_blame_ends_its_row() -> None:
    quarantine = Quarantine()
    assert not quarantine.blame("m", ["a"], "own", 1)
    assert not quarantine.blame("m", ["a"], "own", 3)  # the second was somebody else's
    assert quarantine.blame("m", ["a"], "own", 4)
    assert quarantine.blame("m", ["a"], "own", 9)  # what is quarantined stays so
