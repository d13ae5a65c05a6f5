"""Which edges of a writer share one buffer: an arena per run slot, planned by lifetime.

Sizes are often known only in the run, so what is planned is not offsets but a colouring: edges with one buffer number
lie at the same place, one after the other in the course of a run.

Invariant: an edge takes over a buffer only if its producer depends on every reader of every edge that had it before.
    - A reader in the partition that made the value: the new producer is a later unit there, or in a partition that
      depends on that one.
    - A reader in another partition: the new producer is in a partition that depends on that one. A later unit of the
      reading partition is not enough: while a partition runs, all that it was given is still there, so that it can be
      run again from the start.
    - The caller: never. Nothing in a run depends on it.
It is enough to look at the edge that had the buffer last: the new producer depends on a reader of it or on its
producer, which depends on all before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.scheduler.planning import CALLER, Edge, Plan, PlanPartition, UnitInterface
from outrider.scheduler.waves import last_ancestors

CANDIDATES = 64  # buffers looked at per edge: planning stays linear


class Precedence:
    """Which partition waits for which, told in constant time; not every dependence is seen, none is made up.

    Partitions of one owner that wait for one another form a forest: the parent of each is the last one it waits for.
    `waits(q, c)` is true if `c` lies on the way from the last ancestor of `q` among `c`'s owner to its root. That is
    exact where the partitions of each owner form a chain.
    """

    def __init__(self, owners: Sequence[int], edges: Sequence[tuple[int, int]]) -> None:
        """`edges` lead from smaller to larger numbers of partitions."""
        self._owners = owners
        self._latest = last_ancestors(owners, edges)
        parent = [latest[owner] for latest, owner in zip(self._latest, owners, strict=True)]
        # Numbers of an Euler tour: a subtree is a range of them.
        self._size = [1] * len(owners)
        for child in range(len(owners) - 1, -1, -1):
            if parent[child] >= 0:
                self._size[parent[child]] += self._size[child]
        self._start = [0] * len(owners)
        free = [0] * len(owners)  # the next number for a child
        roots = 0
        for child, above in enumerate(parent):
            if above >= 0:
                self._start[child] = free[above]
                free[above] += self._size[child]
            else:
                self._start[child] = roots
                roots += self._size[child]
            free[child] = self._start[child] + 1

    def waits(self, partition: int, other: int) -> bool:
        """True only if `partition` cannot start before `other` has ended."""
        last = self._latest[partition][self._owners[other]]
        return last >= 0 and 0 <= self._start[last] - self._start[other] < self._size[other]


@dataclass
class _Buffer:
    """A buffer and the value that had it last."""

    number: int
    nbytes: int = 0  # of its largest value, as far as known
    partition: int = -1  # where that value is made
    last_unit: int = -1  # the last unit there that makes or reads it
    readers: tuple[int, ...] = ()  # the other partitions that read it
    refused: int = -1  # the last partition that was found not to wait for all of them


def share_buffers(
    plan: Plan, interfaces: Sequence[UnitInterface], edges: Sequence[Edge], sizes: Mapping[str, int]
) -> dict[str, int]:
    """The buffer number of every value that a unit returns; numbers count from 0 for each provider of the plan.

    `sizes`: bytes of values, exact or estimated, by which alike ones are put together; missing ones count as 0.
    """
    crossing = {edge.value: edge for edge in edges if edge.producer != CALLER}
    precedence = Precedence(
        [partition.provider for partition in plan.partitions],
        [(edge.producer, consumer) for edge in crossing.values() for consumer in edge.consumers],
    )
    made: dict[str, int] = {}
    counts: dict[int, int] = {}  # provider -> its buffers
    used: dict[int, deque[_Buffer]] = {}  # provider -> those that may serve again
    for number, partition in enumerate(plan.partitions):
        last_unit = _last_units(partition, interfaces)
        buffers = used.setdefault(partition.provider, deque())
        for unit in partition.units:
            for value in interfaces[unit].outputs:
                edge = crossing.get(value)
                kept = edge is not None and edge.to_caller
                size = sizes.get(value, 0)
                buffer = None if kept else _free(buffers, size, unit, number, precedence)
                if buffer is None:
                    buffer = _Buffer(counts.get(partition.provider, 0))
                    counts[partition.provider] = buffer.number + 1
                    if not kept:
                        buffers.append(buffer)
                buffer.nbytes = max(buffer.nbytes, size)
                buffer.partition, buffer.last_unit = number, last_unit[value]
                buffer.readers = () if edge is None else edge.consumers
                made[value] = buffer.number
    return made


def _last_units(partition: PlanPartition, interfaces: Sequence[UnitInterface]) -> dict[str, int]:
    """Value made in a partition -> the last unit there that makes or reads it."""
    last: dict[str, int] = {}
    for unit in partition.units:
        last.update((value, unit) for value in interfaces[unit].inputs if value in last)
        last.update(dict.fromkeys(interfaces[unit].outputs, unit))
    return last


def _free(buffers: deque[_Buffer], size: int, unit: int, partition: int, precedence: Precedence) -> _Buffer | None:
    """Of a bounded number of buffers, those that a unit may write: the smallest that is large enough, else the largest.

    Those that were looked at go to the end: the next one to ask looks at others first.
    """
    best: _Buffer | None = None
    for _ in range(min(len(buffers), CANDIDATES)):
        buffer = buffers.popleft()
        buffers.append(buffer)
        if buffer.refused == partition:
            continue
        if buffer.partition == partition:
            if buffer.readers or buffer.last_unit >= unit:
                continue
        elif not all(precedence.waits(partition, reader) for reader in buffer.readers or (buffer.partition,)):
            buffer.refused = partition
            continue
        if best is None or _rank(buffer, size) < _rank(best, size):
            best = buffer
            if buffer.nbytes == size:
                break
    return best


def _rank(buffer: _Buffer, size: int) -> tuple[bool, int]:
    return (False, buffer.nbytes) if buffer.nbytes >= size else (True, -buffer.nbytes)
