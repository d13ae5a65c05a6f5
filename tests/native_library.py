"""The compiled kernels as kernel tests use them: watched, and once with all work shared among threads."""

from __future__ import annotations

import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from outrider.providers.cpu.native import FAMILIES, Library, NativeError, load
from outrider.providers.cpu.native.calls import Call

THREADS = 3  # of the second of the two libraries
TASKS = 7  # into which it shares each call, however small, if there are so many items
VARIABLE = "OUTRIDER_TEST_KERNELS"  # path of a library that is tested in place of the one that is loaded here


class _Asked(frozenset[str]):
    """Families that know which of them were asked for."""

    asked: set[str]

    def __contains__(self, family: object) -> bool:
        self.asked.add(str(family))
        return super().__contains__(family)


class Watched(Library):
    """A library that knows which kernels were called; on several threads it makes TASKS of all work."""

    def __init__(self, path: Path, threads: int) -> None:
        super().__init__(path, FAMILIES, threads)
        self.families = _Asked(FAMILIES)
        self.called: set[str] = set()
        self.forget()

    def call(self, name: str, tasks: int, *args: Any) -> Call:
        self.called.add(name)
        return super().call(name, tasks, *args)

    def tasks(self, items: int, nanoseconds: float, each: int = 1) -> int:
        return max(1, min(items, 1 if self.threads == 1 else TASKS))

    def forget(self) -> None:
        """What was called and asked for so far does not count."""
        self.called.clear()
        self.families.asked = set()

    @property
    def used(self) -> frozenset[str]:
        """The families that were asked for since `forget`, if anything was called."""
        return frozenset(self.families.asked) if self.called else frozenset()


@cache
def libraries() -> tuple[Watched, Watched] | None:
    """The compiled kernels on one thread and on THREADS; None where there is no compiler (`why_not`)."""
    chosen = os.environ.get(VARIABLE)
    try:
        path = Path(chosen) if chosen else load().path
    except NativeError as reason:
        if shutil.which("cc") is None:
            return None
        raise AssertionError(f"there is a C compiler, and yet: {reason}") from reason
    return Watched(path, 1), Watched(path, THREADS)


def why_not() -> str:
    """Why `libraries` gives none."""
    try:
        load()
    except NativeError as reason:
        return str(reason)
    return ""
