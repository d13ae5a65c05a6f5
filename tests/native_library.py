"""The compiled library in two forms for tests of small arrays: one task each, or as many tasks as there are items."""

from __future__ import annotations

from functools import cache

from outrider.providers.cpu.native import FAMILIES, Library, load


class Serial(Library):
    """Every call is one task."""

    def tasks(self, items: int, nanoseconds: float, each: int = 1) -> int:
        return 1


class Shared(Library):
    """Every call is as many tasks as there are items, up to seven, however little work it is."""

    def tasks(self, items: int, nanoseconds: float, each: int = 1) -> int:
        return max(1, min(items, 7))


@cache
def libraries() -> tuple[Serial, Shared]:
    """Both, on one pool of three threads."""
    path = load(FAMILIES).path
    return Serial(path, threads=3), Shared(path, threads=3)
