"""How much memory may still be touched, and the typed refusal when that is too little.

A memory cgroup over its limit kills, and shared memory that the machine cannot back ends in SIGBUS: neither can be
caught. So everything here that populates memory asks first. Nothing is cached but the places to look at: one question
costs three or four small reads of procfs.
"""

from __future__ import annotations

import errno
import resource
from functools import lru_cache
from pathlib import Path

from outrider.shm.errors import OutOfMemoryError

# Left to the processes themselves: interpreters, stacks, the kernel's own tables for the pages asked for.
RESERVE = 32 << 20

_limit: int | None = None  # of this process, by `limit_to`

# Names of (limit, usage, reclaimable line of memory.stat) in cgroup v2 and v1.
_V2 = ("memory.max", "memory.current", b"inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", b"total_inactive_file")


class MemoryGroup:
    """One memory cgroup that exists: where its limit, usage and statistics are read."""

    __slots__ = ("limit", "usage", "statistics", "reclaimable")

    def __init__(self, folder: Path, names: tuple[str, str, bytes]) -> None:
        self.limit = folder / names[0]
        self.usage = folder / names[1]
        self.statistics = folder / "memory.stat"
        self.reclaimable = names[2]

    def available(self, most: int) -> int:
        """Bytes below the limit, file cache that can be dropped at once included; `most` if that is less."""
        limit = _number(self.limit)
        if limit is None:
            return most
        left = limit - (_number(self.usage) or 0)
        if left < most:  # the statistics are the slow part to read
            left += _line(self.statistics, self.reclaimable)
        return min(left, most)


def memory_groups(membership: str, root: Path) -> list[MemoryGroup]:
    """The memory cgroups of a process, from its own up to the root.

    `membership` is the text of `/proc/<pid>/cgroup`, `root` the folder where cgroups are mounted. Folders that are not
    visible (a container sees its own group as the root) are left out.
    """
    groups = []
    for line in membership.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            mounts, names = [root, root / "unified"], _V2
        elif "memory" in controllers.split(","):
            mounts, names = [root / "memory"], _V1
        else:
            continue
        for mount in mounts:
            folder = mount / path.lstrip("/")
            for candidate in (folder, *folder.parents):
                if (candidate / names[0]).exists():
                    groups.append(MemoryGroup(candidate, names))
                if candidate == mount:
                    break
    return groups


def limit_to(nbytes: int) -> None:
    """Bound this process, and what it starts, to `nbytes` of memory; at most once, before it has much.

    The kernel refuses private memory beyond it (RLIMIT_DATA: heap, stacks and private mappings, counted when they are
    asked for; files and shared memory are not). Shared memory is refused by `check`, which counts what the process has
    touched of either. Raises OSError or ValueError where the system does not allow it.
    """
    global _limit
    resource.setrlimit(resource.RLIMIT_DATA, (nbytes, nbytes))
    _limit = nbytes


def available_bytes() -> int:
    """Bytes that may be populated now: the least of MemAvailable and what each memory cgroup leaves, less RESERVE, and
    what the limit of this process leaves, if it has one.
    """
    least = _line(Path("/proc/meminfo"), b"MemAvailable:") << 10
    for group in _own_groups():
        least = group.available(least)
    least -= RESERVE
    if _limit is not None:
        status = Path("/proc/self/status")
        least = min(least, _limit - (_line(status, b"RssAnon:") + _line(status, b"RssShmem:") << 10))
    return max(0, least)


def check(value: str, asked: int) -> None:
    """Raise OutOfMemoryError unless `asked` more bytes may be populated for `value` (its name in the message)."""
    available = available_bytes()
    if asked > available:
        raise OutOfMemoryError(
            f"{value} needs {asked} more bytes where {available} are available; "
            "use smaller inputs, or give this process more memory",
            value=value,
            asked=asked,
            available=available,
        )


@lru_cache(maxsize=1)
def _own_groups() -> tuple[MemoryGroup, ...]:
    try:
        membership = Path("/proc/self/cgroup").read_text()
    except OSError:
        return ()
    return tuple(memory_groups(membership, Path("/sys/fs/cgroup")))


def _number(path: Path) -> int | None:
    """The integer in a file; None where it says `max`, or where there is no such file (any more)."""
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _line(path: Path, key: bytes) -> int:
    """The integer behind `key` in a file of lines `key value`; 0 where it is absent."""
    for line in _read(path).splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == key:
            return int(words[1])
    return 0


def _read(path: Path) -> bytes:
    """The contents of a small file; empty where there is none (any more). Short of descriptors it raises OSError."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):  # that says nothing about memory
            raise
        return b""
