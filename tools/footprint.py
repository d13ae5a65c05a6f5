"""What this process and the processes it started hold: memory, descriptors, threads, segments. Read from /proc."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path


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
    """Children of this process that run, oldest first; of all its threads, as each lists those that it has started."""
    found: list[int] = []
    for thread in os.listdir("/proc/self/task"):
        try:
            found += map(int, Path("/proc/self/task", thread, "children").read_text().split())
        except FileNotFoundError:  # the thread has ended
            continue
    return sorted(pid for pid in found if runs(pid))


def runs(pid: int) -> bool:
    """False for a process that is gone, or has ended and was not waited for yet."""
    try:
        # The command in parentheses may hold anything; the state follows it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _pss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise ProcessLookupError(f"process {pid} has no memory any more")


def _entries(pid: int, folder: str) -> int:
    return len(os.listdir(f"/proc/{pid}/{folder}"))
