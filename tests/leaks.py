"""What a test may leave behind: nothing. A snapshot of the process's resources, and the difference of two.

Counted are child processes (and, where all processes are looked at, those whose parent died: every process that
inherited this run's mark), entries of /dev/shm, what lies in this run's temporary folder under a name that begins with
`outrider-`, open descriptors, mapped memfds and Python threads. Differences are relative, so a fleet that a module
shares between its tests does not count against each of them.
"""

from __future__ import annotations

import gc
import os
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MARK = "OUTRIDER_TEST_RUN"

# Opened once and kept by the interpreter, onnxruntime or hypothesis; none of them is made by Outrider.
_HARMLESS = re.compile(
    r"^(/proc/|/sys/|/dev/(null|urandom|random|tty)|/etc/|/usr/)|/(site-packages|\.hypothesis|\.onnxruntime)/"
)


@dataclass(frozen=True)
class Snapshot:
    """`processes`: pid -> command. The others count: descriptors by target, memfd mappings by name, threads by name."""

    processes: dict[int, str]
    shared: frozenset[str]
    folders: frozenset[str]
    descriptors: Counter[str]
    mappings: Counter[str]
    threads: Counter[str]


def snapshot(orphans: bool = True) -> Snapshot:
    """The resources of this process now. `orphans`: look at all processes of the machine, which takes milliseconds."""
    return Snapshot(
        processes=_processes(_everyone() if orphans else _children()),
        shared=frozenset(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else frozenset(),
        folders=frozenset(name for name in os.listdir(tempfile.gettempdir()) if name.startswith("outrider-")),
        descriptors=_descriptors(),
        mappings=_mappings(),
        threads=Counter(thread.name for thread in threading.enumerate()),
    )


def leaks(before: Snapshot, after: Snapshot) -> list[str]:
    """One line for each thing that `after` has and `before` has not; empty when nothing leaked."""
    found = [
        f"process {pid}: {command}" for pid, command in sorted(after.processes.items()) if pid not in before.processes
    ]
    found += [f"/dev/shm/{name}" for name in sorted(after.shared - before.shared)]
    found += [f"{tempfile.gettempdir()}/{name}" for name in sorted(after.folders - before.folders)]
    for what, old, new in (
        ("descriptors", before.descriptors, after.descriptors),
        ("mappings", before.mappings, after.mappings),
        ("threads", before.threads, after.threads),
    ):
        found += [f"{count} {what} more: {name}" for name, count in sorted((new - old).items())]
    return found


def settled_leaks(before: Snapshot, patience: float, orphans: bool = True) -> list[str]:
    """Leaks that outlive a garbage collection and `patience` seconds: a killed process needs a moment to be gone."""
    deadline = time.monotonic() + patience
    while found := leaks(before, snapshot(orphans)):
        gc.collect()
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return found


def worker_pids() -> list[int]:
    """Workers that this run has started and that still run, oldest first."""
    return sorted(pid for pid, command in _processes(_everyone()).items() if "outrider.providers" in command)


def _everyone() -> list[str]:
    return [entry for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid()]


def _children() -> list[str]:
    """Children of this process; of all its threads, as each lists those that it has started itself."""
    found: list[str] = []
    for thread in os.listdir("/proc/self/task"):
        try:
            found += Path("/proc/self/task", thread, "children").read_text().split()
        except FileNotFoundError:  # the thread has ended, or this kernel has no such file
            if not os.path.exists("/proc/thread-self/children"):
                return _everyone()
    return found


def _processes(entries: Sequence[str]) -> dict[int, str]:
    """Of these processes the children of this one, and who else carries the mark of this run in its environment."""
    ours = os.getpid()
    found = {}
    for entry in entries:
        try:
            with open(f"/proc/{entry}/stat") as file:
                # The command in parentheses may hold anything; after it come state, parent and, as 20th, the start.
                fields = file.read().rpartition(")")[2].split()
            state, parent, started = fields[0], int(fields[1]), fields[19]
            if parent != ours and ((entry, started) in _foreign or not _marked(entry)):
                _foreign.add((entry, started))
                continue
            command = Path("/proc", entry, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            found[int(entry)] = f"{command.strip() or '(zombie)'} (state {state})"
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
    return found


_foreign: set[tuple[str, str]] = set()  # (pid, start) of processes that are not of this run


def _marked(entry: str) -> bool:
    try:
        environment = Path("/proc", entry, "environ").read_bytes().split(b"\0")
    except PermissionError:
        return False  # another user's process is not one of ours
    return MARK in os.environ and f"{MARK}={os.environ[MARK]}".encode() in environment


def _descriptors() -> Counter[str]:
    """Open descriptors by what they point to; sockets, pipes and the like without their number."""
    found: Counter[str] = Counter()
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
        if not _HARMLESS.search(target):
            found[re.sub(r":\[\d+\]$", "", target)] += 1
    return found


def _mappings() -> Counter[str]:
    """Mapped memfds by name."""
    with open("/proc/self/maps") as lines:
        return Counter(line.split(None, 5)[5].strip() for line in lines if "memfd:" in line)
