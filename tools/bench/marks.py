"""Marks: moments in the life of a run, taken by wrapping functions of the library.

Every mark is named after what has just been done and carries the time of CLOCK_MONOTONIC, which all processes share.
Only `outrider bench profile` sets them; the library knows nothing of them.
"""

from __future__ import annotations

import functools
import importlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

RUNG = "ready to ring"
WOKEN, CALLED, RETURNED = "woken", "called", "returned"


@dataclass(frozen=True)
class Point:
    """A function to wrap, 'module:Class.method' or 'module:function', and the marks set before and after a call.

    The worker's modules are named, not imported: they are to be found in a worker only.
    """

    target: str
    before: str | None = None
    after: str | None = None


_SHARED = (Point("os:eventfd_read", after=WOKEN), Point("os:eventfd_write", RUNG, "rung"))
CALLER_POINTS = (
    *_SHARED,
    Point("outrider.scheduler.steady:Signature.fits", "session found open", "feed checked"),
    Point("outrider.scheduler.slots:Slots.take", after="slot taken"),
    Point("outrider.scheduler.steady:SteadyRun.start", "run begun"),
    Point("outrider.scheduler.steady:SteadyRun.ended", after="words read"),
    Point("outrider.scheduler.steady:SteadyRun.results", after="results copied"),
    Point("outrider.scheduler.slots:Slots.give", "run ended", "slot given back"),
)
WORKER_POINTS = (
    *_SHARED,
    Point("outrider.providers.steady:Steady.fits", "lane found ready", "layouts compared"),
)


class Marks:
    """The marks of one thread, that which made this object, in order of time."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._times: list[int] = []
        self._thread = threading.get_ident()
        self._wrapped: list[tuple[Any, str, Callable[..., Any]]] = []

    def set(self, name: str) -> None:
        """A mark of this moment."""
        self._times.append(time.monotonic_ns())
        self._names.append(name)

    def take(self) -> dict[str, list[Any]]:
        """What has been collected since the last time: {names, times in nanoseconds}."""
        taken: dict[str, list[Any]] = {"names": self._names, "times": self._times}
        self._names, self._times = [], []
        return taken

    def install(self, points: Sequence[Point]) -> None:
        """Set marks from now on. Raises AttributeError for a point that the library does not have."""
        found = [_find(point) for point in points]
        for point, (owner, name) in zip(points, found, strict=True):
            function = getattr(owner, name)
            self._wrapped.append((owner, name, function))
            setattr(owner, name, self._marking(point, function))

    def remove(self) -> None:
        """Set no more marks."""
        while self._wrapped:
            setattr(*self._wrapped.pop())

    def _marking(self, point: Point, function: Callable[..., Any]) -> Callable[..., Any]:
        before, after = point.before, point.after

        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            if threading.get_ident() != self._thread:
                return function(*args, **keywords)
            if before is not None:
                self.set(before)
            result = function(*args, **keywords)
            if after is not None:
                self.set(after)
            return result

        return call


def _find(point: Point) -> tuple[Any, str]:
    """What holds the function, and its name there."""
    module, _, path = point.target.partition(":")
    owner: Any = importlib.import_module(module)
    *holders, name = path.split(".")
    for holder in holders:
        owner = getattr(owner, holder)
    return owner, name
