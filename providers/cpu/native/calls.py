"""Prepared calls of compiled kernels. Several in a row are one call: 0.05 us each instead of 0.8."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from outrider.shm.segment import address_of

_STEP = struct.Struct("=QQq")  # struct step of pool.c: kernel, args, tasks
MOST_TASKS = 65535


class Call:
    """One kernel with its arguments, in `tasks` shares. Calling it does the work.

    An array becomes its address and is kept; None is a null pointer; an int is an int64_t, a float a double.
    """

    __slots__ = ("name", "record", "_run", "_step", "_held")

    def __init__(self, run: Callable[[Any, int], Any], name: str, kernel: int, tasks: int, args: Sequence[Any]) -> None:
        if not 1 <= tasks <= MOST_TASKS:
            raise ValueError(f"{name} in {tasks} tasks; there may be 1 to {MOST_TASKS}")
        packed = b"".join(_word(arg) for arg in args)
        memory = ctypes.create_string_buffer(packed, len(packed))
        self.name = name
        self.record = _STEP.pack(kernel, ctypes.addressof(memory), tasks)
        self._held = (memory, args)
        self._step = ctypes.create_string_buffer(self.record, _STEP.size)
        self._run = run

    def __call__(self) -> None:
        self._run(self._step, 1)

    def followed_by(self, others: Sequence[Call]) -> Callable[[], Any]:
        """This call and then the others, as one."""
        records = b"".join(call.record for call in (self, *others))
        steps = ctypes.create_string_buffer(records, len(records))
        return partial(_together, self._run, steps, 1 + len(others), (self, *others))


def _together(run: Callable[[Any, int], Any], steps: Any, count: int, held: Any) -> None:
    run(steps, count)


def _word(arg: Any) -> bytes:
    if isinstance(arg, np.ndarray):
        return struct.pack("=Q", address_of(arg))
    if arg is None:
        return bytes(8)
    if isinstance(arg, (int, np.integer)):  # a bool is an int
        return struct.pack("=q", arg)
    return struct.pack("=d", arg)


def merged(steps: Sequence[Callable[[], Any]], first: int = 0) -> list[tuple[Callable[[], Any], int]]:
    """The same work with consecutive calls of the library made one, each with the position of its first step.

    `first`: the position of the first of `steps`.
    """
    line: list[tuple[Callable[[], Any], int]] = []
    row: list[Call] = []

    def close(end: int) -> None:
        if row:
            line.append((row[0].followed_by(row[1:]) if len(row) > 1 else row[0], end - len(row)))
            row.clear()

    for at, step in enumerate(steps, first):
        if isinstance(step, Call):
            row.append(step)
        else:
            close(at)
            line.append((step, at))
    close(first + len(steps))
    return line
