"""What probes of providers saw, kept from one process to the next.

A verdict holds for one way to start a provider: its kind, options, environment, interpreter and limits, the files of
its class or its libraries (time and size), the machine, and this version of Outrider. What changes any of these asks
again. How long it is kept:

| the probe saw | kept |
|---|---|
| nothing wrong | until something changes |
| the process ended by a signal of its own, or exited | a day: what it crashed over may lie outside of its file |
| it was late, or died short of memory | ten minutes, and not for those who give it more time: the machine may be busy |
| SIGKILL, SIGTERM and the like, which come from outside | not |
| the provider says why it does not start | not: that costs little to ask, and the answer may change |

Options and environment may hold secrets; only a hash of them is written.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider import __version__
from outrider.scheduler import cache
from outrider.scheduler.interpreters import files_of
from outrider.scheduler.oom import says_so
from outrider.scheduler.options import ProviderSpec
from outrider.scheduler.provider_file import foreign_files

CRASH_SECONDS = 24 * 3600.0
PASSING_SECONDS = 600.0  # of what may have been the machine's fault
MOST = 256  # verdicts that are kept
KEPT_STORY = 4000  # characters
FORMAT = 1
_FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGXCPU")
# By these a loader finds libraries: who changes them to mend a crash must not be told of the old one.
_LOADER = ("LD_LIBRARY_PATH", "LD_PRELOAD")


@dataclass(frozen=True)
class Verdict:
    """How a provider did.

    `cause`: '' nothing wrong, 'raised' it said why it does not start, 'late' it took longer than `deadline` seconds,
    'died' its process ended, by `signal` or with `exit_code`. `phase`: 'start' or 'claim', '' if nothing is wrong.
    `reason`: the same in words. `story`: what it left behind: stack, output. `when`: seconds since 1970.
    """

    cause: str = ""
    phase: str = ""
    reason: str = ""
    signal: str | None = None
    exit_code: int | None = None
    deadline: float = 0.0
    story: str = ""
    when: float = 0.0

    @property
    def good(self) -> bool:
        """Whether the provider may be used."""
        return not self.cause

    @property
    def passing(self) -> bool:
        """Whether what was wrong may have been the machine's fault: too little time, or memory."""
        return self.cause == "late" or says_so(self.reason + self.story)


def kept_seconds(verdict: Verdict) -> float:
    """How long a verdict counts; 0.0: it is not kept, inf: until the provider changes."""
    if verdict.good:
        return math.inf
    if verdict.cause == "raised" or verdict.signal in _FROM_OUTSIDE:
        return 0.0
    return PASSING_SECONDS if verdict.passing else CRASH_SECONDS


def counts(verdict: Verdict, now: float, deadlines: Mapping[str, float]) -> bool:
    """Whether a kept verdict still counts at the time `now`. `deadlines`: phase -> seconds that it would get now."""
    if verdict.good:
        return True
    if verdict.cause == "late" and deadlines.get(verdict.phase, math.inf) > verdict.deadline:
        return False
    return verdict.when <= now < verdict.when + kept_seconds(verdict)  # not if the clock was set back


def path_of(spec: ProviderSpec) -> str | None:
    """Where the verdict on this provider lies; None if its file cannot be told, or there is no cache folder."""
    folder, facts = cache.cache_folder(), _facts(spec)
    if folder is None or facts is None:
        return None
    text = json.dumps(facts, sort_keys=True, default=list)
    return os.path.join(folder, "probes", f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json")


def _facts(spec: ProviderSpec) -> dict[str, Any] | None:
    """All that a verdict depends on, as plain data."""
    files = foreign_files(spec)
    if files is None:
        return None
    try:
        stamps = [_stamp(one) for one in (*files, *files_of(spec.python or sys.executable))]
    except OSError:
        return None
    given = {one.name: getattr(spec, one.name) for one in dataclasses.fields(spec)}
    for told_elsewhere in ("name", "required", "python"):
        del given[told_elsewhere]
    given["env"], given["options"] = dict(spec.env), _plain(spec.options)
    loader, machine = [os.environ.get(name) for name in _LOADER], os.uname()
    return {
        "format": FORMAT, "version": __version__, "spec": given, "loader": loader, "stamps": stamps,
        "machine": [machine.nodename, machine.release],  # homes are shared, and a new kernel may mend a driver
    }  # fmt: skip


def _plain(item: Any) -> Any:
    """Options as JSON can hold them, dicts as pairs, so that no two of them look the same."""
    if isinstance(item, bytes):
        return {"bytes": item.hex()}
    if hasattr(item, "items"):
        return {"dict": sorted((key, _plain(value)) for key, value in item.items())}
    return [_plain(one) for one in item] if isinstance(item, (list, tuple)) else item


def _stamp(path: str) -> list[Any]:
    found = os.stat(path)
    return [path, found.st_mtime_ns, found.st_size]


def find(spec: ProviderSpec, deadlines: Mapping[str, float]) -> Verdict | None:
    """The verdict on a provider that counts now, for who gives it so many seconds in each phase; None without one."""
    path = path_of(spec)
    verdict = None if path is None else _verdict(cache.read(path))
    return verdict if verdict is not None and counts(verdict, time.time(), deadlines) else None


def _verdict(data: Any) -> Verdict | None:
    """A verdict out of a file; None for whatever else is there."""
    types = {one.name: type(one.default) for one in dataclasses.fields(Verdict)} | {"signal": str, "exit_code": int}
    if not isinstance(data, dict) or not set(types) <= set(data):
        return None
    given = {name: data[name] for name in types}
    for name, expected in types.items():
        absent = given[name] is None and name in ("signal", "exit_code")
        if not absent and not isinstance(given[name], (int, float) if expected is float else expected):
            return None
    return Verdict(**given)


def keep(spec: ProviderSpec, verdict: Verdict) -> str | None:
    """Keep a verdict for as long as it counts, in place of an earlier one; the file, or None if none is kept."""
    path = path_of(spec)
    if path is None:
        return None
    if not kept_seconds(verdict):
        cache.remove(path)
        return None
    data = dataclasses.asdict(verdict) | {"story": verdict.story[-KEPT_STORY:], "kind": spec.kind}
    if not cache.write(path, data):
        return None
    cache.bound(os.path.dirname(path), ".json", MOST)
    return path
