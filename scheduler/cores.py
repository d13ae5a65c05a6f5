"""How many CPU cores this process may use: its affinity, bounded by the CPU quota of its cgroup (v2 or v1)."""

from __future__ import annotations

import os
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
