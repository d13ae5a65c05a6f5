"""The progress record: what a worker is doing now, told without a message.

A segment of one page per incarnation, made by the coordinator, written by the worker's main thread only:

    word 0   what: kind << 56 | session << 32 | slot << 24 | partition; 0 while it waits for work
    word 1   step: the position of the unit within the partition (LOAD, RUN), the round (CLAIM); 0 between
    word 2-7 unused

Order of writes: word 1 before word 0 where both change. The record outlives the process: it tells what a worker was
doing when it died, also when no signal handler could run. A RUN whose `done` word is out has ended, whatever the record
says; whoever reads it looks there too.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.shm.segment import PAGE, Segment, create_segment

IDLE = 0
RUN = 1
START = 2
CLAIM = 3
LOAD = 4
STOP = 5
PHASES = {IDLE: "idle", RUN: "run", START: "start", CLAIM: "claim", LOAD: "load", STOP: "stop"}
"""Kind -> the word for it in errors and reports."""

WHAT = 0
STEP = 1
_SLOTS = 1 << 8
_PARTITIONS = 1 << 24


def what(kind: int, session: int = 0, slot: int = 0, partition: int = 0) -> int:
    """Word 0. `session` and `partition` count modulo 2**24, `slot` is below 256."""
    return kind << 56 | (session % _PARTITIONS) << 32 | slot << 24 | partition % _PARTITIONS


def same_session(shown: int, session: int) -> bool:
    """Whether the session that a record shows is this one."""
    return shown == session % _PARTITIONS


@dataclass(frozen=True)
class Doing:
    """The record, taken apart. `slot`, `partition` and `step` mean something for some kinds only."""

    kind: int
    session: int
    slot: int
    partition: int
    step: int

    @property
    def phase(self) -> str:
        """'run', 'start', 'claim', 'load', 'stop' or 'idle'."""
        return PHASES.get(self.kind, "idle")


NOTHING = Doing(0, 0, 0, 0, 0)


def create_progress() -> int:
    """A new record; returns its descriptor (close-on-exec, yours)."""
    return create_segment("outrider-progress", PAGE)


class ProgressWriter:
    """The worker's side: `words` to be written as drawn above. The descriptor may be closed afterwards."""

    def __init__(self, fd: int) -> None:
        self.words = Segment(fd, writable=True).words

    def begin(self, kind: int, session: int = 0, partition: int = 0, step: int = 0) -> None:
        """Tell what comes now; the steady state writes word 0 itself."""
        self.words[STEP] = step
        self.words[WHAT] = what(kind, session, 0, partition)

    def end(self) -> None:
        """Back to waiting for work."""
        self.words[WHAT] = 0
        self.words[STEP] = 0


class ProgressReader:
    """The coordinator's side. The descriptor may be closed afterwards."""

    def __init__(self, fd: int) -> None:
        self._words = Segment(fd, writable=False).words

    def read(self) -> Doing:
        """What the worker is doing, or was when it died."""
        word, step = self._words[WHAT], self._words[STEP]
        partitions, slots = _PARTITIONS - 1, _SLOTS - 1
        return Doing(word >> 56, word >> 32 & partitions, word >> 24 & slots, word & partitions, step)
