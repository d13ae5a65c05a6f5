"""The first thing that a worker process does: `python -c "... boot.main(boot_fd, path)"`.

It reads its boot record and puts itself in order before anything of NumPy or of a provider is imported: it dies with
its coordinator, leaves stacks when it crashes, and takes its limits, which libraries look at when they load (the number
of cores) or inherit by their threads (niceness, affinity). Nothing does that for it before `exec`: that would be Python
code in a fork of the user's process.

The boot record (msgpack in a memfd): endpoint, identity, name, kind, part, options, device, threads, incarnation, spare
(whether it is started ahead, and waits on a doorbell of its own), `parent` (pid of the coordinator), `wrapped`,
`limits` (`memory`, `cpus`, `nice`, `core`), and the numbers of inherited descriptors: `coordinator` (pidfd),
`doorbell`, `channel` (for descriptors), `control` (for messages where there is no pyzmq; else -1), `progress`,
`stacks`.
"""

from __future__ import annotations

import os
import resource
import signal
from typing import Any, NoReturn

from outrider.providers.wire.codec import msgpack
from outrider.shm.memory import limit_to
from outrider.shm.processes import die_with_parent
from outrider.shm.stackfile import arm


def main(boot_fd: int, path: list[str] | None) -> NoReturn:
    """Entry point; never returns.

    `path`: the coordinator's `sys.path`, for a provider that is not ours; None in another environment.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(boot_fd, "rb") as file:
        boot: dict[str, Any] = msgpack.unpackb(file.read(), strict_map_key=False)
    die_with_parent(None if boot["wrapped"] else boot["parent"])
    arm(boot["stacks"])
    refused = apply_limits(**boot["limits"])

    from outrider.providers import worker  # and with it NumPy

    worker.main(boot, path, refused)


def apply_limits(memory: int | None, cpus: list[int] | None, nice: int | None, core: bool) -> str | None:
    """Bound this process: `memory` in bytes, core numbers, niceness, whether it may leave a core dump.

    What the system refused, in words for the user; None if nothing.
    """
    limit = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (limit if core else 0, limit))
    doing = ""
    try:
        if cpus is not None:
            doing = f"cpus={cpus}"
            os.sched_setaffinity(0, cpus)
        if nice is not None:
            doing = f"nice={nice}"
            os.setpriority(os.PRIO_PROCESS, 0, nice)
        if memory is not None:
            doing = f"memory_limit={memory}"
            limit_to(memory)
    except (OSError, ValueError) as error:
        return f"the system refuses {doing}: {error}"
    return None
