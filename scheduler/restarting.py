"""`InferenceSession.restart`: a provider begins anew, as if it had never failed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from outrider.providers.contract import ProviderUnavailableError
from outrider.scheduler import overdue
from outrider.scheduler.fleet import Fleet
from outrider.scheduler.replica import Replica
from outrider.scheduler.runner import Runner
from outrider.scheduler.supervisor import Supervisor
from outrider.scheduler.worker import Worker


def restart(provider: str, runner: Runner, supervisors: Mapping[Replica, Supervisor], fleet: Fleet) -> None:
    """With no run in flight, end the provider's worker, start the next one, and place what it can serve.

    Runs in flight end first; one at which the provider still is after a second, or another one, is cancelled.
    Other sessions on the fleet go on as after any death, for which nobody is blamed; those that did without the
    provider take it back. Raises ProviderUnavailableError and the errors of planning.
    """

    mine = dict.fromkeys(worker.name for replica in supervisors for worker in replica.placer.workers)
    absent = set(fleet.absent)  # whose reason the fleet tells
    if provider not in mine and provider not in absent:
        raise ProviderUnavailableError(
            f"this session has no provider {provider!r}; it has {', '.join(mine)}",
            provider=provider,
            reason="not in the session",
        )

    def begin_anew() -> Worker:
        with contextlib.ExitStack() as planning:
            for supervisor in supervisors.values():
                planning.enter_context(supervisor.planning)
            waiting.clear()
            worker = fleet.restart(provider)
            for replica, supervisor in supervisors.items():
                if worker in replica.placer.workers:
                    replica.placer.forgive(worker)
                    supervisor.place_anew()
        return worker

    waiting = [True]

    def hurry() -> None:
        if waiting:
            for replica in supervisors:
                overdue.end_those_of(replica, provider, "a restart of its provider was asked for")
            fleet.monitor.call_later(overdue.GRACE, hurry)

    fleet.monitor.call_later(overdue.GRACE, hurry)
    try:
        worker = runner.slots.alone(begin_anew)
    finally:
        waiting.clear()
    for listener in list(fleet.monitor.listeners.values()):
        listener.on_restart(worker)
