"""`ProviderSpec.required`: who must start, who may be absent, and who must have every node."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from outrider.scheduler import Fleet, InferenceSession, ProviderSpec, SessionOptions, errors
from outrider.scheduler.report import Refusal
from outrider.scheduler.requiring import check_required, nobody, not_all, not_started
from outrider.scheduler.strategy import teams
from tests.builders import chain, model, node, tensor

FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "own_providers.py")
X = np.array([[-1.0, 2.0, -3.0, 4.0]], np.float32)


def own(name: str, query: str = "") -> str:
    return f"{FILE}:{name}" + (f"?{query}" if query else "")


ABSENT = own("Wrong", "how=setup&required=false")
MISSING = "/nowhere/absent.py:Mine?required=false"


def answer(session: InferenceSession, x: np.ndarray = X) -> np.ndarray:
    return session.run(None, {"x": x})[0]


# Absence --------------------------------------------------------------------------------------------------------------


def test_absent_ones_anywhere_in_a_chain_of_optional_ones_do_not_fail_it(caplog: pytest.LogCaptureFixture) -> None:
    unwrapped = "cpu:1?required=false&wrap=no-such-program"
    providers = [ABSENT, own("MyProvider", "required=false"), MISSING, unwrapped, "cpu?required=false"]
    with InferenceSession(chain("Relu", "Neg"), providers=providers) as session:
        np.testing.assert_array_equal(answer(session), -np.maximum(X, 0))
        assert session.get_providers() == [own("MyProvider"), "cpu"]
        told = {one.name: one for one in session.placement().providers}
        assert [one.state for one in told.values()] == ["ready", "ready", "absent", "absent", "absent"]
        assert "no device of mine" in told[own("Wrong")].reason
        assert "there is no file '/nowhere/absent.py'" in told["/nowhere/absent.py:Mine"].reason
        assert "no-such-program" in told["cpu:1"].reason
    warned = [one.getMessage() for one in caplog.records if one.name == "outrider.fleet"]
    assert len(warned) == 3 and all("goes on without provider" in one for one in warned)


def test_all_of_them_absent_is_an_error_with_each_reason() -> None:
    for make in (Fleet, lambda providers: InferenceSession(chain("Relu"), providers=providers)):
        with pytest.raises(errors.ProviderUnavailableError, match="none of the providers has started") as caught:
            make([ABSENT, MISSING])
        assert "no device of mine" in str(caught.value) and "there is no file" in str(caught.value)


def test_one_that_is_named_must_start() -> None:
    with pytest.raises(errors.ProviderUnavailableError, match="required=False") as caught:
        InferenceSession(chain("Relu"), providers=[own("Wrong", "how=setup"), "cpu"])
    assert "no device of mine" in str(caught.value) and caught.value.provider == own("Wrong")
    with pytest.raises(errors.ProviderUnavailableError) as caught:
        InferenceSession(chain("Relu"), providers=[own("Wrong", "how=setup")])
    assert "required=False" not in str(caught.value)  # there would be nobody left
    with pytest.raises(errors.InvalidOptionError, match="there is no /nowhere/absent.py"):
        InferenceSession(chain("Relu"), providers=["/nowhere/absent.py:Mine", "cpu"])


def test_those_of_the_environment_are_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_PROVIDERS", f"{own('Wrong', 'how=setup')},cpu")
    with pytest.raises(errors.ProviderUnavailableError, match="no device of mine"):
        InferenceSession(chain("Relu"))
    monkeypatch.setenv("OUTRIDER_PROVIDERS", f"{ABSENT},cpu?threads=1")
    with InferenceSession(chain("Relu")) as session:
        np.testing.assert_array_equal(answer(session), np.maximum(X, 0))
        assert session.get_providers() == ["cpu"]


def test_a_fleet_does_without_them_for_all_its_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_PROVIDERS", "null")  # over which the fleet wins
    with Fleet([ABSENT, own("MyProvider"), "cpu"]) as fleet:
        options = SessionOptions(fleet=fleet)
        for chosen, there in (
            (None, [own("MyProvider"), "cpu"]),
            ([own("Wrong"), "cpu"], ["cpu"]),
            ([ABSENT, own("MyProvider"), "cpu"], [own("MyProvider"), "cpu"]),
        ):
            with InferenceSession(chain("Relu"), options, chosen) as session:
                np.testing.assert_array_equal(answer(session), np.maximum(X, 0))
                assert session.get_providers() == there
                assert "no device of mine" in str(session.placement())
        with pytest.raises(errors.ProviderUnavailableError, match=r"(?s)none of the providers.*no device of mine"):
            InferenceSession(chain("Relu"), options, [own("Wrong")])


# All ------------------------------------------------------------------------------------------------------------------


def test_one_that_must_have_every_node_has_them() -> None:
    with InferenceSession(chain("Relu", "Neg"), providers=["cpu?required=all", "null"]) as session:
        np.testing.assert_array_equal(answer(session), -np.maximum(X, 0))
        assert session.placement().idle_providers == ["null"]


def test_what_it_declines_is_told_before_any_worker_compiles(tmp_path: Path) -> None:
    record = tmp_path / "record"
    mine = own("Recorded", f"record={record}&required=all")
    with pytest.raises(errors.HeterogeneousPlacementRequiredError) as caught:
        InferenceSession(chain("Relu", "Sqrt", "Neg", "Sqrt", "Sqrt", "Floor"), providers=[mine, "cpu"])
    assert not record.exists()
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.provider, error.nodes) == (own("Recorded"), ["n1", "n3", "n4", "n5"])
    assert [(one["op"], one["reason"], one["count"]) for one in error.groups] == [
        ("Floor", "not claimed", 1), ("Sqrt", "not claimed", 3)
    ]  # fmt: skip
    assert "does not have 4 of 6" in str(error) and "[3: n1, n3, n4]" in str(error)
    with InferenceSession(chain("Relu", "Neg"), providers=[mine, "cpu"]) as session:
        np.testing.assert_array_equal(answer(session), -np.maximum(X, 0))
    assert record.read_text().split() == ["n0", "n1"]


def test_nodes_that_nobody_claims_count_too() -> None:
    with pytest.raises(errors.HeterogeneousPlacementRequiredError, match="Relu declined by cpu"):
        InferenceSession(model([node("Relu", "x", "y", domain="of.nobody")], [tensor("x", [4])], [tensor("y", [4])],
                               opset_imports=[_opset("", 21), _opset("of.nobody", 1)]),
                         providers=["cpu?required=all"])  # fmt: skip


def _opset(domain: str, version: int) -> object:
    from onnx import helper

    return helper.make_opsetid(domain, version)


def test_what_another_one_has_by_its_place_or_a_pin_is_told() -> None:
    with pytest.raises(errors.HeterogeneousPlacementRequiredError, match="own_providers.py:MyProvider has it"):
        InferenceSession(chain("Relu"), providers=[own("MyProvider"), "cpu?required=all"])
    with pytest.raises(errors.HeterogeneousPlacementRequiredError, match="cpu:1 has it"):
        options = SessionOptions(pins={"n1": "cpu:1"})
        InferenceSession(chain("Relu", "Neg"), options, providers=["cpu?required=all", "cpu:1"])


def test_constants_that_readers_fold_do_not_count() -> None:
    graph = model(
        [node("Neg", "c", "d", "made"), node("Add", "x d", "y", "add")], [tensor("x", [1, 4])], [tensor("y", [1, 4])],
        {"c": X},
    )  # fmt: skip
    with InferenceSession(graph, providers=["cpu?required=all"]) as session:
        np.testing.assert_array_equal(answer(session), np.zeros_like(X))


def test_no_strategy_moves_what_must_stay() -> None:
    for strategy in ("cost", "pipeline"):
        options = SessionOptions(strategy=strategy)
        with InferenceSession(chain("Relu", "Neg"), options, ["cpu:1?required=all", "cpu"]) as session:
            assert {one.provider for one in session.placement().nodes} == {"cpu:1"}
    options = SessionOptions(strategy="replicate")
    with InferenceSession(chain("Relu", "Neg"), options, ["cpu?required=all", "cpu:1?required=all"]) as session:
        assert session.placement().replicas == 2


def test_it_is_not_left_when_it_cannot_compile() -> None:
    chaos = "chaos?fault=refuse_compile&at=null&required=all"
    with pytest.raises(errors.ClaimBrokenError):
        InferenceSession(chain("Relu"), providers=[chaos, "cpu"])
    chaos = "chaos?fault=refuse_compile&phase=run&required=all"  # for a new shape
    with InferenceSession(chain("Relu"), providers=[chaos, "cpu"]) as session:
        with pytest.raises(errors.ClaimBrokenError):
            answer(session)
        np.testing.assert_array_equal(answer(session, X[:, :2].repeat(2, 1)), np.maximum(X[:, :2].repeat(2, 1), 0))
        assert {one.provider for one in session.placement().nodes} == {"chaos"}


def test_it_is_not_left_when_it_dies() -> None:
    chaos = 'chaos?fault=sigkill&at=null&claims=["Neg","Relu"]'
    with InferenceSession(chain("Relu", "Neg"), providers=[f"{chaos}&required=all", "cpu"]) as session:
        with pytest.raises(errors.WorkerDiedError) as caught:
            answer(session)
        assert caught.value.provider == "chaos" and len(caught.value.attempts) == 1
        with pytest.raises(errors.ProviderUnavailableError, match="restart"):
            answer(session)


def test_it_is_replayed_as_any_other() -> None:
    chaos = "chaos?fault=sigkill&incarnations=[1]&required=all"
    with InferenceSession(chain("Relu"), providers=[chaos, "cpu"]) as session:
        np.testing.assert_array_equal(answer(session), np.maximum(X, 0))
        assert session.health()["chaos"]["deaths"] == 1


def test_it_is_not_left_when_it_dies_over_its_claims() -> None:
    chaos = "chaos?fault=sigkill&phase=claim&at=1&required=all"
    with pytest.raises(errors.WorkerDiedError):
        InferenceSession(chain("Relu"), providers=[chaos, "cpu"])


# Pure -----------------------------------------------------------------------------------------------------------------


@pytest.mark.fast
def test_only_one_can_have_every_node() -> None:
    both = [ProviderSpec("cpu", required="all"), ProviderSpec("cpu:1", required="all")]
    with pytest.raises(errors.InvalidOptionError, match="one provider of cpu, cpu:1"):
        check_required(both, SessionOptions())
    check_required(both, SessionOptions(strategy="replicate"))
    check_required([*both[:1], ProviderSpec("null")], SessionOptions())


@pytest.mark.fast
def test_workers_of_another_environment_are_no_replicas_of_each_other() -> None:
    specs = [ProviderSpec("cpu"), ProviderSpec("cpu:1", python="venv"), ProviderSpec("cpu:2")]
    assert teams(specs) == [[0, 2], [1]]


@pytest.mark.fast
def test_the_text_is_the_same_in_whatever_order() -> None:
    refusals = [Refusal(f"n{i}", "Relu" if i % 2 else "Neg", "", "p", "too big") for i in range(7)]
    texts = {str(not_all("p", some, 9)) for some in (refusals, refusals[::-1])}
    assert len(texts) == 1 and "[4: n0, n2, n4, ...]" in texts.pop()


@pytest.mark.fast
def test_the_way_out_stands_before_the_story() -> None:
    error = errors.ProviderUnavailableError("p is not there: no device\nTraceback: x", provider="p", reason="no device")
    told = not_started(error, others=True)
    first, story = str(told).split("\n")
    assert first.startswith("p is not there: no device. ") and "required=False" in first and story == "Traceback: x"
    assert told.reason == "no device" and not_started(error, others=False) is error
    assert "a: x" in str(nobody({"a": "x", "b": "y"})) and "b: y" in str(nobody({"a": "x", "b": "y"}))
