"""Deaths of workers in the middle of things: seen at once, survived or told of, and mended."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from outrider.scheduler import Fleet, InferenceSession, SessionOptions, errors
from tests.builders import chain
from tests.gates import Gate, end, until
from tests.leaks import worker_pids

pytestmark = pytest.mark.fast

HERE = os.path.dirname(os.path.abspath(__file__))
OWN = os.path.join(HERE, "own_providers.py")
X = np.array([[-2, -1, 0.5, 3]], np.float32)
CUT = SessionOptions(pins={"n0": "cpu", "n1": "cpu:1", "n2": "cpu"})
NEITHER = SessionOptions(replay=False, fallback=False)
REPLAY = SessionOptions(fallback=False)
ENOUGH = 60.0  # seconds; what is waited for here takes milliseconds


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


@pytest.mark.parametrize(
    ("how", "name", "code"), [("dies", "SIGKILL", -9), ("segfaults", "SIGSEGV", -11), ("leaves", None, 9)]
)
def test_a_provider_that_ends_its_process_in_each_run(how: str, name: str | None, code: int) -> None:
    """With neither replay nor fallback: each run that it had begun fails, and after two there is none."""
    wrong = f"{OWN}:Wrong"
    with InferenceSession(chain("Relu", "Neg"), providers=[(wrong, {"how": how}), "cpu"], options=NEITHER) as session:
        for incarnation in (1, 2):
            with pytest.raises(errors.WorkerDiedError) as caught:
                session.run(None, {"x": X})
            error = caught.value
            assert (error.signal, error.exit_code, error.incarnation) == (name, code, incarnation)
            assert (error.provider, error.partition, error.nodes) == (wrong, 0, ["n0"])
            assert (error.phase, error.reason, error.attempts) == ("run", None, [])
        with pytest.raises(errors.ProviderUnavailableError, match="twice in a row when it ran n0") as refused:
            session.run(None, {"x": X})
        assert (refused.value.provider, refused.value.seconds) == (wrong, None)
        health = session.health()
        assert (health[wrong]["deaths"], health[wrong]["incarnation"]) == (2, 2)
        assert [(one["nodes"], one["deaths"]) for one in health[wrong]["quarantined"]] == [(["n0"], 2)]
        assert health["cpu"] == {"state": "ready", "incarnation": 1, "deaths": 0, "quarantined": []}


def test_a_provider_that_dies_in_a_run_and_again_when_that_is_replayed() -> None:
    """With replay alone the run tells of both deaths; with fallback too it ends well, on the next claimant."""
    wrong = f"{OWN}:Wrong"
    providers = [(wrong, {"how": "segfaults"}), "cpu"]
    with InferenceSession(chain("Relu", "Neg"), providers=providers, options=REPLAY) as session:
        with pytest.raises(errors.WorkerDiedError) as caught:
            session.run(None, {"x": X})
        assert (caught.value.signal, caught.value.incarnation, caught.value.nodes) == ("SIGSEGV", 2, ["n0"])
        assert [(one["signal"], one["incarnation"]) for one in caught.value.attempts] == [("SIGSEGV", 1)]
    with InferenceSession(chain("Relu", "Neg"), providers=providers) as session:
        for _ in range(2):
            np.testing.assert_array_equal(session.run(None, {"x": X})[0], -relu(X))
        assert [(one["incarnation"], one["deaths"]) for one in session.health().values()] == [(2, 2), (1, 0)]
        assert {one["provider"] for one in session.placement().to_dict()["nodes"]} == {"cpu"}


def test_the_death_of_an_idle_worker_is_mended_by_the_next_run() -> None:
    """Whether the run begins before or after the monitor has seen it: nobody was running, so nothing has failed."""
    with InferenceSession(chain("Relu", "Neg", "Abs"), providers=["cpu", "cpu:1"], options=CUT) as session:
        expected = session.run(None, {"x": X})[0]
        for pid in worker_pids():
            end(pid)
            np.testing.assert_array_equal(session.run(None, {"x": X})[0], expected)
        for one in session.health().values():
            assert one == {"state": "ready", "incarnation": 2, "deaths": 1, "quarantined": []}


@pytest.mark.parametrize("replay", [True, False])
def test_callers_that_wait_on_a_worker_when_it_dies(tmp_path: Path, replay: bool) -> None:
    """One run was in the worker, two waited for it. Those end well, and without replay the first one fails."""
    options = SessionOptions(max_in_flight=3, replay=replay, fallback=False)
    gate = Gate(tmp_path)
    try:
        with InferenceSession(chain("Identity"), providers=[gate.provider], options=options) as session:
            futures = [session.run_async(None, {"x": X + i}) for i in range(3)]
            (worker,) = session._fleet.workers
            assert until(lambda: worker.current.doing().phase == "run")
            end(worker.pid)  # it could still take one of these
            gate.open(3 if replay else 2)
            died = [future.exception(ENOUGH) for future in futures]
            results = [future.result()[0] for future, error in zip(futures, died, strict=True) if error is None]
            for i, result in enumerate(results, len(futures) - len(results)):
                np.testing.assert_array_equal(result, X + i)
            failed = [error for error in died if error is not None]
            assert [type(error) for error in failed] == ([] if replay else [errors.WorkerDiedError])
            assert died[1:] == [None, None]
            assert (worker.incarnation, worker.deaths) == (2, 1)
    finally:
        gate.close()


def test_two_sessions_on_one_fleet_survive_a_death() -> None:
    with Fleet(["cpu"]) as fleet:
        options = SessionOptions(fleet=fleet)
        with (
            InferenceSession(chain("Relu"), options=options) as one,
            InferenceSession(chain("Neg"), options=options) as two,
        ):
            (pid,) = worker_pids()
            end(pid)
            np.testing.assert_array_equal(two.run(None, {"x": X})[0], -X)
            np.testing.assert_array_equal(one.run(None, {"x": X})[0], relu(X))
            assert fleet.health()["cpu"] == {"state": "ready", "incarnation": 2, "deaths": 1, "quarantined": []}


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
