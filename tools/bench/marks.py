"""Marks: moments in the life of a run, taken by wrapping functions of the library in this process.

Every mark is named after what has just been done and carries the time of CLOCK_MONOTONIC, which all processes share.
Only `outrider bench profile` installs them; the library knows nothing of them.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

RUNG, WOKEN = "words written", "woken"  # the moment before a ring, the moment after a wait


@dataclass(frozen=True)
class Point:
    """A function to wrap, 'module:Class.method' or 'module:function', and the marks set before and after a call."""

    target: str
    before: str | None = None
    after: str | None = None


class Marks:
    """The marks of this process, in order of time."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.times: list[int] = []  # nanoseconds

    def set(self, name: str) -> None:
        """A mark of this moment."""
        self.times.append(time.monotonic_ns())
        self.names.append(name)

    def take(self) -> dict[str, list[Any]]:
        """What has been collected, and forget it: {names, times}."""
        taken = {"names": self.names, "times": self.times}
        self.names, self.times = [], []
        return taken

    @contextmanager
    def installed(self, points: Sequence[Point]) -> Iterator[None]:
        """Set marks while the block runs. Raises AttributeError for a point that the library does not have."""
        held = [(owner, name, getattr(owner, name)) for owner, name in map(_find, points)]
        try:
            for point, (owner, name, function) in zip(points, held, strict=True):
                setattr(owner, name, self._marking(point, function))
            yield
        finally:
            for owner, name, function in held:
                setattr(owner, name, function)

    def _marking(self, point: Point, function: Callable[..., Any]) -> Callable[..., Any]:
        before, after = point.before, point.after

        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
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
