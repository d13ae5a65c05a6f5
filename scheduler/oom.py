"""Whether the kernel ended a process because memory was short: only the kernel's own counters say so.

A process that the out-of-memory killer ends looks like any other that got SIGKILL. But the kernel counts its victims:

| counter | of |
|---|---|
| `oom_kill` in `memory.events` | a cgroup, version 2 |
| `oom_kill` in `memory.oom_control` | a cgroup, version 1 |
| `oom_kill` in `/proc/vmstat` | the whole system; used where no cgroup tells |

Workers are in the cgroup of the process that started them. (One whose `wrap` moves it elsewhere is not counted here.)
"""

from __future__ import annotations

import re
from pathlib import Path

from outrider.shm.memory import memory_groups

_NAMES = ("memory.events", "memory.oom_control")
_SYSTEM = "proc/vmstat"
# Python, NumPy, C++, the C library, OpenBLAS.
_WORDS = re.compile(
    r"MemoryError|unable to allocate|bad_alloc|cannot allocate memory|out of memory|memory allocation", re.IGNORECASE
)


def says_so(text: str) -> bool:
    """Whether what a process wrote speaks of memory that it was refused. That alone proves nothing."""
    return _WORDS.search(text) is not None


def oom_kills(text: str) -> int | None:
    """The counter in the text of any of the three files; None if it is not there (kernels before 4.13)."""
    for line in text.splitlines():
        name, _, count = line.partition(" ")
        if name == "oom_kill" and count.strip().isdecimal():
            return int(count)
    return None


class OomKills:
    """The kills by lack of memory that no death has been blamed on yet, from now on. `root`: for tests."""

    def __init__(self, root: str = "/") -> None:
        self._blamed = 0
        self.source: Path | None = None
        groups = memory_groups(_read(Path(root, "proc/self/cgroup")), Path(root, "sys/fs/cgroup"))
        for path in [*(group.limit.parent / name for group in groups for name in _NAMES), Path(root, _SYSTEM)]:
            count = oom_kills(_read(path))
            if count is not None:
                self.source, self._blamed = path, count
                break

    def explain(self) -> str | None:
        """For a death by a SIGKILL that is not ours: what the kernel says about it; None when it says nothing.

        Each kill that was counted explains one death.
        """
        count = None if self.source is None else oom_kills(_read(self.source))
        if count is None or count <= self._blamed:
            return None
        self._blamed += 1
        return f"the kernel ended a process because memory was short (oom_kill in {self.source} is {count})"


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # not mounted, or not for us to read
        return ""
