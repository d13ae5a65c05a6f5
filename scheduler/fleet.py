"""A fleet: the workers that one or more sessions run on.

A session makes a fleet of its own unless it is given one. Workers start side by side; the fleet is there when each has
said Hello or been skipped as not required.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from outrider.providers.wire import messages
from outrider.scheduler import counters, interpreters
from outrider.scheduler.checked import invalid_option
from outrider.scheduler.closing import Closing, check_fork
from outrider.scheduler.cores import thread_share, usable_cores
from outrider.scheduler.errors import OutriderError, ProviderUnavailableError
from outrider.scheduler.health import ABSENT, told
from outrider.scheduler.monitor import Monitor
from outrider.scheduler.muster import Muster
from outrider.scheduler.options import AT_ONCE, ProviderSpec, SessionOptions
from outrider.scheduler.pickling import refusing
from outrider.scheduler.probing import Probes
from outrider.scheduler.requiring import nobody, not_started
from outrider.scheduler.restarts import Quarantine
from outrider.scheduler.shortage import limits_told
from outrider.scheduler.specs import parse_providers, target
from outrider.scheduler.worker import Incarnation, Worker
from outrider.shm.processes import fill_standard_streams

log = logging.getLogger("outrider.fleet")

STATS_SECONDS = 10.0


class Fleet:
    """Started workers, one per provider, shared by the sessions that name it in `SessionOptions(fleet=...)`.

    `providers` as for `InferenceSession`. Raises ProviderUnavailableError if one that is required does not start, or
    none does (then nothing is left running), and the errors of provider entries. A context manager; `close` is
    idempotent.
    """

    def __init__(self, providers: Sequence[Any] | None) -> None:
        self._setup(parse_providers(providers), SessionOptions(), None)
        if not self.workers:
            self.close_here()
            raise nobody(self._absent)

    @classmethod
    def _of(
        cls, specs: Sequence[ProviderSpec], options: SessionOptions, threads: int | None, probe: bool = True
    ) -> Fleet:
        """A session's own fleet, from checked specs, with the deadlines of its options.

        `threads`: of each worker that leaves it open; None for all cores, or a share of them where the strategy has
        workers compute at once. `probe`: whether providers of somebody else's are probed before their first use.
        """
        fleet = cls.__new__(cls)
        fleet._setup(specs, options, threads, probe)
        return fleet

    @limits_told()
    def _setup(
        self, specs: Sequence[ProviderSpec], options: SessionOptions, threads: int | None, probe: bool = True
    ) -> None:
        fill_standard_streams()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._absent: dict[str, str] = {}
        self.quarantine = Quarantine()
        probes = Probes(specs if probe else [], options.start_deadline, options.claim_deadline)
        self._alone = len(specs) == 1
        for spec in specs:
            self._miss(spec, probes.refusal(spec) or interpreters.check(spec, options.start_deadline))
        wanted = [_threads(spec) or threads for spec in specs if computes(spec)]
        open_share = thread_share(usable_cores(), wanted) if options.strategy in AT_ONCE else usable_cores()
        self._monitor = Monitor(options.start_deadline)
        self._workers = _Workers(self, self._monitor)
        try:
            self._monitor.start()
            for index, spec in enumerate(specs):
                worker = Worker(index, spec, _threads(spec) or threads or open_share)
                self._monitor.workers.append(worker)
                if worker.name not in self._absent:
                    self._monitor.start_worker(worker)
            for worker in self.workers:
                failed = None
                try:
                    worker.current.ready.result()
                    probes.begin(self._monitor, worker, self.next_session())
                except ProviderUnavailableError as error:
                    failed = probes.not_started(worker, error)
                self._miss(worker.spec, failed)
            for worker in self.workers:
                self._miss(worker.spec, probes.end(self._monitor, worker))
        except BaseException:
            self.close_here()
            raise

    def _miss(self, spec: ProviderSpec, error: ProviderUnavailableError | None) -> None:
        """Do without this provider, if there is an error; raise that if it is required."""
        if error is not None:
            if spec.required:
                raise not_started(error, others=not self._alone) from error
            self._absent[spec.display] = str(error.reason)
            log.warning("the fleet goes on without provider %s: %s", spec.display, error.reason)

    # The user's side ------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Stop the workers and leave nothing behind. Sessions on this fleet cannot run any more.

        A worker that is busy for 5 s is killed. As for `InferenceSession.close`, it may be called from anywhere.
        """
        self._workers.close()

    __reduce__ = refusing("Fleet", "its workers belong to this process; make one in the other process")

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self._workers.hurry()
        self._workers.close()

    def __repr__(self) -> str:
        states = ", ".join(f"{worker.name} ({worker.life.state})" for worker in self.workers)
        return f"<Fleet {'closed' if self.closed else states}>"

    @property
    def closed(self) -> bool:
        """True once `close` was called."""
        return self._workers.closed

    def health(self) -> dict[str, dict[str, Any]]:
        """provider -> {state, incarnation, deaths, quarantined}: see `health.told`; `spare`: the state of its spare."""
        check_fork(self._workers.pid)
        found: dict[str, dict[str, Any]] = {}
        now = time.monotonic()
        for worker in self._monitor.workers:
            reason = self._absent.get(worker.name, "")
            state = ABSENT if worker.name in self._absent else worker.life.state
            found[worker.name] = told(
                state,
                worker.incarnation,
                worker.deaths,
                quarantined=self.quarantine.of(worker.name),
                restarts=worker.restarts,
                now=now,
                reason=reason,
            )
            if worker.spare is not None:
                found[worker.name]["spare"] = worker.spare.life.state
        return found

    def versions(self) -> dict[str, dict[str, str]]:
        """provider -> versions of Python, numpy and what else its worker reports that it runs with."""
        return {worker.name: dict(worker.hello.versions) for worker in self.workers if worker.hello is not None}

    # The session's side ---------------------------------------------------------------------------------------------
    @property
    def workers(self) -> list[Worker]:
        """Those that started, in priority order."""
        return [worker for worker in self._monitor.workers if worker.name not in self._absent]

    @property
    def absent(self) -> Mapping[str, str]:
        """Providers that did not start and were not required, with the reason."""
        return self._absent

    @property
    def monitor(self) -> Monitor:
        """The thread that owns the workers."""
        return self._monitor

    def select(self, providers: Any, provider_options: Any = None) -> list[Worker]:
        """The workers that these entries name, in this order; all of them for None.

        An entry may repeat the settings of its worker. Providers that the fleet does without are left out, since none
        of them was required. Raises InvalidOptionError for other settings, which the worker, being started, cannot
        take, and ProviderUnavailableError for a provider that the fleet never had, or where nobody is left.
        """
        if providers is None:
            if provider_options is not None:
                expected = "None with a fleet: its workers have started with theirs"
                raise invalid_option("provider_options", provider_options, expected)
            return self.workers
        known = {worker.name: worker for worker in self._monitor.workers}
        if isinstance(providers, (list, tuple)):
            providers = [known[one].spec if isinstance(one, str) and one in known else one for one in providers]
        chosen = []
        for spec in parse_providers(providers, provider_options):
            worker = known.get(spec.display)
            if worker is None:
                raise self._unknown(spec.display)
            if spec.kind != worker.spec.kind or spec not in (worker.spec, ProviderSpec(spec.kind, spec.name)):
                raise invalid_option("providers", spec, f"{spec.display!r} as the fleet has started it: {worker.spec}")
            chosen.append(worker)
        there = [worker for worker in chosen if worker.name not in self._absent]
        if not there:
            raise nobody({worker.name: self._absent[worker.name] for worker in chosen})
        return there

    def _unknown(self, name: str) -> ProviderUnavailableError:
        """The error for a provider that the fleet does not have, or does without."""
        reason = self._absent.get(name, "not in the fleet")
        if name in self._absent:
            text = f"the fleet does without provider {name!r}: {reason}"
        else:
            text = f"the fleet has no provider {name!r}; it has {', '.join(worker.name for worker in self.workers)}"
        return ProviderUnavailableError(text, provider=name, reason=reason)

    def check_open(self) -> None:
        """Raises SessionClosedError or ForkedSessionError when the fleet cannot be used here."""
        self._workers.check("fleet", "the fleet of this session was closed")

    def close_here(self) -> None:
        """`close`, by who has called nothing of this library but what closes."""
        self._workers.close_here()

    def next_session(self) -> int:
        """A number that no other session of this fleet has."""
        return next(self._numbers)

    def revive(self, worker: Worker) -> Incarnation:
        """The present incarnation of a worker; of a dead one the next, its spare if it has one, which is waited for.

        Raises ProviderUnavailableError if it does not start, or may not be started now.
        """
        with self._lock:
            one = worker.current
            dead = one.life.state == "dead"
            if dead:
                one.ended.result()  # its death counts, and all were told
                self._check_restart(worker)
                spare, worker.spare = worker.spare, None
                listeners = list(self._monitor.listeners.items())
                sessions = [number for number, listener in listeners if listener.uses(one)]
                if spare is not None and spare.life.state != "dead":
                    spare.ahead, worker.spare_deaths = False, 0
                    worker.current, promoted = spare, True
                else:
                    self._monitor.start_worker(worker)
                    promoted = False
                one = worker.current
                one.muster = Muster(sessions)
        try:
            one.ready.result()
        except ProviderUnavailableError as error:
            if not self.closed:
                worker.restarts.boot_failed(str(error.reason))
            raise
        if dead and promoted:
            self._monitor.post(one, messages.Promote())
        return one

    def _check_restart(self, worker: Worker) -> None:
        """Raises ProviderUnavailableError if the next incarnation may not be started now."""
        restarts = worker.restarts
        seconds = restarts.wait(time.monotonic())
        if seconds <= 0:
            return
        reason, seconds_told = restarts.reason(), None if math.isinf(seconds) else seconds
        left = "" if seconds_told is None else f"; {seconds:.1f} s are left"
        raise ProviderUnavailableError(
            f"provider {worker.name} may not be started now: {reason}{left}; restart({worker.name!r}) lifts that",
            provider=worker.name,
            reason=reason,
            seconds=seconds_told,
        )

    def spare(self, worker: Worker) -> Incarnation:
        """The spare of a worker, started now if there is none. Raises ProviderUnavailableError if it does not start."""
        with self._lock:
            spare = worker.spare
            if spare is None or spare.life.state == "dead":
                spare = self._monitor.start_spare(worker)
        spare.ready.result()
        return spare

    def restart(self, name: str) -> Worker:
        """End a provider's worker and start it anew; what was held against it is forgotten.

        Raises ProviderUnavailableError if the fleet has no such provider, or it does not start.
        """
        worker = next((one for one in self.workers if one.name == name), None)
        if worker is None:
            raise self._unknown(name)
        self.quarantine.release(name)
        worker.restarts.forget()
        with self._lock:
            for one in worker.incarnations():
                self._monitor.kill(one, "a restart was asked for", spared=True)
            ended = [one.ended for one in worker.incarnations()]
        for future in ended:
            future.result()
        self.revive(worker)
        return worker

    def excuse(self, session: int, workers: Iterable[Worker]) -> None:
        """A session does not load its part into these workers' successors: no other waits for it."""
        with self._lock:
            for worker in workers:
                worker.current.muster.arrive(session)

    def stats_of(self, worker: Worker) -> dict[str, Any]:
        """Counters of one worker; {} and a warning in the log if it is gone, or busy for 10 s."""
        number = next(self._numbers)
        future = self._monitor.request(worker, messages.StatsRequest(number), ("Stats", number))
        try:
            data = counters.checked(future.result(STATS_SECONDS).data)
        except (TimeoutError, OutriderError) as error:
            log.warning("worker %s tells no counters: %s", worker.name, str(error) or f"busy for {STATS_SECONDS:g} s")
            return {}
        return data

    def ask_for_spans(self, worker: Worker, session: int, on: bool) -> concurrent.futures.Future[messages.TraceData]:
        """Have a worker begin (`on`) or end to trace a session; the next part of its spans comes as the answer."""
        number = next(self._numbers)
        return self._monitor.request(worker, messages.TraceRequest(number, session, on), ("TraceData", number))


class _Workers(Closing):
    """The workers of a fleet, to be stopped."""

    def __init__(self, owner: Fleet, monitor: Monitor) -> None:
        self._monitor = monitor
        super().__init__(owner)

    def hurry(self) -> None:
        self._monitor.hurry()

    def release(self) -> None:
        self._monitor.shutdown()

    def stop(self) -> None:
        self._monitor.stop()

    def wait(self) -> None:
        self._monitor.shutdown()


def computes(spec: ProviderSpec) -> bool:
    """Whether the worker takes part in sharing out the cores: all but `null`, which computes nothing."""
    return target(spec.kind).kind != "null"


def _threads(spec: ProviderSpec) -> int | None:
    """The number that a spec asks for, by itself or by its cores."""
    return spec.threads or (min(len(spec.cpus), usable_cores()) if spec.cpus else None)
