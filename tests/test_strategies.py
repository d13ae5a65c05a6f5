"""Sessions by cost, in stages and in replicas. Oracle: one worker, bit by bit (one thread each), and the report."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from outrider.providers.contract import Claim
from outrider.scheduler import Fleet, InferenceSession, ProviderSpec, SessionOptions
from outrider.scheduler.errors import ClaimBrokenError, InvalidOptionError
from outrider.scheduler.replica import Slot
from outrider.scheduler.slots import Hold
from tests.builders import chain, model, node, tensor
from tests.gates import ENOUGH, end

OWN = str(Path(__file__).with_name("own_providers.py"))
RNG = np.random.default_rng(3)
X = [RNG.standard_normal((8, 32)).astype(np.float32) for _ in range(6)]
DEPTH = 6


def layers(stages: dict[int, int] | None = None) -> object:
    """x -> (MatMul, Tanh) six times -> y; `stages`: layer -> pipeline_stage."""
    nodes, weights, value = [], {}, "x"
    for i in range(DEPTH):
        weights[f"w{i}"] = (RNG.standard_normal((32, 32)) / 6).astype(np.float32)
        last = "y" if i == DEPTH - 1 else f"t{i}"
        nodes += [node("MatMul", f"{value} w{i}", f"m{i}", f"mul{i}"), node("Tanh", f"m{i}", last, f"tanh{i}")]
        value = last
    made = model(nodes, [tensor("x", (8, 32))], [tensor("y", (8, 32))], weights, ir_version=11)
    for position, one in enumerate(made.graph.node):
        if stages is not None:
            one.device_configurations.add(configuration_id="two").pipeline_stage = stages[position // 2]
    return made


MODEL = layers()


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet([ProviderSpec("cpu", threads=1), ProviderSpec("cpu:1", threads=1), f"{OWN}:ReluAndAbs"]) as made:
        yield made


@pytest.fixture(scope="module")
def expected(fleet: Fleet) -> list[np.ndarray]:
    with InferenceSession(MODEL, providers=["cpu"], options=SessionOptions(fleet=fleet)) as session:
        return [session.run(None, {"x": x})[0] for x in X]


def run_from_many_threads(session: InferenceSession, expected: list[np.ndarray]) -> None:
    wrong: list[object] = []

    def caller(first: int) -> None:
        try:
            for i in range(first, first + 30):
                (y,) = session.run(None, {"x": X[i % len(X)]})
                if not np.array_equal(y, expected[i % len(X)]):
                    wrong.append((first, i))
        except Exception as error:  # told by the assertion below
            wrong.append(error)

    callers = [threading.Thread(target=caller, args=(number,)) for number in range(4)]
    for one in callers:
        one.start()
    for one in callers:
        one.join()
    assert wrong == []


def test_stages_give_what_one_worker_gives_with_many_runs_in_flight(fleet: Fleet, expected: list[np.ndarray]) -> None:
    options = SessionOptions(fleet=fleet, strategy="pipeline", max_in_flight=3)
    with InferenceSession(MODEL, providers=["cpu", "cpu:1"], options=options) as session:
        report = session.placement()
        run_from_many_threads(session, expected)
    assert [(one.provider, len(one.nodes)) for one in report.partitions] == [("cpu", DEPTH), ("cpu:1", DEPTH)]
    assert any("in stages" in note and "cpu:1" in note for note in report.notes)
    assert "threads: cpu 1, cpu:1 1" in report.notes


def test_stages_that_the_model_asks_for(fleet: Fleet) -> None:
    options = SessionOptions(fleet=fleet, strategy="pipeline")
    made = layers({0: 0, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1})
    with InferenceSession(made, providers=["cpu", "cpu:1"], options=options) as session:
        assert [len(one.nodes) for one in session.placement().partitions] == [2, 10]
    back = layers({0: 1, 1: 0, 2: 1, 3: 1, 4: 1, 5: 1})
    with InferenceSession(back, providers=["cpu", "cpu:1"], options=options) as session:
        assert any("pipeline_stage of the model is not used" in note for note in session.placement().notes)


def test_a_pipeline_of_one_worker_says_that_it_has_no_stages(fleet: Fleet) -> None:
    options = SessionOptions(fleet=fleet, strategy="pipeline")
    with InferenceSession(MODEL, providers=["cpu", f"{OWN}:ReluAndAbs"], options=options) as session:
        assert any(note.startswith("there are no stages") for note in session.placement().notes)


def test_replicas_give_what_one_worker_gives_with_many_runs_in_flight(fleet: Fleet, expected: list[np.ndarray]) -> None:
    options = SessionOptions(fleet=fleet, strategy="replicate", max_in_flight=4)
    with InferenceSession(MODEL, providers=["cpu", "cpu:1"], options=options) as session:
        report = session.placement()
        run_from_many_threads(session, expected)
        stats = session.stats()
        told = [(one["partition"], one["provider"]) for one in stats["per_partition"]]
        shares = [sum(slot.counters.runs for slot in one.slots) for one in session._runner.replicas]
    assert [(one.replica, one.provider, len(one.nodes)) for one in report.partitions] == [
        (0, "cpu", 2 * DEPTH), (1, "cpu:1", 2 * DEPTH),
    ]  # fmt: skip
    assert "2 replicas" in str(report)
    assert stats["runs"] == 120
    assert all(shares)
    assert told == [(0, "cpu"), (1, "cpu:1")]


def test_runs_in_flight_are_spread_over_the_replicas(fleet: Fleet) -> None:
    """Two callers at once are in different replicas, whatever slots were used before."""
    options = SessionOptions(fleet=fleet, strategy="replicate", max_in_flight=4)
    with InferenceSession(MODEL, providers=["cpu", "cpu:1"], options=options) as session:
        slots = session._runner.slots
        for _ in range(3):
            holds = [Hold[Slot]() for _ in range(3)]
            taken = [slots.take(hold) for hold in holds]
            assert {slot.replica for slot in taken[:2]} == set(session._runner.replicas)
            for hold in holds:
                slots.give(hold)


def test_a_kind_with_fewer_workers_serves_several_replicas(fleet: Fleet) -> None:
    options = SessionOptions(fleet=fleet, strategy="replicate", max_in_flight=1)
    made = chain("Relu", "Neg", shape=(4,))
    x = np.array([1, -1, 2, -2], np.float32)
    with InferenceSession(made, providers=[f"{OWN}:ReluAndAbs", "cpu", "cpu:1"], options=options) as session:
        results = [future.result()[0] for future in [session.run_async(None, {"x": x}) for _ in range(6)]]
        report = session.placement()
    assert all(np.array_equal(y, -np.maximum(x, 0)) for y in results)
    assert [(one.replica, one.provider) for one in report.partitions] == [
        (0, f"{OWN}:ReluAndAbs"), (0, "cpu"), (1, f"{OWN}:ReluAndAbs"), (1, "cpu:1"),
    ]  # fmt: skip


def test_a_single_replica_is_told(fleet: Fleet) -> None:
    options = SessionOptions(fleet=fleet, strategy="replicate")
    with InferenceSession(MODEL, providers=["cpu"], options=options) as session:
        assert "there is one replica" in str(session.placement())


@pytest.mark.parametrize("shared", [True, False])
def test_a_pin_to_one_of_several_replicas_is_an_error(fleet: Fleet, shared: bool) -> None:
    options = SessionOptions(strategy="replicate", pins={"mul*": "cpu:1"}, fleet=fleet if shared else None)
    with pytest.raises(InvalidOptionError, match="each of cpu, cpu:1 has a replica of its own"):
        InferenceSession(MODEL, providers=["cpu", "cpu:1"], options=options)


def test_the_death_of_one_replica_leaves_the_other_and_is_mended(
    expected: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = [ProviderSpec("cpu", threads=1), ProviderSpec("cpu:1", threads=1)]
    with InferenceSession(MODEL, providers=specs, options=SessionOptions(strategy="replicate")) as session:
        mended, revive = threading.Event(), Fleet.revive
        monkeypatch.setattr(Fleet, "revive", lambda *args: mended.wait() and revive(*args))
        end(session._fleet.workers[0].pid)
        runs = [session.run_async(None, {"x": X[i]}) for i in range(2)]  # one in each replica
        done, waiting = concurrent.futures.wait(runs, ENOUGH, concurrent.futures.FIRST_COMPLETED)
        assert (len(done), len(waiting)) == (1, 1)
        mended.set()
        for one, y in zip(runs, expected, strict=False):
            assert np.array_equal(one.result(ENOUGH)[0], y)
        assert [(one["incarnation"], one["deaths"]) for one in session.health().values()] == [(2, 1), (1, 0)]
        run_from_many_threads(session, expected)


def test_an_island_that_does_not_earn_its_hops_moves_and_the_report_says_so(fleet: Fleet) -> None:
    made = chain("Neg", "Relu", "Neg", shape=(4,))
    providers = [f"{OWN}:ReluAndAbs", "cpu"]
    for strategy, owners in (("priority", ["cpu", f"{OWN}:ReluAndAbs", "cpu"]), ("cost", ["cpu"])):
        options = SessionOptions(fleet=fleet, strategy=strategy)
        with InferenceSession(made, providers=providers, options=options) as session:
            report = session.placement()
            x = np.array([1, -1, 2, -2], np.float32)
            assert np.array_equal(session.run(None, {"x": x})[0], -np.maximum(-x, 0))
            stats = session.stats()
        assert [one.provider for one in report.partitions] == owners
    assert report.idle_providers == [f"{OWN}:ReluAndAbs"]
    assert "got nothing, since what it would have had does not earn its hops and went to cpu" in str(report)
    assert any("n1 went from" in note and "2 hops" in note for note in report.notes)
    assert stats["crossing"]["hop_seconds"] > stats["crossing"]["byte_seconds"] > 0


def test_symbols_and_pins_keep_an_island_where_it_is(fleet: Fleet) -> None:
    providers = [f"{OWN}:ReluAndAbs", "cpu"]
    for made, pins in [
        (chain("Neg", "Relu", "Neg", shape=("N", 4)), {}),
        (chain("Neg", "Relu", "Neg", shape=(4,)), {"n1": f"{OWN}:ReluAndAbs"}),
    ]:
        options = SessionOptions(fleet=fleet, strategy="cost", pins=pins)
        with InferenceSession(made, providers=providers, options=options) as session:
            assert len(session.placement().partitions) == 3


def test_a_provider_tells_its_own_cost() -> None:
    """Shapes are symbolic, so that without costs of the providers' own nothing may move."""
    made = chain("Neg", "Relu", "Neg", shape=("N", 4))
    x = np.array([[1, -1, 2, -2]], np.float32)
    special = {
        name: ProviderSpec(f"{OWN}:Costly", name, options={"cost": cost}) for name, cost in (("a", 1e-9), ("b", None))
    }
    general = {
        name: ProviderSpec(f"{OWN}:Costly", name, options={"cost": cost, "all": True})
        for name, cost in (("slower", 2e-9), ("slow", 0.4))
    }
    with Fleet([*special.values(), *general.values()]) as costly:
        options = SessionOptions(fleet=costly, strategy="cost")
        for mine, others, partitions in (("a", "slower", 1), ("a", "slow", 3), ("b", "slower", 3)):
            with InferenceSession(made, providers=[special[mine], general[others]], options=options) as session:
                assert len(session.placement().partitions) == partitions, (mine, others)
                assert np.array_equal(session.run(None, {"x": x})[0], -np.maximum(-x, 0))


def test_a_cost_that_is_no_number_of_seconds_breaks_the_claim() -> None:
    for cost in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="number of seconds"):
            Claim([], cost=cost)
    with pytest.raises(ClaimBrokenError, match="number of seconds"):
        InferenceSession(chain("Relu"), providers=[(f"{OWN}:Costly", {"cost": -1.0})])


def test_who_got_nothing_and_why(fleet: Fleet) -> None:
    with InferenceSession(MODEL, options=SessionOptions(fleet=fleet)) as session:
        text = str(session.placement())
    assert "cpu:1" in text
    assert "got nothing, since all that it claims went to cpu" in text
    assert "got nothing, since it claims none of the nodes" in text
