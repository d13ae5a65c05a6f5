"""What a session leaves on a fleet that others use, and in its own object: nothing that hangs, nothing that is held."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest

from outrider.scheduler import Fleet, InferenceSession, RunOptions, SessionOptions, errors
from tests.builders import chain
from tests.gates import ENOUGH, end, until

X = np.linspace(-2, 2, 8, dtype=np.float32).reshape(2, 4)
HANG = ("chaos", {"fault": "hang", "claims": ["Abs"], "incarnations": [1]})


def test_a_kernel_that_hangs_in_a_closed_session_is_ended_for_the_others() -> None:
    with Fleet([HANG, "cpu"]) as fleet:
        options = SessionOptions(fleet=fleet)
        with InferenceSession(chain("Neg", "Abs"), options=options) as other:
            one = InferenceSession(chain("Neg", "Abs"), options=options)
            with one, pytest.raises(errors.RunTimeoutError):
                one.run(None, {"x": X}, RunOptions(deadline=0.3))
            np.testing.assert_array_equal(other.run(None, {"x": X})[0], np.abs(X))
            health = fleet.health()["chaos"]
            assert (health["incarnation"], health["deaths"], health["quarantined"]) == (2, 0, [])


def test_a_restart_does_not_wait_for_a_kernel_that_hangs() -> None:
    with InferenceSession(chain("Neg", "Abs"), providers=[HANG, "cpu"]) as session:
        hung = session.run_async(None, {"x": X})
        assert until(lambda: session._fleet.workers[0].current.doing().phase == "run")
        session.restart("chaos")
        with pytest.raises(errors.RunCancelledError, match="restart"):
            hung.result(ENOUGH)
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], np.abs(X))
        assert session.health()["chaos"]["deaths"] == 0


def test_a_session_restarts_its_own_providers_only() -> None:
    with Fleet(["null", "cpu"]) as fleet:
        session = InferenceSession(chain("Neg"), providers=["cpu"], options=SessionOptions(fleet=fleet))
        with session, pytest.raises(errors.ProviderUnavailableError, match="no provider 'null'; it has cpu"):
            session.restart("null")


def test_runs_of_closed_sessions_end_the_row_of_deaths() -> None:
    with Fleet(["cpu"]) as fleet:
        for _ in range(3):
            with InferenceSession(chain("Neg"), options=SessionOptions(fleet=fleet)) as session:
                np.testing.assert_array_equal(session.run(None, {"x": X})[0], -X)
            end(fleet.workers[0].pid)
        assert fleet.health()["cpu"]["deaths"] == 3


def test_a_worker_that_is_busy_with_another_session_is_not_ended_for_being_late() -> None:
    slow = ("chaos", {"fault": "slow", "seconds": 3.0, "claims": ["Abs"], "at": 1})
    with (
        Fleet([slow, "cpu"]) as fleet,
        InferenceSession(chain("Neg", "Abs"), options=SessionOptions(fleet=fleet)) as session,
    ):
        run = session.run_async(None, {"x": X})
        assert until(lambda: fleet.workers[0].current.doing().phase == "run")
        options = SessionOptions(fleet=fleet, claim_deadline=0.3)
        with InferenceSession(chain("Neg", "Abs"), options=options) as other:
            assert "another session" in str(other.placement())
            np.testing.assert_array_equal(other.run(None, {"x": X})[0], np.abs(X))
        np.testing.assert_array_equal(run.result(ENOUGH)[0], np.abs(X))
        assert fleet.health()["chaos"]["deaths"] == 0


def test_a_closed_session_that_saw_a_death_holds_nothing() -> None:
    before = len(os.listdir("/proc/self/fd"))
    session = InferenceSession(chain("Neg"), providers=["cpu"])
    with session:
        for _ in range(2):
            os.kill(session._fleet.workers[0].pid, signal.SIGKILL)
            np.testing.assert_array_equal(session.run(None, {"x": X})[0], -X)
    assert until(lambda: len(os.listdir("/proc/self/fd")) <= before + 2)  # user memory, which lives on
    assert not any(thread.name == "outrider-supervisor" for thread in threading.enumerate())
