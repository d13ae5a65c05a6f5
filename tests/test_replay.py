"""A worker dies in a run, and the answer is right all the same: what its successor does, and what it leaves alone."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from outrider.scheduler import Fleet, InferenceSession, SessionOptions, errors
from outrider.scheduler.replica import Slot
from outrider.scheduler.runner import Runner
from tests.builders import chain
from tests.gates import until
from tests.leaks import worker_pids

X = np.linspace(-2, 2, 8, dtype=np.float32).reshape(2, 4)
OPS = ("Relu", "Neg", "Abs", "Exp", "Tanh")
ENOUGH = 60.0  # seconds; what is waited for here takes tenths


def right(x: np.ndarray) -> np.ndarray:
    return np.tanh(np.exp(np.abs(-np.maximum(x, 0))))


def chaos(fault: str = "sigkill", claims: tuple[str, ...] = ("Abs",), **more: object) -> tuple[str, dict[str, object]]:
    return "chaos", {"fault": fault, "claims": list(claims), **more}


def events(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_successor_replays_one_partition_and_all_others_keep_their_workers() -> None:
    with InferenceSession(chain(*OPS), providers=[chaos(at=2, incarnations=[1]), "cpu"]) as session:
        before = session.health()["cpu"]
        pids = set(worker_pids())
        for _ in range(4):
            np.testing.assert_allclose(session.run(None, {"x": X})[0], right(X), rtol=1e-6)
        health = session.health()
        assert health["cpu"] == before
        assert (health["chaos"]["incarnation"], health["chaos"]["deaths"]) == (2, 1)
        assert len(pids & set(worker_pids())) == 1


def test_what_a_dead_worker_has_computed_is_not_computed_again() -> None:
    """The dead worker has two partitions of the run: the first was done and is read by its successor's."""
    pins = {"n0": "cpu:1", "n1": "cpu", "n2": "chaos", "n3": "cpu:1", "n4": "chaos"}
    big = np.random.default_rng(5).standard_normal((75_000, 4), dtype=np.float32)
    providers = [chaos(claims=("Abs", "Tanh"), node="n4", at=3, incarnations=[1]), "cpu", "cpu:1"]
    with InferenceSession(chain(*OPS), providers=providers, options=SessionOptions(pins=pins)) as session:
        for x in (big, X, big, big * 2, X):
            np.testing.assert_allclose(session.run(None, {"x": x})[0], right(x), rtol=1e-6)
        runs = {one["partition"]: one["runs"] for one in session.stats()["per_partition"]}
        assert session.health()["chaos"]["incarnation"] == 2
        # Counters begin anew with the successor: its second partition served run 3 again, the first did not.
        mine = [one["runs"] for one in session.stats()["per_partition"] if one["provider"] == "chaos"]
        assert mine[1] == mine[0] + 1, runs


def test_results_that_were_given_out_before_a_death_stay_what_they_were() -> None:
    big = [np.full((25_000, 4), value, np.float32) for value in range(40)]
    provider = chaos(claims=("Neg",), at=20, incarnations=[1])
    with InferenceSession(chain("Relu", "Neg"), providers=[provider, "cpu"]) as session:
        kept = [session.run(None, {"x": x})[0] for x in big]
        assert session.health()["chaos"]["incarnation"] == 2
        for value, result in enumerate(kept):
            assert (result == -value).all(), value


def test_after_a_death_runs_come_back_to_the_steady_state(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[int] = []
    finish = Runner.finish

    def counted(runner: Runner, slot: Slot, run: int, *rest: object) -> dict[str, object]:
        looked_up.append(run)
        return finish(runner, slot, run, *rest)

    monkeypatch.setattr(Runner, "finish", counted)
    with InferenceSession(
        chain("Relu", "Neg"), providers=[chaos(claims=("Neg",), at=12, incarnations=[1]), "cpu"]
    ) as s:
        for _ in range(30):
            np.testing.assert_array_equal(s.run(None, {"x": X})[0], -np.maximum(X, 0))
        assert s.health()["chaos"]["incarnation"] == 2
        looked_up.clear()
        for _ in range(10):
            s.run(None, {"x": X})
        assert not looked_up


@pytest.mark.parametrize("policy", [{"replay": False}, {"replay": False, "fallback": False}])
def test_without_replay_a_run_is_told_of_the_death_and_the_next_one_is_right(policy: dict[str, bool]) -> None:
    options = SessionOptions(**policy)
    with InferenceSession(chain(*OPS), providers=[chaos(at=1, incarnations=[1]), "cpu"], options=options) as session:
        with pytest.raises(errors.WorkerDiedError) as caught:
            session.run(None, {"x": X})
        error = caught.value
        assert (error.provider, error.signal, error.phase) == ("chaos", "SIGKILL", "run")
        assert (error.nodes, error.incarnation, error.attempts) == (["n2"], 1, [])
        np.testing.assert_allclose(session.run(None, {"x": X})[0], right(X), rtol=1e-6)


def test_a_second_death_hands_the_nodes_to_the_next_claimant_and_a_restart_hands_them_back() -> None:
    with InferenceSession(chain(*OPS), providers=[chaos(incarnations=[1, 2]), "cpu"]) as session:
        for _ in range(3):
            np.testing.assert_allclose(session.run(None, {"x": X})[0], right(X), rtol=1e-6)
        (blamed,) = session.health()["chaos"]["quarantined"]
        assert (blamed["nodes"], blamed["deaths"]) == (["n2"], 2)
        owner = {node["name"]: node["provider"] for node in session.placement().to_dict()["nodes"]}
        assert owner["n2"] == "cpu"
        session.restart("chaos")
        owner = {node["name"]: node["provider"] for node in session.placement().to_dict()["nodes"]}
        assert owner["n2"] == "chaos"
        health = session.health()["chaos"]
        assert (health["state"], health["incarnation"], health["quarantined"]) == ("ready", 3, [])
        np.testing.assert_allclose(session.run(None, {"x": X})[0], right(X), rtol=1e-6)


def test_the_story_of_a_run_that_killed_two_incarnations() -> None:
    options = SessionOptions(fallback=False)
    with InferenceSession(chain(*OPS), providers=[chaos("sigsegv"), "cpu"], options=options) as session:
        with pytest.raises(errors.WorkerDiedError) as caught:
            session.run(None, {"x": X})
        error = caught.value
        assert (error.incarnation, error.signal, error.partition, error.nodes) == (2, "SIGSEGV", 1, ["n2"])
        (first,) = error.attempts
        assert (first["incarnation"], first["signal"], first["nodes"]) == (1, "SIGSEGV", ["n2"])
        with pytest.raises(errors.ProviderUnavailableError, match="quarantined") as refused:
            session.run(None, {"x": X})
        assert (refused.value.provider, refused.value.seconds) == ("chaos", None)
        assert session.health()["chaos"]["incarnation"] == 2


def test_an_unknown_provider_cannot_be_restarted() -> None:
    session = InferenceSession(chain("Relu"), providers=["null"])
    with session, pytest.raises(errors.ProviderUnavailableError, match="no provider 'cuda:0'"):
        session.restart("cuda:0")


def random_model() -> bytes:
    nodes = [
        helper.make_node("Neg", ["x"], ["a"], name="n0"),
        helper.make_node("RandomUniformLike", ["a"], ["r"], name="n1"),
        helper.make_node("Mul", ["r", "a"], ["b"], name="n2"),
        helper.make_node("Abs", ["b"], ["y"], name="n3"),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "g", [value("x", TensorProto.FLOAT, [2, 4])], [value("y", TensorProto.FLOAT, [2, 4])]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    return model.SerializeToString()


def test_random_nodes_are_not_run_twice() -> None:
    providers = [chaos(claims=("RandomUniformLike",), incarnations=[1]), "cpu"]
    with InferenceSession(random_model(), providers=providers) as session:
        with pytest.raises(errors.WorkerDiedError, match="n1"):
            session.run(None, {"x": X})
        (y,) = session.run(None, {"x": X})
        assert (y <= np.abs(X)).all()


def test_a_deterministic_partition_is_replayed_beside_a_random_one() -> None:
    providers = [chaos(claims=("Abs",), incarnations=[1]), "cpu"]
    with InferenceSession(random_model(), providers=providers) as session:
        (y,) = session.run(None, {"x": X})
        assert (y <= np.abs(X)).all()
        assert session.health()["chaos"]["incarnation"] == 2


def test_sessions_on_one_fleet_survive_a_death_each_on_its_own_account() -> None:
    with Fleet([chaos(at=2, incarnations=[1]), "cpu"]) as fleet:
        options = SessionOptions(fleet=fleet)
        with (
            InferenceSession(chain(*OPS), options=options) as one,
            InferenceSession(chain("Neg", "Abs"), options=options) as two,
        ):
            for _ in range(3):
                np.testing.assert_allclose(one.run(None, {"x": X})[0], right(X), rtol=1e-6)
                np.testing.assert_array_equal(two.run(None, {"x": X})[0], np.abs(X))
            assert one.health() == two.health()
            assert one.health()["chaos"]["incarnation"] == 2
            assert one.health()["chaos"]["quarantined"] == []


def test_runs_in_flight_of_another_session_are_not_lost() -> None:
    with Fleet([chaos(at=40, incarnations=[1]), "cpu"]) as fleet:
        options = SessionOptions(fleet=fleet)
        wrong: list[object] = []

        def many(session: InferenceSession, expected: np.ndarray) -> None:
            for _ in range(60):
                try:
                    if not np.allclose(session.run(None, {"x": X})[0], expected, rtol=1e-6):
                        wrong.append("a wrong answer")
                except errors.OutriderError as error:
                    wrong.append(error)

        with (
            InferenceSession(chain(*OPS), options=options) as one,
            InferenceSession(chain("Neg", "Abs"), options=options) as two,
        ):
            callers = [
                threading.Thread(target=many, args=args)
                for args in ((one, right(X)), (one, right(X)), (two, np.abs(X)), (two, np.abs(X)))
            ]
            for caller in callers:
                caller.start()
            for caller in callers:
                caller.join(ENOUGH)
            assert not any(caller.is_alive() for caller in callers)
            assert wrong == []
            assert one.health()["chaos"]["incarnation"] == 2


def test_a_spare_takes_over() -> None:
    options = SessionOptions(spares=1, pins={"n0": "cpu", "n1": "cpu:1"})
    with InferenceSession(chain("Relu", "Neg"), providers=["cpu", "cpu:1"], options=options) as session:
        expected = session.run(None, {"x": X})[0]
        worker = session._fleet.workers[1]
        supervisor = next(iter(session._resources.supervisors.values()))
        done = threading.Event()
        supervisor.call(done.set)  # after what it has been asked to prepare
        assert done.wait(ENOUGH)
        spare = worker.spare
        assert spare is not None and spare.alive
        assert session.health()["cpu:1"]["spare"] == "ready"
        os.kill(worker.pid, signal.SIGKILL)
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], expected)
        assert worker.current is spare
        done.clear()
        supervisor.call(done.set)
        assert done.wait(ENOUGH)


def test_only_what_is_new_in_a_plan_is_shipped_again(tmp_path: Path) -> None:
    """The cpu worker keeps the program of its first partition and gets one more."""
    record = str(tmp_path / "compiled")
    here = os.path.dirname(os.path.abspath(__file__))
    own = (f"{here}/own_providers.py:Recorded", {"record": record})
    with InferenceSession(chain(*OPS), providers=[chaos(), own]) as session:
        compiled = Path(record).read_text().split()
        np.testing.assert_allclose(session.run(None, {"x": X})[0], right(X), rtol=1e-6)
        later = Path(record).read_text().split()
        assert later[: len(compiled)] == compiled
        assert later[len(compiled) :] == ["n2"]


def test_deaths_leave_nothing_behind() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    with InferenceSession(chain("Relu", "Neg"), providers=["cpu"]) as session:
        worker = session._fleet.workers[0]

        def die() -> None:
            os.kill(worker.pid, signal.SIGKILL)
            np.testing.assert_array_equal(session.run(None, {"x": X})[0], -np.maximum(X, 0))

        die()  # from now on there is always one that died last
        once = descriptors()
        for _ in range(4):
            die()
            assert until(lambda: descriptors() <= once)  # the last of the one before is let go in another thread


def test_a_spare_that_dies_is_replaced() -> None:
    with InferenceSession(chain("Relu"), providers=["cpu"], options=SessionOptions(spares=1)) as session:
        worker = session._fleet.workers[0]
        supervisor = next(iter(session._resources.supervisors.values()))
        for _ in range(2):
            done = threading.Event()
            while worker.spare is None or not worker.spare.alive:
                supervisor.call(done.set)
                assert done.wait(ENOUGH)
                time.sleep(0.05)
            spare = worker.spare
            os.kill(spare.pid, signal.SIGKILL)
            spare.ended.result(ENOUGH)
        assert worker.spare_deaths == 2
        assert session.health()["cpu"]["incarnation"] == 1
