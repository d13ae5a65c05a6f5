"""What a session must give back, in the order in which it must."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from outrider.scheduler import overdue
from outrider.scheduler.closing import Closing, closed_error
from outrider.scheduler.trace import Tracing
from outrider.shm.processes import fill_standard_streams

if TYPE_CHECKING:
    from outrider.scheduler.asynchronous import AsyncRuns
    from outrider.scheduler.fleet import Fleet
    from outrider.scheduler.model import LoadedModel
    from outrider.scheduler.replica import Replica
    from outrider.scheduler.runner import Runner
    from outrider.scheduler.supervisor import Supervisor
    from outrider.scheduler.worker import Worker
    from outrider.shm.doorbell import Doorbell

CLOSED = "the session was closed"


class Resources(Closing):
    """All that a session holds, but for itself."""

    def __init__(self, owner: object, profile: str | None = None) -> None:
        """`profile`: where a trace goes that is on from the beginning, see `Tracing`."""
        fill_standard_streams()
        self.loaded: LoadedModel | None = None
        self.own_fleet: Fleet | None = None
        self.tracing = Tracing(profile)
        self.asynchronous: AsyncRuns
        self.runner: Runner | None = None
        self.supervisors: dict[Replica, Supervisor] = {}
        self.workers: Sequence[Worker] = ()
        self.bells: Sequence[Doorbell] = ()
        super().__init__(owner)  # it may be closed from now on

    def hurry(self) -> None:
        if self.own_fleet is not None:
            self.own_fleet.monitor.hurry()

    def release(self) -> None:
        with contextlib.ExitStack() as last_first:  # all of it, whatever interrupts
            if self.loaded is not None:
                last_first.callback(self.loaded.store.close)
            for bell in self.bells:
                last_first.callback(bell.close)
            if self.runner is not None:
                if self.own_fleet is None:
                    last_first.callback(self._unload, self.runner)
                last_first.callback(self._leave, self.runner)
                for supervisor in self.supervisors.values():
                    last_first.callback(supervisor.close)
                last_first.callback(self.asynchronous.close, closed_error("session", CLOSED))
            if self.own_fleet is not None:
                last_first.callback(self.own_fleet.close_here)
            self._tell()
            last_first.callback(self.tracing.close, self._patience())

    def last_words(self) -> None:
        self._tell()
        self.tracing.close(self._patience())

    def _patience(self) -> float:
        """Seconds for a worker that is busy."""
        return 0.0 if self.runner is None else self.runner.replicas[0].deployer.fleet.monitor.patience

    def _tell(self) -> None:
        """Callers leave."""
        if self.runner is not None:
            for replica in self.runner.replicas:
                replica.deployer.fleet.monitor.listeners.pop(replica.deployer.session, None)
                replica.on_closed()

    def _leave(self, runner: Runner) -> None:
        def release() -> None:
            for replica in runner.replicas:
                if self.own_fleet is None:
                    overdue.end_after_close(replica)
                replica.release()

        runner.slots.alone(release)  # callers have left

    def _unload(self, runner: Runner) -> None:
        for replica in runner.replicas:
            if not replica.deployer.fleet.closed:  # after the last deployment: what is loaded now stays unloaded
                replica.deployer.unload(self.workers)
