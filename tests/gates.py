"""Runs that end when a test lets them, through the provider `Gated` of own_providers.py; and workers that do."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

OWN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "own_providers.py")
ENOUGH = 60.0  # seconds; what is waited for here takes milliseconds


def until(true: Callable[[], bool]) -> bool:
    """Wait for something that nobody tells of; False if it does not come."""
    end = time.monotonic() + ENOUGH
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def end(pid: int) -> None:
    """Kill a process and wait until it is gone: it does nothing more then."""
    fd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        assert poll.poll(ENOUGH * 1000), f"process {pid} lives on"
    finally:
        os.close(fd)


class Gate:
    """Runs of a model of one Identity: `open(n)` lets n of them through."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "gate"
        self.log = folder / "log"
        os.mkfifo(self.path)
        self._fd = os.open(self.path, os.O_RDWR)
        self.provider = (f"{OWN}:Gated", {"gate": str(self.path), "log": str(self.log)})

    def open(self, count: int) -> None:
        os.write(self._fd, bytes(count))

    def seen(self) -> list[float]:
        """First elements of the inputs, in the order in which the provider served them."""
        return [float(line) for line in self.log.read_text().split()] if self.log.exists() else []

    def close(self) -> None:
        os.close(self._fd)
