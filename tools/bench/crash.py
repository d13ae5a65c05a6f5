"""What it costs that a worker is killed: until the caller has its error, or the right result. All in milliseconds.

Times are from just before the signal to the return of `run` in the caller's thread. Before each kill the session is
left to settle: a spare that is loaded, a worker that has run again.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from outrider.scheduler import Fleet, InferenceSession, ProviderSpec, SessionOptions
from outrider.scheduler.errors import WorkerDiedError
from outrider.tools.bench.chains import matmul_chain
from outrider.tools.bench.measure import Budget, Request, Round, Row, row, summary
from outrider.tools.footprint import children, worked

KILLS = 100
STARTS = 5
STAGE, SIDE = 4, 512  # products of a run, and their size: ten milliseconds or so, to be killed in
STILL = 0.1  # seconds without work until a session has settled
FEED = {"x": np.ones((SIDE, SIDE), np.float32)}
SPEC = ProviderSpec("cpu", threads=1)
_ERROR, _RESULT, _SPARE = Budget(value=50), Budget(value=1000), Budget(value=100)


def rows(request: Request) -> list[Row]:
    """Medians and 99th percentiles over all kills; the ratios are to what a worker takes to start."""
    starts = [Round(_start()) for _ in range(1 if request.quick else STARTS)]
    base = [Round(row("", "ms", starts).value or 1.0)]
    made = [row("a cpu worker starts", "ms", starts)]

    def told(what: str, taken: list[float], budget: Budget) -> None:
        made.append(row(what, "ms", [summary(taken)], base, "a start", budget))

    kills = request.calls(KILLS)
    run, taken = _killed(kills, replay=False, fallback=False)
    made.append(row("the run that is killed, undisturbed", "ms", [Round(run)]))
    told("SIGKILL in a run -> WorkerDiedError", taken, _ERROR)
    told("SIGKILL in a run -> right result", _killed(kills, fallback=False)[1], _RESULT)
    told("SIGKILL in a run -> right result, with a spare", _killed(kills, fallback=False, spares=1)[1], _SPARE)
    told("SIGKILL of an idle worker -> right result", _killed_idle(kills), _RESULT)
    return made


def _start() -> float:
    start = time.perf_counter()
    fleet = Fleet([SPEC])
    taken = _ms(start)
    fleet.close()
    return taken


def _killed(count: int, **options: Any) -> tuple[float, list[float]]:
    """What an undisturbed run takes; and from the kill, at a random moment of a run, to its end, whatever that is.

    Raises AssertionError if it does not end as the policy wants: with a WorkerDiedError unless partitions are replayed.
    """
    moment = random.Random(0)
    taken: list[float] = []
    dies = options.get("replay") is False
    with ThreadPoolExecutor(1) as crew, _opened(**options) as session:
        right, length = _learned(session)
        while len(taken) < count:
            _settle(session)
            future = crew.submit(_ended, session)
            time.sleep(length * moment.uniform(0.2, 0.7))
            start = time.perf_counter()
            os.kill(children()[0], signal.SIGKILL)
            end, result = future.result()
            if end > start:  # else the run was over already
                taken.append((end - start) * 1e3)
                assert (result is None) if dies else (result == right), "the run did not end as it should have"
            _run_again(session)
    return length * 1e3, taken


def _killed_idle(count: int) -> list[float]:
    """From the kill of a worker that has nothing to do to the result of a run that is asked for at once."""
    taken: list[float] = []
    with _opened(fallback=False) as session:
        right, _ = _learned(session)
        for _ in range(count):
            _settle(session)
            start = time.perf_counter()
            os.kill(children()[0], signal.SIGKILL)
            assert session.run(None, FEED)[0].tobytes() == right
            taken.append(_ms(start))
    return taken


def _opened(**options: Any) -> InferenceSession:
    return InferenceSession(matmul_chain(STAGE, SIDE), providers=[SPEC], options=SessionOptions(**options))


def _learned(session: InferenceSession) -> tuple[bytes, float]:
    """The right result, and the seconds of a run."""
    times: list[float] = []
    for _ in range(10):
        start = time.perf_counter()
        result = session.run(None, FEED)[0].tobytes()
        times.append(time.perf_counter() - start)
    return result, sorted(times)[len(times) // 2]


def _ended(session: InferenceSession) -> tuple[float, bytes | None]:
    """When a run has ended, and its result; None for a WorkerDiedError."""
    try:
        result = session.run(None, FEED)[0]
    except WorkerDiedError:
        return time.perf_counter(), None
    return time.perf_counter(), result.tobytes()


def _run_again(session: InferenceSession) -> None:
    """A run that completes: deaths without one between them are held against a worker."""
    _until(lambda: _ended(session)[1] is not None)


def _settle(session: InferenceSession) -> None:
    """Wait until the spare, if there is to be one, is there, and nobody works any more."""

    def still() -> bool:
        before = [worked(pid) for pid in children()]
        time.sleep(STILL)
        ready = session.health()["cpu"].get("spare", "ready") == "ready"
        return ready and before == [worked(pid) for pid in children()]

    _until(still)


def _until(done: Callable[[], bool]) -> None:
    while not done():
        pass


def _ms(start: float) -> float:
    return (time.perf_counter() - start) * 1e3
