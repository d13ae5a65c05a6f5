"""Where cases run: a fleet of the provider under test and a `cpu` worker beside it, made anew when it was damaged."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from outrider.scheduler import Fleet, InferenceSession, ProviderSpec, SessionOptions
from outrider.scheduler.errors import OutriderError
from outrider.scheduler.worker import Worker
from outrider.tools.conformance.compare import difference
from outrider.tools.conformance.outcomes import CRASH, HANG, NotForIt, Outcome, classify
from outrider.tools.conformance.specimens import SPECIMENS, built

START = 30.0  # seconds; a busy machine needs some, and one start that hangs ends it all
COMPANION = "companion"  # computes what the provider under test declines


class Output(logging.Handler):
    """What the provider writes to its standard output and error: how many lines, and the first one."""

    def __init__(self, name: str) -> None:
        super().__init__(logging.INFO)
        self.lines = 0
        self.first = ""
        self._logger = logging.getLogger(f"outrider.worker.{name}")
        self._level = self._logger.level
        self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """One line."""
        self.lines += 1
        self.first = self.first or record.getMessage()

    def close(self) -> None:
        """Listen no more."""
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)
        super().close()


class Rig:
    """One provider, and a worker of it that is there whenever a case needs one.

    `deadline`: seconds that an answer what it claims, a loading and a partition may each take; a start at least
    `START` seconds. A context manager. Raises ProviderUnavailableError if the provider does not start.
    """

    def __init__(self, spec: ProviderSpec, deadline: float) -> None:
        self.spec = dataclasses.replace(spec, required="start")
        self.name = spec.display
        self.deadline = deadline
        self.output = Output(self.name)
        self._fleet: Fleet | None = None
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise

    def _start(self) -> None:
        options = SessionOptions(fleet=self.fleet)  # which starts, or does not
        # It may have to compile its kernels first, for which the deadline of the cases is not meant.
        InferenceSession(built(SPECIMENS[0]).proto, providers=[COMPANION], options=options).close()

    @property
    def fleet(self) -> Fleet:
        """Started when it is asked for."""
        if self._fleet is None:
            beside = ProviderSpec("cpu", COMPANION, threads=1)
            options = SessionOptions(start_deadline=max(START, self.deadline))
            self._fleet = Fleet._of([self.spec, beside], options, None, probe=False)  # cases tell more than a probe
        return self._fleet

    @property
    def worker(self) -> Worker:
        """That of the provider under test."""
        return self.fleet.workers[0]

    def renew(self) -> None:
        """Whatever the worker has been through, the next case gets another one."""
        fleet, self._fleet = self._fleet, None
        if fleet is not None:
            fleet.close()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *raised: object) -> None:
        self.renew()
        self.output.close()

    def options(self, **changed: Any) -> SessionOptions:
        """Of a session in which nothing is hidden: no second attempt, nobody else for what was claimed."""
        limits = dict.fromkeys(("claim_deadline", "load_deadline", "partition_deadline"), self.deadline)
        return SessionOptions(**{"fleet": self.fleet, "fallback": False, "replay": False, **limits, **changed})

    def alone(self, model: Any, **changed: Any) -> InferenceSession:
        """A session on the provider only. Raises NotForIt for a model of which it would get nothing."""
        return self._with([self.name], model, changed)

    def beside(self, model: Any, **changed: Any) -> InferenceSession:
        """A session in which `cpu` takes what the provider declines. Raises NotForIt if that is all."""
        return self._with([self.name, COMPANION], model, changed)

    def _with(self, names: Sequence[str], model: Any, changed: Mapping[str, Any]) -> InferenceSession:
        session = InferenceSession(model, providers=names, options=self.options(**changed))
        if not self.share(session):
            try:
                raise NotForIt(self._why(session))
            finally:
                session.close()
        return session

    def share(self, session: InferenceSession) -> list[str]:
        """The nodes of a session that the provider under test got."""
        return [node.name for node in session.placement().nodes if node.provider == self.name]

    def _why(self, session: InferenceSession) -> str:
        told = {f"{one.op}: {one.reason}" for one in session.placement().declines if one.provider == self.name}
        return "; ".join(sorted(told)) or "it is made of constants only"

    def run(self, case: Callable[[], str | None]) -> Outcome:
        """The outcome of a case: a function that returns a difference, None for none, or raises."""
        try:
            outcome = classify(difference=case())
        except (OutriderError, NotForIt) as error:
            if getattr(error, "provider", None) == COMPANION:
                raise  # no fault of the provider under test
            outcome = classify(error)
        if outcome.kind in (CRASH, HANG) or not self._whole():
            self.renew()
        return outcome

    def _whole(self) -> bool:
        return self._fleet is None or all(one.alive and one.incarnation == 1 for one in self._fleet.workers)


def answers(
    session: InferenceSession, feeds: Mapping[str, Any], expected: Sequence[Any], tolerance: tuple[float, float]
) -> str | None:
    """None if a run is right, else the difference."""
    return difference(expected, session.run(None, feeds), *tolerance)


def forms(values: Sequence[Any]) -> list[Any]:
    """Zeros of the same kinds, shapes and dtypes."""
    return [
        forms(one) if isinstance(one, list) else np.zeros_like(one) if isinstance(one, np.ndarray) else one
        for one in values
    ]


def memory_of(pid: int) -> int:
    """Bytes of memory that a process has in use, what it shares with others included."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def closing_all(sessions: Sequence[InferenceSession]) -> Iterator[None]:
    """Close them, whatever happens."""
    try:
        yield
    finally:
        for session in sessions:
            session.close()
