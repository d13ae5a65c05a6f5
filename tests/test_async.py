"""`run_async`: Futures, callbacks, asyncio, the queue and its bound, and every way a run that waits can end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.scheduler import Fleet, InferenceSession, RunOptions, SessionOptions, errors
from outrider.scheduler.asynchronous import AsyncRuns, Job
from outrider.scheduler.slots import Slots
from tests.builders import chain
from tests.gates import Gate, end, until
from tests.interrupts import interrupted

OWN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "own_providers.py")
ENOUGH = 60.0  # seconds; what is waited for here takes milliseconds
X = np.array([[-2, -1, 0.5, 3]], np.float32)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    made = Gate(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet(["cpu", "cpu:1"]) as made:
        yield made


def feed(value: float) -> dict[str, np.ndarray]:
    return {"x": np.full((1, 4), value, np.float32)}


def gated(gate: Gate, **options: Any) -> InferenceSession:
    return InferenceSession(chain("Identity"), providers=[gate.provider], options=SessionOptions(**options))


def test_results_of_many_runs_by_future_callback_and_await(fleet: Fleet) -> None:
    called: list[tuple[float, Any, str]] = []
    pins = {"n0": "cpu", "n1": "cpu:1"}
    with InferenceSession(chain("Relu", "Neg"), options=SessionOptions(fleet=fleet, pins=pins)) as session:
        futures = [
            session.run_async(None, feed(i), lambda out, data, error: called.append((out[0][0, 0], data, error)), i)
            for i in range(50)
        ]
        for i, future in enumerate(futures):
            assert isinstance(future, Future)
            (y,) = future.result(ENOUGH)
            assert (y == -i).all() and y.flags.writeable
        assert sorted(called, key=lambda one: one[1]) == [(-i, i, "") for i in range(50)]

        async def both() -> list[Any]:
            one, *others = (session.run_async(["y"], feed(i)) for i in (7, 8, 9))
            return [await one, *await asyncio.gather(*others)]

        assert [float(out[0][0, 0]) for out in asyncio.run(both())] == [-7, -8, -9]
        assert session.stats()["runs"] == 53


def test_bad_input_is_told_at_once_and_a_failing_run_by_its_future(fleet: Fleet) -> None:
    told: list[tuple[Any, Any, str]] = []
    model = chain("Relu", shape=("N", "M"))
    with InferenceSession(model, providers=[(f"{OWN}:Wrong", {"how": "raises"})]) as session:
        with pytest.raises(errors.InputNotFoundError):
            session.run_async(None, {"z": X})
        with pytest.raises(errors.OutputNotFoundError):
            session.run_async(["z"], {"x": X})
        with pytest.raises(errors.InvalidOptionError, match="callback"):
            session.run_async(None, {"x": X}, callback="print")  # type: ignore[arg-type]
        future = session.run_async(None, {"x": X}, lambda *given: told.append(given), "mine")
        error = future.exception(ENOUGH)
        assert isinstance(error, errors.KernelError)
        assert told == [([], "mine", str(error))]


def test_a_callback_that_raises_is_logged_and_changes_nothing(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    with InferenceSession(chain("Relu"), options=SessionOptions(fleet=fleet)) as session:
        (y,) = session.run_async(None, {"x": X}, lambda *_: 1 / 0).result(ENOUGH)
        np.testing.assert_array_equal(y, np.maximum(X, 0))
    assert "ZeroDivisionError" in caplog.text


def test_runs_begin_in_the_order_in_which_they_were_asked_for(gate: Gate) -> None:
    with gated(gate, max_in_flight=1) as session:
        gate.open(1)
        session.run(None, feed(-1))  # so that feeds of this kind are known
        given: dict[str, np.ndarray] = {}
        futures = []
        for i in range(20):
            given.update(feed(i))  # the same dict for all
            futures.append(session.run_async(None, given))
        gate.open(20)
        assert [float(future.result(ENOUGH)[0][0, 0]) for future in futures] == list(range(20))
        assert gate.seen() == list(range(-1, 20))


def test_a_full_queue_rejects_or_blocks(gate: Gate) -> None:
    with gated(gate, max_in_flight=1, queue_size=2, queue="reject") as session:
        futures = [session.run_async(None, feed(i)) for i in range(3)]  # one runs, two wait
        for refused in (session.run_async, session.run):
            with pytest.raises(errors.QueueFullError) as caught:
                refused(None, feed(9))
            assert caught.value.queue_size == 2
        gate.open(3)
        assert [float(future.result(ENOUGH)[0][0, 0]) for future in futures] == [0, 1, 2]

    with gated(gate, max_in_flight=1, queue_size=1) as session:
        futures = [session.run_async(None, feed(i)) for i in range(2)]
        asked = threading.Event()

        def third() -> None:
            futures.append(session.run_async(None, feed(2)))
            asked.set()

        thread = threading.Thread(target=third)
        thread.start()
        assert not asked.wait(0.05)  # too short a wait would hide a fault, not make one
        gate.open(1)
        assert asked.wait(ENOUGH)
        thread.join()
        gate.open(2)
        assert [float(future.result(ENOUGH)[0][0, 0]) for future in futures] == [0, 1, 2]


def test_cancelled_while_it_waits(gate: Gate) -> None:
    with gated(gate, max_in_flight=1) as session:
        first, second, third = (session.run_async(None, feed(i)) for i in range(3))
        assert second.cancel()
        gate.open(2)
        assert float(third.result(ENOUGH)[0][0, 0]) == 2
        assert float(first.result(ENOUGH)[0][0, 0]) == 0
        assert not first.cancel()
        with pytest.raises(CancelledError):
            second.result(ENOUGH)
        assert gate.seen() == [0, 2]


def test_close_ends_what_runs_and_what_waits(gate: Gate) -> None:
    session = gated(gate, max_in_flight=1, queue_size=2)
    futures = [session.run_async(None, feed(i)) for i in range(3)]
    blocked: list[BaseException] = []

    def ask() -> None:
        try:
            session.run_async(None, feed(3)).result(ENOUGH)
        except errors.SessionClosedError as error:
            blocked.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    gate.open(1)
    futures[0].result(ENOUGH)
    gate.open(4)
    session.close()
    thread.join(ENOUGH)
    assert not thread.is_alive()
    for future in futures[1:]:
        error = future.exception(ENOUGH)
        assert error is None or isinstance(error, errors.SessionClosedError)
    assert futures[2].done()
    with pytest.raises(errors.SessionClosedError):
        session.run_async(None, feed(0))


def test_a_callback_may_close_the_session() -> None:
    session = InferenceSession(chain("Relu"))
    future = session.run_async(None, {"x": X}, lambda *_: session.close())
    np.testing.assert_array_equal(future.result(ENOUGH)[0], np.maximum(X, 0))
    with pytest.raises(errors.SessionClosedError):
        session.run(None, {"x": X})


def test_a_dropped_session_with_idle_threads_is_closed() -> None:
    session = InferenceSession(chain("Relu"))
    session.run_async(None, {"x": X}).result(ENOUGH)
    threads = session._resources.asynchronous._threads
    del session
    for _ in range(1000):
        gc.collect()
        if not any(thread.is_alive() for thread in threads):
            break
        threading.Event().wait(0.01)
    assert threads and not any(thread.is_alive() for thread in threads)


def test_a_death_fails_the_run_in_flight_and_those_that_wait_run_on_the_next_incarnation(gate: Gate) -> None:
    with gated(gate, max_in_flight=1, replay=False, fallback=False) as session:
        (worker,) = session._fleet.workers
        futures = [session.run_async(None, feed(i)) for i in range(3)]
        assert until(lambda: worker.current.doing().phase == "run")
        end(worker.pid)
        gate.open(3)
        assert isinstance(futures[0].exception(ENOUGH), errors.WorkerDiedError)
        assert [float(future.result(ENOUGH)[0][0, 0]) for future in futures[1:]] == [1, 2]
        assert float(session.run(None, feed(5))[0][0, 0]) == 5
        assert (worker.incarnation, worker.deaths) == (2, 1)


def test_a_signal_at_any_moment_of_asking_for_a_run_hangs_nobody(fleet: Fleet) -> None:
    """In the queue, in what starts and wakes threads, and within the locks of Python's threading."""
    moment, ended = -1, False
    with InferenceSession(chain("Neg", shape=["N"]), options=SessionOptions(fleet=fleet, max_in_flight=1)) as session:
        x = np.ones(3, np.float32)
        while not ended:
            moment += 1
            files = ("slots.py", "asynchronous.py", "threading.py", "futures/_base.py")
            # At one moment of Condition.wait the lock is not held: the `with` around it makes a RuntimeError of that.
            with contextlib.suppress(KeyboardInterrupt, RuntimeError), interrupted(files, moment):
                assert session.run_async(None, {"x": x}).result()[0].tolist() == [-1, -1, -1]
                ended = True
            assert session.run(None, {"x": x})[0].tolist() == [-1, -1, -1]
            assert session.run_async(None, {"x": x}).result()[0].tolist() == [-1, -1, -1]
    assert moment > 10


def test_a_job_that_is_served_twice_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal may come when it has been served, and before it has left the queue."""
    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    queue = AsyncRuns(Slots(["a slot"]), lambda seconds, action: None)
    for number in range(3):
        job = Job(queue, lambda hold, watch, number=number: [number], None, None, RunOptions(), SessionOptions())
        queue.submit(job)
        assert job.future.result() == [number]
        job.served()
    queue.close(errors.SessionClosedError("closed", what="session"))
    assert raised == []
