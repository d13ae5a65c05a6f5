"""The session as its callers see it: signatures, what is refused before any process starts, who is asked twice."""

from __future__ import annotations

import inspect
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from onnx import helper

import outrider
from outrider.providers.wire import messages
from outrider.scheduler import Fleet, InferenceSession, ProviderSpec, RunOptions, SessionOptions, errors
from outrider.scheduler.monitor import Monitor
from tests.builders import chain, model, node, tensor

pytestmark = pytest.mark.fast

OWN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "own_providers.py")
X = np.array([[-2, -1, 0.5, 3]], np.float32)

# As the design fixes them; '=' stands for a default.
SIGNATURES = {
    InferenceSession: "model sess_options=None providers=None provider_options=None * options=None",
    InferenceSession.run: "self output_names input_feed run_options=None",
    InferenceSession.run_async: "self output_names input_feed callback=None user_data=None run_options=None",
    InferenceSession.get_inputs: "self",
    InferenceSession.get_outputs: "self",
    InferenceSession.get_modelmeta: "self",
    InferenceSession.get_providers: "self",
    InferenceSession.io_binding: "self",
    InferenceSession.run_with_iobinding: "self binding run_options=None",
    InferenceSession.empty: "self name shape",
    InferenceSession.warmup: "self shapes",
    InferenceSession.placement: "self",
    InferenceSession.health: "self",
    InferenceSession.stats: "self",
    InferenceSession.start_trace: "self",
    InferenceSession.stop_trace: "self path",
    InferenceSession.restart: "self provider",
    InferenceSession.close: "self",
    Fleet: "providers",
}


def told(signature: inspect.Signature) -> str:
    words: list[str] = []
    for one in signature.parameters.values():
        if one.kind is one.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        words.append(one.name if one.default is one.empty else f"{one.name}={one.default!r}")
    return " ".join(words)


@pytest.mark.parametrize("what", SIGNATURES, ids=lambda what: what.__qualname__)
def test_signatures_are_those_of_the_design(what: Any) -> None:
    assert told(inspect.signature(what)) == SIGNATURES[what]


def held() -> Any:
    """y = If(c){Neg(x)}else{Abs(x)}; the nodes of the bodies are `pick/then/neg` and `pick/else/#0`."""
    bodies = [helper.make_graph([node("Neg", "x", "t", "neg")], "then", [], [tensor("t", None)]),
              helper.make_graph([node("Abs", "x", "e")], "else", [], [tensor("e", None)])]  # fmt: skip
    pick = node("If", "c", "y", "pick", then_branch=bodies[0], else_branch=bodies[1])
    return model([pick], [tensor("x", ["N", 4]), tensor("c", [], 9)], [tensor("y", None)])


RELU = chain("Relu")
REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception]]] = {
    "no provider": (RELU, {"providers": []}, errors.InvalidOptionError),
    "no list": (RELU, {"providers": "cpu"}, errors.InvalidOptionError),
    "one twice": (RELU, {"providers": ["cpu", "cpu:0"]}, errors.InvalidOptionError),
    "nobody's name": (RELU, {"providers": ["cpu", "cpuu"]}, errors.UnknownProviderError),
    "not built": (RELU, {"providers": ["cpu", "cuda:0"]}, errors.UnsupportedOptionError),
    "a device not built": (RELU, {"providers": ["sim:0"]}, errors.UnsupportedOptionError),
    "no such file": (RELU, {"providers": ["cpu", "no_such.py:Class"]}, errors.InvalidOptionError),
    "too many dicts": (RELU, {"provider_options": [{}, {}]}, errors.InvalidOptionError),
    "both options": (
        RELU, {"sess_options": SessionOptions(), "options": SessionOptions()}, errors.InvalidOptionError,
    ),
    "no options": (RELU, {"options": 7}, errors.InvalidOptionError),
    "no model": (b"nonsense", {}, errors.ModelLoadError),
    "no such model": ("no_such.onnx", {}, errors.ModelNotFoundError),
    "a pin to nobody": (RELU, {"options": SessionOptions(pins={"n0": "cpu:1"})}, errors.UnknownProviderError),
    "a pin of nothing": (RELU, {"options": SessionOptions(pins={"n1*": "cpu"})}, errors.PinNotFoundError),
    "a pin in a body": (
        held(), {"options": SessionOptions(pins={"pick/then/neg": "cpu"})}, errors.UnsupportedOptionError,
    ),
    "a pattern in a body": (
        held(), {"options": SessionOptions(pins={"pick/else/*": "cpu"})}, errors.UnsupportedOptionError,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused_before_any_process_starts(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    start = Monitor.start_worker
    monkeypatch.setattr(Monitor, "start_worker", lambda self, worker: (started.append(worker), start(self, worker)))
    made, arguments, error = REFUSED[what]
    with pytest.raises(error) as caught:
        InferenceSession(made, **arguments)
    assert type(caught.value) is error
    assert started == []
    if what == "no provider":  # a start would have been seen
        InferenceSession(RELU).close()
        assert len(started) == 1


def test_a_pin_on_the_node_that_holds_a_body_takes_the_body_along() -> None:
    options = SessionOptions(pins={"pi*": "cpu:1"})
    with InferenceSession(held(), providers=["cpu", "cpu:1"], options=options) as session:
        np.testing.assert_array_equal(session.run(None, {"x": X, "c": np.array(True)})[0], -X)
        assert {one["provider"] for one in session.placement().to_dict()["nodes"]} == {"cpu:1"}


@pytest.mark.parametrize(("key", "wrong"), [("n1", "n1"), ("*2", "n2")])
def test_a_declined_pin_names_the_pin_that_asked(key: str, wrong: str) -> None:
    mine = f"{OWN}:MyProvider"
    options = SessionOptions(pins={"n0": mine, key: mine})
    with pytest.raises(errors.PinDeclinedError, match="not claimed") as caught:
        InferenceSession(chain("Relu", "Neg", "Neg"), providers=[mine, "cpu"], options=options)
    assert caught.value.fields() == {"pin": key, "node": wrong, "provider": mine, "reason": "not claimed"}


def called() -> Any:
    """y = own::f(x), in a node `call`; f is Relu `r`, then Neg `n`."""
    inside = [node("Relu", "a", "b", "r"), node("Neg", "b", "c", "n")]
    function = helper.make_function("own", "f", ["a"], ["c"], inside, [helper.make_opsetid("", 21)])
    call = helper.make_node("f", ["x"], ["y"], domain="own", name="call")
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
    return model([call], [tensor("x", ["N", 4])], [tensor("y", None)], functions=[function], opset_imports=imports)


@pytest.mark.parametrize(
    ("pin", "placed"),
    [("call", ["cpu:1", "cpu:1"]), ("call/*", ["cpu:1", "cpu:1"]), ("call/n", ["cpu", "cpu:1"])],
)
def test_pins_of_calls_and_of_what_was_inlined(pin: str, placed: list[str]) -> None:
    options = SessionOptions(pins={pin: "cpu:1"})
    with InferenceSession(called(), providers=["cpu", "cpu:1"], options=options) as session:
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], -np.maximum(X, 0))
        nodes = session.placement().to_dict()["nodes"]
    assert [(one["name"], one["provider"]) for one in nodes] == list(zip(["call/r", "call/n"], placed, strict=True))


def test_a_declined_pin_of_a_call_is_named_as_it_was_given() -> None:
    mine = f"{OWN}:MyProvider"
    with pytest.raises(errors.PinDeclinedError, match="call/n") as caught:
        InferenceSession(called(), providers=["cpu", mine], options=SessionOptions(pins={"call": mine}))
    assert (caught.value.pin, caught.value.node) == ("call", "call/n")
    with pytest.raises(errors.PinNotFoundError):
        InferenceSession(called(), options=SessionOptions(pins={"call/m": "cpu"}))


def test_pins_on_constants_are_told_and_do_nothing() -> None:
    nodes = [node("Neg", "w", "m", "constant"), node("Add", "x m", "y", "add")]
    made = model(nodes, [tensor("x", ["N", 4])], [tensor("y", None)], {"w": np.ones(4, np.float32)})
    options = SessionOptions(pins={"constant": "cpu:1"})
    with InferenceSession(made, providers=["cpu", "cpu:1"], options=options) as session:
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], X - 1)
        report = session.placement()
    assert report.idle_providers == ["cpu:1"]
    assert any("'constant' has no effect" in note for note in report.notes)


def test_what_is_left_is_offered_again_to_those_that_claim_all_or_nothing() -> None:
    """`Whole` claims no node of a graph that holds one it lacks; in the second round it sees the rest alone."""
    providers = [f"{OWN}:Whole", f"{OWN}:MyProvider"]
    with InferenceSession(chain("Neg", "Relu", "Neg"), providers=providers) as session:
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], -np.maximum(-X, 0))
        placed = [one["provider"] for one in session.placement().to_dict()["nodes"]]
        assert placed == [providers[0], providers[1], providers[0]]
        assert session.placement().to_dict()["declines"] == [
            {"domain": "ai.onnx", "op": "Neg", "provider": providers[1], "reason": "not claimed", "count": 2,
             "examples": ["n0", "n2"]},
            {"domain": "ai.onnx", "op": "Relu", "provider": providers[0], "reason": "a graph with Relu", "count": 1,
             "examples": ["n1"]},
        ]  # fmt: skip


def test_transfers_tell_what_crosses_and_how_much() -> None:
    made = chain("Relu", "Neg", "Abs", shape=(2, 4))
    options = SessionOptions(pins={"n1": "cpu:1", "n2": "cpu:1"})
    with InferenceSession(made, providers=["cpu", "cpu:1"], options=options) as session:
        report = session.placement().to_dict()
    assert report["transfers"] == [
        {"value": "x", "from": "caller", "to": "cpu", "bytes": 32},
        {"value": "v1", "from": "cpu", "to": "cpu:1", "bytes": 32},
        {"value": "y", "from": "cpu:1", "to": "caller", "bytes": 32},
    ]
    assert [(one["provider"], one["nodes"]) for one in report["partitions"]] == [
        ("cpu", ["n0"]), ("cpu:1", ["n1", "n2"]),
    ]  # fmt: skip
    assert {one["name"]: one["nodes"] for one in report["providers"]} == {"cpu": 1, "cpu:1": 2}


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet([ProviderSpec("cpu", name="first", threads=1), "cpu:1", "null"]) as made:
        yield made


def test_a_session_selects_and_orders_the_workers_of_a_fleet(fleet: Fleet) -> None:
    same = ProviderSpec("cpu", name="first", threads=1)
    for providers, names in (
        (None, ["first", "cpu:1", "null"]),
        (["cpu:1", "first"], ["cpu:1", "first"]),
        ([same], ["first"]),
        ([ProviderSpec("cpu", name="first")], ["first"]),
    ):
        with InferenceSession(RELU, providers=providers, options=SessionOptions(fleet=fleet)) as session:
            assert session.get_providers() == names
            np.testing.assert_array_equal(session.run(None, {"x": X})[0], np.maximum(X, 0))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"providers": [ProviderSpec("cpu", name="first", threads=2)]}, errors.InvalidOptionError),
        ({"providers": [ProviderSpec("null", name="first")]}, errors.InvalidOptionError),
        ({"providers": [("cpu:1", {"fast": True})]}, errors.InvalidOptionError),
        ({"provider_options": [{}, {}, {}]}, errors.InvalidOptionError),
        ({"providers": ["first", "first"]}, errors.InvalidOptionError),
        ({"providers": ["cpu"]}, errors.ProviderUnavailableError),
    ],
)
def test_settings_that_a_started_worker_cannot_take_are_not_ignored(
    fleet: Fleet, arguments: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        InferenceSession(RELU, options=SessionOptions(fleet=fleet), **arguments)


def test_a_deadline_for_what_has_started_is_refused(fleet: Fleet) -> None:
    with pytest.raises(errors.InvalidOptionError, match="start_deadline"):
        SessionOptions(fleet=fleet, start_deadline=5)
    assert SessionOptions(fleet=fleet, start_deadline=30).start_deadline == 30


# What a run sends ----------------------------------------------------------------------------------------------------
PAIR = model([node("Add", "x z", "y")], [tensor("x", ["N", 3]), tensor("z", ["N", 3])], [tensor("y", None)])
F = np.ones((2, 3), np.float32)
BAD: dict[str, tuple[Any, Any, Any, type[Exception]]] = {
    "run options": (None, {"x": F, "z": F}, 7, errors.InvalidOptionError),
    "output names": ("y", {"x": F, "z": F}, None, errors.InvalidOptionError),
    "unknown output": (["q"], {"x": F, "z": F}, None, errors.OutputNotFoundError),
    "no mapping": (None, [F, F], None, errors.InputTypeError),
    "unknown": (None, {"x": F, "z": F, "q": F}, None, errors.InputNotFoundError),
    "missing": (None, {"x": F}, None, errors.InputNotFoundError),
    "kind": (None, {"x": F, "z": object()}, None, errors.InputTypeError),
    "dtype": (None, {"x": F, "z": F.astype(np.float64)}, None, errors.DtypeMismatchError),
    "rank": (None, {"x": F, "z": F[0]}, None, errors.RankMismatchError),
    "dimension": (None, {"x": F, "z": F[:, :2]}, None, errors.ShapeMismatchError),
    "symbol": (None, {"x": F, "z": F[:1]}, None, errors.SymbolConflictError),
}


def test_nothing_is_sent_for_a_bad_feed_and_no_message_for_a_good_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rung: list[int] = []
    sent: list[object] = []
    ring, pack = os.eventfd_write, messages.pack
    monkeypatch.setattr(os, "eventfd_write", lambda fd, value: (rung.append(fd), ring(fd, value))[1])
    monkeypatch.setattr(messages, "pack", lambda message: (sent.append(message), pack(message))[1])
    with InferenceSession(PAIR) as session:
        assert sent, "what is sent is seen here"
        for round_ in range(3):  # the first runs of a signature, and its steady state
            rung.clear()
            sent.clear()
            words = bytes(session._runner.replicas[0].generation.board.words[:512])
            for outputs, feed, options, error in BAD.values():
                with pytest.raises(error) as caught:
                    session.run(outputs, feed, options)
                assert type(caught.value) is error
            assert (rung, sent) == ([], []), round_
            assert bytes(session._runner.replicas[0].generation.board.words[:512]) == words
            np.testing.assert_array_equal(session.run(None, {"x": F, "z": F})[0], 2)
            assert rung and not sent, "runs are signalled by words and doorbells"


def test_other_systems_are_told_in_one_sentence() -> None:
    with open(outrider.__file__) as file:
        source = file.read()
    elsewhere = types.SimpleNamespace(platform="darwin")
    real = sys.modules["sys"]
    sys.modules["sys"] = elsewhere  # type: ignore[assignment]
    try:
        with pytest.raises(ImportError, match=r"^Outrider runs on Linux only \(.*\); this is 'darwin'\.$"):
            exec(compile(source, outrider.__file__, "exec"), {"__name__": "outrider", "__file__": outrider.__file__})
    finally:
        sys.modules["sys"] = real


def test_run_options_are_those_of_the_library() -> None:
    with InferenceSession(RELU) as session:
        np.testing.assert_array_equal(session.run(None, {"x": X}, RunOptions())[0], np.maximum(X, 0))
