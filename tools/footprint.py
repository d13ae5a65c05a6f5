"""What this process and the processes it started hold: memory, descriptors, threads, segments. Read from /proc."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

_USER, _SYSTEM, _STARTED = 11, 12, 19  # places in what follows the command in /proc/<pid>/stat


@dataclass(frozen=True)
class Footprint:
    """`pss`: bytes of memory, shared pages counted in shares; `workers_*`: sums over all children.

    `segments`: mappings of memfds in this process.
    """

    pss: int
    descriptors: int
    threads: int
    segments: int
    workers: int
    workers_pss: int
    workers_descriptors: int
    workers_threads: int

    def plain(self) -> dict[str, int]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def names(cls) -> list[str]:
        """The fields, in order."""
        return [field.name for field in fields(cls)]


def footprint() -> Footprint:
    """As it is now. Raises FileNotFoundError or ProcessLookupError if a child ends meanwhile."""
    own, workers = os.getpid(), children()
    with open("/proc/self/maps") as lines:
        segments = sum("/memfd:" in line for line in lines)
    return Footprint(
        pss=_pss(own),
        descriptors=_entries(own, "fd"),
        threads=_entries(own, "task"),
        segments=segments,
        workers=len(workers),
        workers_pss=sum(map(_pss, workers)),
        workers_descriptors=sum(_entries(pid, "fd") for pid in workers),
        workers_threads=sum(_entries(pid, "task") for pid in workers),
    )


def children() -> list[int]:
    """Children of this process that run, in the order of their starts; of all its threads, as each lists its own."""
    found: list[int] = []
    for thread in os.listdir("/proc/self/task"):
        try:
            found += map(int, Path("/proc/self/task", thread, "children").read_text().split())
        except FileNotFoundError:  # the thread has ended
            continue
    started = {pid: int(state[_STARTED]) for pid in found if (state := _state(pid))}
    return sorted(started, key=lambda pid: (started[pid], pid))


def runs(pid: int) -> bool:
    """False for a process that is gone, or has ended and was not waited for yet."""
    return bool(_state(pid))


def worked(pid: int) -> int:
    """Clock ticks for which a process has worked; 0 if it is gone."""
    state = _state(pid)
    return int(state[_USER]) + int(state[_SYSTEM]) if state else 0


def _state(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat after the command, which may hold anything; [] if it does not run."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return state if state[0] not in "ZX" else []


def _pss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise ProcessLookupError(f"process {pid} has no memory any more")


def _entries(pid: int, folder: str) -> int:
    return len(os.listdir(f"/proc/{pid}/{folder}"))
