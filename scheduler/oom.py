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

from pathlib import Path

_V2 = ("memory.events", "sys/fs/cgroup", "sys/fs/cgroup/unified")
_V1 = ("memory.oom_control", "sys/fs/cgroup/memory")
_SYSTEM = "proc/vmstat"


def oom_kills(text: str) -> int | None:
    """The counter in the text of any of the three files; None if it is not there (kernels before 4.13)."""
    for line in text.splitlines():
        name, _, count = line.partition(" ")
        if name == "oom_kill" and count.strip().isdecimal():
            return int(count)
    return None


def candidates(cgroups: str) -> list[str]:
    """Where the counter of a process may be, best first, from the text of its `/proc/<pid>/cgroup`.

    In a container that has no cgroup namespace the path there is the host's, and its own cgroup is what is mounted.
    """
    found = []
    for line in cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        name, *mounts = _V2 if not controllers else _V1 if "memory" in controllers.split(",") else ("",)
        found += [f"{mount}/{inside}{name}" for mount in mounts for inside in dict.fromkeys((path[1:] + "/", ""))]
    return [*(path.replace("//", "/") for path in found), _SYSTEM]


class OomKills:
    """The kills by lack of memory that no death has been blamed on yet, from now on. `root`: for tests."""

    def __init__(self, root: str = "/") -> None:
        self._root = Path(root)
        self._blamed = 0
        self.source = ""
        for path in candidates(self._read("proc/self/cgroup")):
            count = oom_kills(self._read(path))
            if count is not None:
                self.source, self._blamed = path, count
                break

    def explain(self) -> str | None:
        """For a death by a SIGKILL that is not ours: what the kernel says about it; None when it says nothing.

        Each kill that was counted explains one death.
        """
        count = oom_kills(self._read(self.source)) if self.source else None
        if count is None or count <= self._blamed:
            return None
        self._blamed += 1
        return f"the kernel ended a process because memory was short (oom_kill in /{self.source} is {count})"

    def _read(self, path: str) -> str:
        try:
            return (self._root / path).read_text()
        except OSError:  # not mounted, or not for us to read
            return ""
