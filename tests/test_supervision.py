"""Deaths of workers in the middle of things: seen at once, typed, mended by the next run."""

from __future__ import annotations

import os
import select
import signal
import threading

import numpy as np
import pytest

from outrider.scheduler import Fleet, InferenceSession, SessionOptions, errors
from tests.builders import chain
from tests.leaks import worker_pids

pytestmark = pytest.mark.fast

HERE = os.path.dirname(os.path.abspath(__file__))
OWN = os.path.join(HERE, "own_providers.py")
X = np.array([[-2, -1, 0.5, 3]], np.float32)
CUT = SessionOptions(pins={"n0": "cpu", "n1": "cpu:1", "n2": "cpu"})
ENOUGH = 60.0  # seconds; what is waited for here takes milliseconds


def _gone(pid: int) -> None:
    """Wait until a process has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        assert poll.poll(ENOUGH * 1000), f"process {pid} lives on"
    finally:
        os.close(fd)


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


@pytest.mark.parametrize(
    ("how", "name", "code"), [("dies", "SIGKILL", -9), ("segfaults", "SIGSEGV", -11), ("leaves", None, 9)]
)
def test_a_provider_that_ends_its_process_in_a_run(how: str, name: str | None, code: int) -> None:
    with InferenceSession(chain("Relu", "Neg"), providers=[(f"{OWN}:Wrong", {"how": how}), "cpu"]) as session:
        for incarnation in (1, 2):
            with pytest.raises(errors.WorkerDiedError) as caught:
                session.run(None, {"x": X})
            error = caught.value
            assert (error.signal, error.exit_code, error.incarnation) == (name, code, incarnation)
            assert (error.provider, error.partition, error.nodes) == (f"{OWN}:Wrong", 0, ["n0"])
        assert session.health()[f"{OWN}:Wrong"]["deaths"] == 2
        assert session.health()["cpu"] == {"state": "ready", "incarnation": 1, "deaths": 0, "quarantined": []}


def _right_again(session: InferenceSession, expected: np.ndarray) -> None:
    """The next run starts the dead worker again, or is its victim if the monitor has not told yet."""
    try:
        result = session.run(None, {"x": X})
    except errors.WorkerDiedError:
        result = session.run(None, {"x": X})
    np.testing.assert_array_equal(result[0], expected)


def test_the_death_of_an_idle_worker_is_mended_by_the_next_run() -> None:
    with InferenceSession(chain("Relu", "Neg", "Abs"), providers=["cpu", "cpu:1"], options=CUT) as session:
        expected = session.run(None, {"x": X})[0]
        for pid in worker_pids():
            os.kill(pid, signal.SIGKILL)
            _gone(pid)
            _right_again(session, expected)
        assert [one["deaths"] for one in session.health().values()] == [1, 1]


def test_every_caller_that_waits_on_a_dead_worker_is_woken() -> None:
    options = SessionOptions(max_in_flight=3)
    seen: list[BaseException] = []

    def run() -> None:
        try:
            while True:
                session.run(None, {"x": X})
        except errors.WorkerDiedError as error:
            seen.append(error)

    with InferenceSession(chain("Relu"), providers=[f"{OWN}:Slow"], options=options) as session:
        callers = [threading.Thread(target=run) for _ in range(3)]
        for caller in callers:
            caller.start()
        session.run(None, {"x": X})
        os.kill(worker_pids()[0], signal.SIGKILL)
        for caller in callers:
            caller.join(ENOUGH)
        assert not any(caller.is_alive() for caller in callers)
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], relu(X))
    assert len(seen) == 3


def test_two_sessions_on_one_fleet_survive_a_death() -> None:
    with Fleet(["cpu"]) as fleet:
        options = SessionOptions(fleet=fleet)
        with (
            InferenceSession(chain("Relu"), options=options) as one,
            InferenceSession(chain("Neg"), options=options) as two,
        ):
            (pid,) = worker_pids()
            os.kill(pid, signal.SIGKILL)
            _gone(pid)
            _right_again(one, relu(X))
            _right_again(two, -X)
            np.testing.assert_array_equal(one.run(None, {"x": X})[0], relu(X))


def test_close_while_a_run_is_in_flight_ends_it() -> None:
    caught: list[BaseException] = []
    session = InferenceSession(chain("Relu"), providers=[f"{OWN}:Slow"])

    def run() -> None:
        try:
            while True:
                session.run(None, {"x": X})
        except errors.OutriderError as error:
            caught.append(error)

    caller = threading.Thread(target=run)
    caller.start()
    session.run(None, {"x": X})
    session.close()
    caller.join(ENOUGH)
    assert not caller.is_alive()
    assert isinstance(caught[0], errors.SessionClosedError)
