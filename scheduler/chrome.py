"""A trace as a file that ui.perfetto.dev and chrome://tracing show: Chrome's JSON trace format.

Each process and thread is a track of nested spans ("X" events). An arrow ("s" and "f" events) leads from what wrote a
value (the step, or else the unit) to the partition that reads it. Times are microseconds of CLOCK_MONOTONIC, so files
of several sessions and programs of one host can be laid side by side. What is missing stands under `otherData`, and
shows as an instant of the process.

Format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.providers.wire.spans import Span
from outrider.scheduler.planning import CALLER

Plan = tuple[int, int]  # (session number, generation)
Key = tuple[Plan, int, int]  # (plan, run, partition); partition CALLER for the caller's side of a run
Track = tuple[int, int]  # (process, thread)


@dataclass(frozen=True)
class Process:
    """What one process recorded. `dropped`: how many older spans had no room."""

    pid: int
    name: str
    threads: Mapping[int, str]
    spans: Sequence[Span]
    dropped: int = 0


@dataclass(frozen=True)
class Link:
    """An edge of a plan: `node` of partition `producer` (CALLER: an input) makes `value`, `consumers` read it."""

    value: str
    producer: int
    node: str
    consumers: tuple[int, ...]
    to_caller: bool


@dataclass
class _Work:
    """A partition in one run, or the caller's side of it: where it shows, and what wrote in it."""

    track: Track
    start: int
    failed: bool  # it published nothing
    writers: dict[str, tuple[int, int]] = field(default_factory=dict)  # node or value -> (start, end)
    units: list[tuple[int, int, Mapping[str, Any]]] = field(default_factory=list)


def document(
    processes: Sequence[Process], links: Mapping[Plan, Sequence[Link]], notes: Sequence[str] = ()
) -> dict[str, Any]:
    """The whole file as plain data. `links` of each plan; `notes`: what is missing, in words."""
    events: list[dict[str, Any]] = []
    told = list(notes)
    for position, process in enumerate(processes):
        events += _names(process, position)
        events += (_slice(process.pid, span) for span in process.spans)
        if process.dropped:
            note = f"{process.name}: the first {process.dropped} spans had no room"
            told.append(note)
            first = min((span[3] for span in process.spans), default=0)
            events.append(
                {"ph": "i", "s": "p", "name": note, "pid": process.pid, "tid": process.pid, "ts": first / 1000}
            )
    events += _arrows(processes, links)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "producer": "outrider",
            "clock": "CLOCK_MONOTONIC",
            "missing": told,
            "dropped": {process.name: process.dropped for process in processes if process.dropped},
        },
    }


def _names(process: Process, position: int) -> Iterator[dict[str, Any]]:
    def told(name: str, thread: int, args: dict[str, Any]) -> dict[str, Any]:
        return {"ph": "M", "name": name, "pid": process.pid, "tid": thread, "args": args}

    yield told("process_name", process.pid, {"name": process.name})
    yield told("process_sort_index", process.pid, {"sort_index": position})
    for thread, name in process.threads.items():
        yield told("thread_name", thread, {"name": name})


def _slice(pid: int, span: Span) -> dict[str, Any]:
    kind, name, thread, start, end, args = span
    return {
        "ph": "X", "cat": kind, "name": name, "pid": pid, "tid": thread,
        "ts": start / 1000, "dur": (end - start) / 1000, "args": args,
    }  # fmt: skip


def _arrows(processes: Sequence[Process], links: Mapping[Plan, Sequence[Link]]) -> Iterator[dict[str, Any]]:
    works: dict[Key, _Work] = {}
    for process in processes:
        _find(process, works)
    number = 0
    for (plan, run, partition), work in sorted(works.items(), key=lambda item: item[0]):
        for link in links.get(plan, ()):
            written = _writer(work, link) if link.producer == partition else None
            if written is None:
                continue
            start, end = written
            readers = [*link.consumers, *([CALLER] if link.to_caller and partition != CALLER else [])]
            for reader in readers:
                target = works.get((plan, run, reader))
                if target is None:
                    continue
                at = target.writers.get("results", (target.start, 0))[0] if reader == CALLER else target.start
                number += 1
                # From the last moment, when nothing inside is open; but workers start while the caller rings others.
                leaves = start if partition == CALLER else max(start, end - 1)
                yield _end("s", number, link.value, work.track, leaves)
                yield _end("f", number, link.value, target.track, at + 1)


def _end(phase: str, number: int, value: str, track: Track, at: int) -> dict[str, Any]:
    event = {
        "ph": phase, "cat": "edge", "name": value, "id": number, "pid": track[0], "tid": track[1], "ts": at / 1000
    }  # fmt: skip
    if phase == "f":
        event["bp"] = "e"  # to the span that is open at this time
    return event


def _find(process: Process, works: dict[Key, _Work]) -> None:
    """Add the partitions and runs of a process, with the spans inside each that may have written something."""
    open_work: dict[int, tuple[int, _Work]] = {}  # thread -> (end, work)
    for kind, name, thread, start, end, args in sorted(process.spans, key=lambda span: (span[3], -span[4])):
        if kind in ("partition", "run"):
            partition = CALLER if kind == "run" else args.get("partition")
            numbers = [args.get(name, CALLER) for name in ("session", "generation", "run")]
            if isinstance(partition, int) and all(isinstance(number, int) for number in numbers):
                session, generation, run = numbers
                work = _Work((process.pid, thread), start, "error" in args)
                works[(session, generation), run, partition] = work
                open_work[thread] = (end, work)
            continue
        if thread not in open_work or end > open_work[thread][0]:
            continue
        work = open_work[thread][1]
        if kind == "unit":
            work.units.append((start, end, args))
        elif kind in ("step", "copy"):
            work.writers[name] = (start, end)


def _writer(work: _Work, link: Link) -> tuple[int, int] | None:
    """Times of what wrote the value: the step of its node, else the unit that says so; None if nothing did."""
    if link.producer == CALLER:
        return work.writers.get("inputs")
    if work.failed:
        return None
    if link.node in work.writers:
        return work.writers[link.node]
    for start, end, args in work.units:
        writes = args.get("writes")
        if isinstance(writes, dict) and link.value in writes:
            return start, end
    return None


# The file ------------------------------------------------------------------------------------------------------------
def write(path: str, plain: Mapping[str, Any]) -> None:
    """Write the file whole, or not at all, in place of an earlier one. Raises OSError."""
    fd, made = tempfile.mkstemp(prefix=".outrider-", dir=os.path.dirname(os.path.abspath(path)))
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            events = plain["traceEvents"]
            others = json.dumps({key: value for key, value in plain.items() if key != "traceEvents"})
            file.write(others[:-1] + ', "traceEvents": [\n')
            for position, event in enumerate(events):
                file.write((",\n" if position else "") + json.dumps(event, separators=(",", ":")))
            file.write("\n]}\n")
            os.fchmod(fd, 0o666 & ~_umask())
        os.replace(made, path)
    except BaseException:
        os.unlink(made)
        raise


def write_beside(path: str, plain: Mapping[str, Any]) -> str:
    """Write under the first name of `names(path)` that no file has yet, and return it. Raises OSError."""
    for name in names(path, os.getpid()):
        try:
            os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666))
        except FileExistsError:
            continue
        write(name, plain)
        return name
    raise AssertionError("names never end")


def names(path: str, pid: int) -> Iterable[str]:
    """`t.json`, `t.<pid>.json`, `t.<pid>.2.json`, ..."""
    stem, suffix = os.path.splitext(path)
    yield path
    yield f"{stem}.{pid}{suffix}"
    number = 2
    while True:
        yield f"{stem}.{pid}.{number}{suffix}"
        number += 1


def _umask() -> int:
    """The process's mask, without changing it."""
    with open("/proc/self/status") as file:
        return next((int(line.split()[1], 8) for line in file if line.startswith("Umask:")), 0o077)
