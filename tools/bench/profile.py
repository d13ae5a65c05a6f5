"""Where the microseconds of a run go: 64 bytes through two partitions on two workers, step by step.

The path of a run goes from the call through the caller's code to its ring, with that wake-up into the first worker,
from its ring into the second one, and back. A step is the time from one mark on that path to the next. What a process
does after its ring overlaps with the others and is listed apart. Setting marks costs time too: `marks` tells how much.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from outrider.scheduler import Fleet, InferenceSession
from outrider.tools.bench.chains import dealt, relu_chain, runs_of, session, zeros
from outrider.tools.bench.marks import CALLED, CALLER_POINTS, RETURNED, RUNG, WOKEN, Marks
from outrider.tools.bench.measure import Request, Round, Row, interleave, row, timed

CALLS = 600
CALLER, FIRST, SECOND = "caller", "worker 1", "worker 2"
WHOLE = "the run with marks"
PLAIN = ("null", "null:1")
PROBES = {f"{__package__}.providers:Probe": FIRST, f"{__package__}.providers:Probe:1": SECOND}

Mark = tuple[str, int]  # what has been done, and when, in nanoseconds
Steps = dict[str, float]  # what -> microseconds


def rows(request: Request) -> list[Row]:
    """The steps of the path in order, then what happens beside it. The ratio is the share of the whole run."""
    calls, feed = request.calls(CALLS), {"x": zeros(64)}
    paths: list[Steps] = []
    besides: list[Steps] = []
    alone: list[Round] = []
    with contextlib.ExitStack() as stack:
        bare, marked = (
            stack.enter_context(
                session(relu_chain(2, [16]), stack.enter_context(Fleet([*workers])), dealt(2, tuple(workers)))
            )
            for workers in (PLAIN, PROBES)
        )
        for _ in range(request.rounds):
            alone += interleave({"run": (timed(runs_of(bare, feed)), calls)}, 1)["run"]
            runs = list(_taken(marked, feed, calls))
            paths.append(_usual([steps for steps, _ in runs]))
            besides.append(_usual([steps for _, steps in runs]))
    whole = [Round(steps[WHOLE]) for steps in paths]
    marks = [Round(one.p50 - other.p50) for one, other in zip(whole, alone, strict=True)]
    return [
        *_rows(paths, whole),
        row("the run without marks", "us", alone, whole, WHOLE),
        row("what marks cost", "us", marks, whole, WHOLE),
        *_rows(besides, whole),
    ]


def _rows(rounds: Sequence[Steps], whole: Sequence[Round]) -> list[Row]:
    """One row per step of the rounds' medians."""
    common = [name for name in rounds[0] if all(name in steps for steps in rounds)]
    return [row(name, "us", [Round(steps[name]) for steps in rounds], whole, WHOLE) for name in common]


def _usual(runs: Sequence[Steps]) -> Steps:
    """The median of each step over the runs that took the same steps as most did."""
    if not runs:
        raise AssertionError("no run was blocked in as this bench knows it: its points in marks.py are out of date")
    [(names, _)] = collections.Counter(tuple(steps) for steps in runs).most_common(1)
    same = [steps for steps in runs if tuple(steps) == names]
    return {name: statistics.median(steps[name] for steps in same) for name in names}


def _taken(made: InferenceSession, feed: dict[str, Any], calls: int) -> Iterator[tuple[Steps, Steps]]:
    """(path, beside) of each run, with the marks of all three processes."""
    marks = Marks()
    for _ in range(calls // 5):
        made.run(None, feed)
    _stats(made)
    marks.install(CALLER_POINTS)
    try:
        for _ in range(calls):
            marks.set(CALLED)
            made.run(None, feed)
            marks.set(RETURNED)
    finally:
        marks.remove()
    streams = {CALLER: _pairs(marks.take())} | {actor: _pairs(told) for actor, told in _stats(made).items()}
    starts = [when for name, when in streams[CALLER] if name == CALLED]
    for start, end in itertools.pairwise([*starts, starts[-1] + 10**9]):
        yield from _folded({actor: [one for one in marks if start <= one[1] < end] for actor, marks in streams.items()})


def _stats(made: InferenceSession) -> dict[str, dict[str, list[Any]]]:
    """What the workers marked since the last call, by actor."""
    providers = made.stats()["providers"]
    return {actor: providers[name] for name, actor in PROBES.items()}


def _pairs(told: dict[str, list[Any]]) -> list[Mark]:
    return list(zip(told["names"], told["times"], strict=True))


def _folded(run: dict[str, list[Mark]]) -> Iterator[tuple[Steps, Steps]]:
    """The steps of one run; nothing if a process did not block and so was not woken."""
    path: Steps = {}
    beside: Steps = {}
    caller = run[CALLER]
    rung = _first(caller, RUNG)
    woken = [_last_before(run[actor], WOKEN, _first(run[actor], RUNG)) for actor in (FIRST, SECOND)]
    back = _last_before(caller, WOKEN, len(caller))
    if rung is None or back is None or None in woken:
        return
    _steps(path, CALLER, caller[: rung + 1])
    sender, when = CALLER, caller[rung][1]
    for actor, begin in zip((FIRST, SECOND), woken, strict=True):
        marks, end = run[actor], _first(run[actor], RUNG)
        assert begin is not None and end is not None
        path[f"wake-up: {sender} -> {actor}"] = (marks[begin][1] - when) / 1e3
        _steps(path, actor, marks[begin : end + 1])
        sender, when = actor, marks[end][1]
        _steps(beside, f"meanwhile {actor}", marks[end:])
    path[f"wake-up: {sender} -> {CALLER}"] = (caller[back][1] - when) / 1e3
    _steps(path, CALLER, caller[back:])
    _steps(beside, f"meanwhile {CALLER}", caller[rung:back])
    path[WHOLE] = sum(path.values())
    yield path, beside


def _steps(into: Steps, actor: str, marks: Sequence[Mark]) -> None:
    for (_, begun), (name, ended) in itertools.pairwise(marks):
        key = f"{actor}: {name}"
        while key in into:
            key += " again"
        into[key] = (ended - begun) / 1e3


def _first(marks: Sequence[Mark], name: str) -> int | None:
    return next((at for at, (one, _) in enumerate(marks) if one == name), None)


def _last_before(marks: Sequence[Mark], name: str, end: int | None) -> int | None:
    """None where `end` is."""
    return None if end is None else next((at for at in reversed(range(end)) if marks[at][0] == name), None)
