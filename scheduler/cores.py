"""How many CPU cores this process may use, and how workers that compute at once share them.

Usable are those of the process's affinity, bounded by the CPU quota of its cgroup (v2 or v1). A worker that is given no
number of threads gets one per usable core, since workers of one run follow one another; only with a strategy that keeps
several of them busy ('pipeline', 'replicate') the cores are shared out.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None


def _quota() -> float | None:
    """Cores granted by the cgroup, or None for no limit."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    quota = _number("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
    period_v1 = _number("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
    if quota is None or period_v1 is None or quota <= 0 or period_v1 <= 0:
        return None
    return quota / period_v1


def usable_cores() -> int:
    """At least 1."""
    cores = len(os.sched_getaffinity(0))
    quota = _quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def thread_share(cores: int, wanted: Sequence[int | None]) -> int:
    """Threads, at least 1, of each worker that leaves its number open (None), when all of `wanted` compute at once."""
    given = sum(threads for threads in wanted if threads is not None)
    return max(1, (cores - given) // max(1, wanted.count(None)))
