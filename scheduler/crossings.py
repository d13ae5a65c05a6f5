"""What it costs to cross from one worker to the next, measured on this machine: one hop, one byte.

A hop is what a partition adds to a run: a process is woken by a doorbell, looks, works, and wakes the next. The wake-up
is measured with two threads that wake each other; the rest is Python that runs either way. Where both threads fall on
one core they are faster than two workers would be, so the slowest of some batches counts. A byte that crosses is
written by one core and read by another, which costs what copying it costs. Taken once per process, in about 20 ms.
"""

from __future__ import annotations

import functools
import statistics
import threading
import time

import numpy as np

from outrider.scheduler.costs import Crossing
from outrider.shm.doorbell import Doorbell

HANDLING = 12e-6  # seconds: what a worker does for a partition beside its kernels (`outrider bench hop`)
BATCHES = 3
EXCHANGES = 64
COPIES = 5
COPIED_BYTES = 4 << 20


@functools.cache
def measured_crossing() -> Crossing:
    """The crossing costs of this machine; measured by the first call."""
    wake = max(_exchange_seconds() for _ in range(BATCHES)) / 2
    return Crossing(hop=wake + HANDLING, byte=_copy_seconds() / COPIED_BYTES)


def _exchange_seconds() -> float:
    """Median time for waking another thread and being woken by it."""
    there, back = Doorbell(), Doorbell()

    def answer() -> None:
        for _ in range(EXCHANGES):
            there.wait()
            back.ring()

    other = threading.Thread(target=answer, name="outrider-crossing", daemon=True)
    other.start()
    taken = []
    try:
        for _ in range(EXCHANGES):
            start = time.perf_counter()
            there.ring()
            back.wait()
            taken.append(time.perf_counter() - start)
    finally:
        for _ in range(EXCHANGES - len(taken)):  # interrupted: the other must not wait for ever
            there.ring()
        other.join()
        there.close()
        back.close()
    return statistics.median(taken)


def _copy_seconds() -> float:
    """Shortest time for copying COPIED_BYTES."""
    source = np.ones(COPIED_BYTES, np.uint8)
    target = np.zeros(COPIED_BYTES, np.uint8)
    taken = []
    for _ in range(COPIES):
        start = time.perf_counter()
        np.copyto(target, source)
        taken.append(time.perf_counter() - start)
    return min(taken)
