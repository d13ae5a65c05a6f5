"""`InferenceSession.restart`: a provider begins anew, as if it had never failed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from outrider.scheduler.fleet import Fleet
from outrider.scheduler.replica import Replica
from outrider.scheduler.runner import Runner
from outrider.scheduler.supervisor import Supervisor
from outrider.scheduler.worker import Worker


def restart(provider: str, runner: Runner, supervisors: Mapping[Replica, Supervisor], fleet: Fleet) -> None:
    """With no run in flight, end the provider's worker, start the next one, and place what it can serve.

    Other sessions on the fleet go on as after any death, for which nobody is blamed; those that did without the
    provider take it back. Raises ProviderUnavailableError and the errors of planning.
    """

    def begin_anew() -> Worker:
        with contextlib.ExitStack() as planning:
            for supervisor in supervisors.values():
                planning.enter_context(supervisor.planning)
            worker = fleet.restart(provider)
            for replica, supervisor in supervisors.items():
                if worker in replica.placer.workers:
                    replica.placer.forgive(worker)
                    supervisor.place_anew()
        return worker

    worker = runner.slots.alone(begin_anew)
    for listener in list(fleet.monitor.listeners.values()):
        listener.on_restart(worker)
