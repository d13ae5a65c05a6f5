"""What the chaos matrix has no cell for: random graphs with faults anywhere in them, several runs in flight, several
workers that die, results that are bound or held, and partitions that must not run twice."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

import numpy as np
import onnx
import pytest

from outrider.scheduler import Fleet, InferenceSession, SessionOptions, errors
from outrider.scheduler.ortvalue import OrtValue
from tests.builders import chain, model, node, tensor
from tests.leaks import worker_pids
from tests.test_random_graphs import direct, random_model

ENOUGH = 60.0  # seconds; what is waited for here takes milliseconds
X = np.array([[-2, -1, 0.5, 3]], np.float32)


def chaos(instance: int = 0, **options: Any) -> tuple[str, dict[str, Any]]:
    options.setdefault("incarnations", [1])
    return (f"chaos:{instance}" if instance else "chaos", options)


def claims_of(rng: random.Random, made: onnx.ModelProto) -> list[str]:
    names = [one.name for one in made.graph.node]
    return rng.sample(names, rng.randint(1, len(names)))


@pytest.mark.parametrize("seed", range(24))
def test_random_graphs_with_faults_are_right(seed: int) -> None:
    """Two providers die once each, in a random run at a random node, before or after it has written its results."""
    rng = random.Random(seed)
    made, _ = random_model(seed, 1)
    workers = []
    for instance in (0, 1):
        claims = claims_of(rng, made)
        fault = {"fault": rng.choice(["sigkill", "sigsegv", "exit"]), "late": rng.random() < 0.5}
        workers.append(
            chaos(instance, claims=claims, node=rng.choice(claims), at=rng.randint(1, 6), merge=bool(seed % 2), **fault)
        )
    options = SessionOptions(max_in_flight=rng.randint(1, 3))
    feeds = [np.linspace(-3, 2, count, dtype=np.float32) for count in (4, 1, 9, 4, 5, 30_000, 4, 4)]
    with InferenceSession(made, providers=[*workers, "cpu"], options=options) as session:
        futures = [session.run_async(None, {"x": x}) for x in feeds]
        held = [future.result(ENOUGH) for future in futures]
        for x, results in zip(feeds, held, strict=True):
            for result, expected in zip(results, direct(made, x), strict=True):
                np.testing.assert_array_equal(result, expected)
        for one in ("chaos", "chaos:1"):
            assert session.health()[one]["deaths"] <= 1


@pytest.mark.parametrize("late", [False, True], ids=["before", "late"])
def test_runs_in_flight_beside_one_that_kills_its_worker(late: bool) -> None:
    """From three threads, through two chaos workers that each die three times."""
    deaths = {"fault": "sigkill", "at": 7, "incarnations": [1, 2, 3], "late": late}
    providers = [chaos(claims=["n1"], **deaths), chaos(1, claims=["n3"], **{**deaths, "at": 9}), "cpu"]
    wrong: list[BaseException] = []

    def calls(session: InferenceSession, rows: int) -> None:
        try:
            for number in range(40):
                x = np.full((rows, 4), number, np.float32)
                np.testing.assert_allclose(session.run(None, {"x": x})[0], np.exp(-x), rtol=1e-5)
        except BaseException as error:
            wrong.append(error)

    options = SessionOptions(max_in_flight=3)
    with InferenceSession(chain("Neg", "Abs", "Neg", "Exp", "Relu"), providers=providers, options=options) as session:
        threads = [threading.Thread(target=calls, args=(session, rows)) for rows in (1, 2, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(ENOUGH)
            assert not thread.is_alive()
        assert not wrong, wrong
        assert session.health()["chaos"]["deaths"] == session.health()["chaos:1"]["deaths"] == 3
        assert session.health()["cpu"]["deaths"] == 0


def test_a_partition_that_has_run_does_not_run_again() -> None:
    """n1 and n3 are partitions of one worker, which dies in n3. n1 is done then: what it does in its second run in an
    incarnation comes with the third run of the session, not with the second.
    """
    trap = {"fault": "exception", "node": "n1", "at": 2}
    inner = {"provider": "chaos", "provider_options": trap}
    providers = [chaos(fault="sigkill", node="n3", claims=["n1", "n3"], **inner), "cpu"]
    with InferenceSession(chain("Neg", "Abs", "Neg", "Exp", "Neg"), providers=providers) as session:
        for incarnation in (2, 2):
            np.testing.assert_allclose(session.run(None, {"x": X})[0], -np.exp(-np.abs(X)), rtol=1e-5)
            assert [one["incarnation"] for one in session.health().values()] == [incarnation, 1]
        with pytest.raises(errors.KernelError, match="n1"):
            session.run(None, {"x": X})


def test_an_edge_that_two_partitions_of_the_dead_worker_read_is_kept() -> None:
    """n3 reads what n1, of the same worker, wrote, and what n2 made of it elsewhere; it dies when it has written."""
    nodes = [
        node("Neg", "x", "a", "n0"), node("Exp", "a", "b", "n1"), node("Neg", "b", "c", "n2"),
        node("Mul", "b c", "d", "n3"), node("Neg", "d", "e", "n4"), node("Add", "b e", "y", "n5"),
    ]  # fmt: skip
    made = model(nodes, [tensor("x", ["N"])], [tensor("y", ["N"])])
    for dying in ("n1", "n3", "n5"):
        providers = [chaos(fault="sigkill", node=dying, claims=["n1", "n3", "n5"], at=2, late=True), "cpu"]
        with InferenceSession(made, providers=providers) as session:
            for number in range(4):
                x = np.linspace(-1, 1, 20_000, dtype=np.float32) + np.float32(number)
                b = np.exp(-x)
                np.testing.assert_allclose(session.run(None, {"x": x})[0], b + b * b, rtol=1e-5)
            assert session.health()["chaos"]["deaths"] == 1


@pytest.mark.parametrize("place", ["input", "own", "foreign"])
def test_results_that_are_bound_are_right_after_a_late_death(place: str) -> None:
    """Bound to the memory that the run reads, to memory of the session's, and to any other."""
    count = 40_000
    start = np.linspace(-1, 1, count, dtype=np.float32)
    with InferenceSession(
        chain("Exp", shape=("N",)), providers=[chaos(fault="sigkill", at=3, late=True), "cpu"]
    ) as session:
        x = session.empty("x", (count,))
        y = {"input": x, "own": session.empty("y", (count,)), "foreign": np.empty(count, np.float32)}[place]
        binding = session.io_binding()
        binding.bind_ortvalue_input("x", OrtValue(x))
        binding.bind_ortvalue_output("y", OrtValue(y))
        for number in range(5):
            x[...] = start + np.float32(number)
            expected = np.exp(x)
            session.run_with_iobinding(binding)
            np.testing.assert_allclose(y, expected, rtol=1e-6)
        assert session.health()["chaos"]["deaths"] == 1
        del x, y, binding


def test_a_chain_that_feeds_its_results_back_in_place_survives_deaths() -> None:
    """Each result is the next input, of the same memory: a partition that ran twice would show."""
    count = 40_000
    providers = [chaos(fault="sigkill", at=4, late=True, incarnations=[1, 2, 3], claims=["n1"]), "cpu"]
    made = model(
        [node("Identity", "x", "a", "n0"), node("Add", "a one", "y", "n1")],
        [tensor("x", ["N"])], [tensor("y", ["N"])], {"one": np.array([1], np.float32)},
    )  # fmt: skip
    with InferenceSession(made, providers=providers) as session:
        state = session.empty("y", (count,))
        state[...] = 0
        binding = session.io_binding()
        binding.bind_ortvalue_input("x", OrtValue(state))
        binding.bind_ortvalue_output("y", OrtValue(state))
        for number in range(1, 16):
            session.run_with_iobinding(binding)
            assert (state == number).all()
        assert session.health()["chaos"]["deaths"] == 3
        del state, binding


def test_results_held_by_the_caller_stay_as_they_are() -> None:
    """Blocks of the output pool that the caller holds are not written by the next incarnation."""
    providers = [chaos(fault="sigkill", at=3, late=True, incarnations=[1, 2, 3]), "cpu"]
    with InferenceSession(chain("Exp", shape=("N",)), providers=providers) as session:
        feeds = [np.full(40_000, number, np.float32) / 10 for number in range(12)]
        held = [session.run(None, {"x": x})[0] for x in feeds]
        assert session.health()["chaos"]["deaths"] == 3
    for x, result in zip(feeds, held, strict=True):
        np.testing.assert_allclose(result, np.exp(x), rtol=1e-6)
    del held, result


@pytest.mark.parametrize("inner", ["load", "start"])
def test_the_next_incarnation_dies_before_it_can_replay(inner: str) -> None:
    second = {"fault": "sigkill", "phase": inner, "incarnations": [2]}
    providers = [chaos(fault="sigkill", at=2, claims=["n1"], provider="chaos", provider_options=second), "cpu"]
    with InferenceSession(chain("Neg", "Exp", "Neg"), providers=providers) as session:
        for _ in range(4):
            np.testing.assert_allclose(session.run(None, {"x": X})[0], -np.exp(-X), rtol=1e-5)


@pytest.mark.parametrize("policy", ["replay", "fallback"])
def test_quarantine_and_its_release(policy: str) -> None:
    """It dies each time; two deaths are enough. `restart` forgets them, and what dies then is the third incarnation."""
    options = SessionOptions(fallback=policy == "fallback")
    providers = [chaos(fault="sigsegv", at=None, incarnations=[1, 2], claims=["n1"]), "cpu"]
    with InferenceSession(chain("Neg", "Exp", "Neg"), providers=providers, options=options) as session:
        expected = -np.exp(-X)
        if policy == "fallback":
            for _ in range(3):
                np.testing.assert_allclose(session.run(None, {"x": X})[0], expected, rtol=1e-5)
        else:
            with pytest.raises(errors.WorkerDiedError) as died:
                session.run(None, {"x": X})
            assert [one["incarnation"] for one in died.value.attempts] == [1]
            assert died.value.incarnation == 2
            with pytest.raises(errors.ProviderUnavailableError, match="quarantine"):
                session.run(None, {"x": X})
        (held,) = session.health()["chaos"]["quarantined"]
        assert (held["nodes"], held["deaths"]) == (["n1"], 2)
        session.restart("chaos")
        assert session.health()["chaos"]["quarantined"] == []
        np.testing.assert_allclose(session.run(None, {"x": X})[0], expected, rtol=1e-5)
        assert {one["provider"]: one["nodes"] for one in session.placement().to_dict()["partitions"]}["chaos"] == ["n1"]


def test_random_nodes_do_not_run_twice() -> None:
    """A random node whose worker died: nobody may tell that run from one that nothing disturbed, or it is an error."""
    nodes = [
        node("Neg", "x", "a", "n0"), node("RandomNormalLike", "a", "r", "n1"), node("Add", "a r", "y", "n2"),
        node("Identity", "r", "z", "n3"),
    ]  # fmt: skip
    made = model(nodes, [tensor("x", [100])], [tensor("y", [100]), tensor("z", [100])])
    providers = [chaos(fault="sigkill", at=2, late=True, claims=["n1"]), "cpu"]
    x = np.arange(100, dtype=np.float32)
    with InferenceSession(made, providers=providers, options=SessionOptions(fallback=False)) as session:
        seen = []
        for number in range(4):
            try:
                y, z = session.run(None, {"x": x})
            except errors.WorkerDiedError as error:
                assert (number, error.nodes, error.signal) == (1, ["n1"], "SIGKILL")
                continue
            np.testing.assert_array_equal(y, -x + z)
            seen.append(z.copy())
        assert len(seen) == 3


def test_a_worker_that_somebody_kills_while_it_rests_blames_nobody() -> None:
    with InferenceSession(chain("Neg", "Exp", "Neg"), providers=[chaos(claims=["n1"]), "cpu"]) as session:
        for _ in range(6):
            np.testing.assert_allclose(session.run(None, {"x": X})[0], -np.exp(-X), rtol=1e-5)
            os.kill(worker_pids()[0], signal.SIGKILL)
        np.testing.assert_allclose(session.run(None, {"x": X})[0], -np.exp(-X), rtol=1e-5)
        assert all(one["quarantined"] == [] for one in session.health().values())


def test_replicas_stand_in_for_each_other() -> None:
    """Two replicas of the model; the worker of each dies in a run of its own, and no caller sees it."""
    deaths = {"fault": "sigkill", "at": 5, "late": True}
    options = SessionOptions(strategy="replicate", max_in_flight=4)
    providers = [chaos(**deaths), chaos(1, **deaths)]
    with InferenceSession(chain("Neg", "Exp", "Neg"), providers=providers, options=options) as session:
        feeds = [np.full((1, 4), number / 10, np.float32) for number in range(40)]
        futures = [session.run_async(None, {"x": x}) for x in feeds]
        for x, future in zip(feeds, futures, strict=True):
            np.testing.assert_allclose(future.result(ENOUGH)[0], -np.exp(-x), rtol=1e-5)
        assert 1 <= sum(one["deaths"] for one in session.health().values()) <= 2


def test_stages_of_a_pipeline_may_die() -> None:
    deaths = {"fault": "sigsegv", "at": 6}
    options = SessionOptions(strategy="pipeline", max_in_flight=3)
    providers = [chaos(**deaths), chaos(1, **deaths)]  # of one kind, and with the same options, they are a team
    made = chain("Neg", "Exp", "Neg", "Abs", "Neg", "Exp", shape=("N", 64))
    with InferenceSession(made, providers=providers, options=options) as session:
        assert len(session.placement().to_dict()["partitions"]) == 2
        feeds = [np.full((1, 64), number / 10, np.float32) for number in range(24)]
        futures = [session.run_async(None, {"x": x}) for x in feeds]
        for x, future in zip(feeds, futures, strict=True):
            np.testing.assert_allclose(future.result(ENOUGH)[0], np.exp(-np.exp(-x)), rtol=1e-5)
        assert sum(one["deaths"] for one in session.health().values()) == 2


def test_closing_does_not_wait_for_a_successor() -> None:
    """The second incarnation takes its time to start; a caller waits for it, and another closes the session."""
    late_start = {"fault": "slow", "phase": "start", "seconds": 1000, "incarnations": [2]}
    providers = [chaos(fault="sigkill", claims=["n1"], provider="chaos", provider_options=late_start), "cpu"]
    caught: list[BaseException] = []
    session = InferenceSession(chain("Neg", "Exp", "Neg"), providers=providers)

    def call() -> None:
        try:
            session.run(None, {"x": X})
        except errors.OutriderError as error:
            caught.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    while session.health()["chaos"]["incarnation"] < 2:
        time.sleep(0.01)
    session.close()
    caller.join(ENOUGH)
    assert not caller.is_alive()
    assert isinstance(caught[0], errors.SessionClosedError)


def test_values_without_a_fixed_place_are_kept_too() -> None:
    """A sequence and strings cross a partition that dies."""
    nodes = [
        node("SequenceConstruct", "x x", "s", "n0"), node("SequenceInsert", "s x", "t", "n1"),
        node("ConcatFromSequence", "t", "y", "n2", axis=0), node("Identity", "w", "v", "n3"),
        node("StringConcat", "v w", "z", "n4"),
    ]  # fmt: skip
    made = model(
        nodes, [tensor("x", ["N"]), tensor("w", ["M"], onnx.TensorProto.STRING)],
        [tensor("y", ["K"]), tensor("z", ["M"], onnx.TensorProto.STRING)],
    )  # fmt: skip
    for dying in ("n1", "n3"):
        for late in (False, True):
            providers = [chaos(fault="sigkill", node=dying, claims=["n1", "n3"], at=2, late=late), "cpu"]
            with InferenceSession(made, providers=providers) as session:
                for number in range(4):
                    x, w = np.full(3 + number, number, np.float32), np.array([f"text {number}"] * (number + 1), object)
                    y, z = session.run(None, {"x": x, "w": w})
                    np.testing.assert_array_equal(y, np.concatenate([x, x, x]))
                    assert z.tolist() == [f"text {number}text {number}"] * (number + 1)
                assert session.health()["chaos"]["deaths"] == 1


def test_a_death_in_the_warm_up_is_no_more_than_one_in_a_run() -> None:
    with InferenceSession(
        chain("Neg", "Exp", "Neg"), providers=[chaos(fault="sigabrt", claims=["n1"]), "cpu"]
    ) as session:
        session.warmup({"x": (1, 4)})
        np.testing.assert_allclose(session.run(None, {"x": X})[0], -np.exp(-X), rtol=1e-5)
        assert session.health()["chaos"]["deaths"] == 1


def test_sessions_of_a_fleet_are_blamed_each_for_its_own() -> None:
    """In two sessions a node of its own kills the shared worker, once and twice: only the second is quarantined."""
    second = {"fault": "sigsegv", "node": "m1", "at": None, "incarnations": [2, 3]}
    first = chaos(fault="sigsegv", node="n1", claims=["Exp"], provider="chaos", provider_options=second)
    nodes = [node("Neg", "x", "a", "m0"), node("Exp", "a", "b", "m1"), node("Neg", "b", "y", "m2")]
    other = model(nodes, [tensor("x", ("N", 4))], [tensor("y", ("N", 4))])
    with Fleet([first, "cpu"]) as fleet:
        options = SessionOptions(fleet=fleet)
        with (
            InferenceSession(chain("Neg", "Exp", "Neg"), options=options) as one,
            InferenceSession(other, options=options) as two,
        ):
            for session in (one, two, one, two, one):
                np.testing.assert_allclose(session.run(None, {"x": X})[0], -np.exp(-X), rtol=1e-5)
            (held,) = fleet.health()["chaos"]["quarantined"]
            assert held["nodes"] == ["m1"]


@pytest.mark.parametrize("fault", ["stale_reference", "wild_reference"])
def test_who_reads_what_is_spoilt_is_never_blamed(fault: str) -> None:
    """Several runs in flight find the board spoilt; some tell when the worker has been replaced already."""
    operators = ["Neg", "Abs"] * 6
    providers = [chaos(fault=fault, node="n0", at=3, claims=["Neg"], incarnations=[1, 2]), "cpu"]
    with InferenceSession(chain(*operators), providers=providers, options=SessionOptions(max_in_flight=4)) as session:
        feeds = [np.full((rows, 4), rows, np.float32) for rows in (1, 2, 3, 4) * 6]
        futures = [session.run_async(None, {"x": x}) for x in feeds]
        failed = 0
        for x, future in zip(feeds, futures, strict=True):
            try:
                np.testing.assert_array_equal(future.result(ENOUGH)[0], x)
            except errors.ProviderContractError as error:
                assert error.provider == "chaos", error
                failed += 1
        assert failed >= 1
        assert session.health()["cpu"]["deaths"] == 0
