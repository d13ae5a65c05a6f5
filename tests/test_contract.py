"""The optional parts of the contract, with real workers: what is promised arrives, what is malformed is refused."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from outrider.providers.contract import Capabilities, Graph, Node, Value
from outrider.providers.traits import lacking
from outrider.providers.wire import lasting
from outrider.scheduler import Fleet, InferenceSession, ProviderSpec, SessionOptions, errors
from tests.builders import chain, model, node, tensor

FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "kit_providers.py")
F32 = np.float32
X = np.array([[-2, -1, 0.5, 3], [1, -4, 0, -0.0], [5, 6, -7, 8]], F32)


def kit(name: str) -> str:
    return f"{FILE}:{name}"


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


def told(session: InferenceSession, name: str) -> dict[str, Any]:
    found: dict[str, Any] = session.stats()["providers"][kit(name)]
    return found


# out= ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["IntoPlaces", "IntoPlacesPerShape"])
@pytest.mark.parametrize("silent", [True, False])
def test_outputs_written_to_their_places_are_not_copied(name: str, silent: bool) -> None:
    with InferenceSession(chain("Relu", "Neg", "Abs"), providers=[(kit(name), {"silent": silent})]) as session:
        for count in (3, 3, 2, 3, 70000, 70000, 70000, 3):  # the third size goes to the output pool
            x = np.resize(X, (count, 4))
            np.testing.assert_array_equal(session.run(None, {"x": x})[0], relu(x))
        stats = told(session, name)
    assert (stats["copies"], stats["copied_bytes"]) == (0, 0)
    assert len(stats["seen"]) == 8 * 3 * 2
    assert stats["seen"][:2] == [[True, True, False], [True, True, True]]  # an input, and a place


def test_what_is_returned_in_place_of_out_is_copied() -> None:
    with InferenceSession(chain("Relu", "Neg"), providers=[(kit("IntoPlaces"), {"returns": 2})]) as session:
        for rows in (3, 3, 2, 2, 3, 3):
            np.testing.assert_array_equal(session.run(None, {"x": X[:rows]})[0], -relu(X[:rows]))
        assert told(session, "IntoPlaces")["copies"] == 2 * 2  # runs with three rows are repeated as they were


def test_it_may_be_returned_after_runs_that_were_repeated() -> None:
    with InferenceSession(chain("Abs", "Abs"), providers=[kit("ByFirst")]) as session:
        for sign in (1, 1, 1, -1, -1, 1):
            np.testing.assert_array_equal(session.run(None, {"x": sign * np.abs(X)})[0], np.abs(X))
        stats = told(session, "ByFirst")
    assert stats["copies"] == 3  # the first unit since the fourth run; the second one never saw a negative element


def test_a_wrongly_declared_shape_gives_a_place_that_may_be_left_alone() -> None:
    made = chain("Relu", "Neg")
    made.graph.value_info.append(tensor("v1", [2, 4]))
    with InferenceSession(made, providers=[kit("IntoPlaces")]) as session:
        for _ in range(3):
            np.testing.assert_array_equal(session.run(None, {"x": X})[0], -relu(X))
        assert told(session, "IntoPlaces")["copies"] == 3 * 2  # of v1, and of y, whose N is not told by what arrives


def test_an_unknown_shape_has_no_place() -> None:
    made = model([node("Relu", "x", "y")], [tensor("x", [None, 4])], [tensor("y", [None, 4])])
    same = model([node("Relu", "x", "y")], [tensor("x", ["N", "N"])], [tensor("y", ["N", "N"])])
    with InferenceSession(made, providers=[kit("IntoPlaces")]) as session:
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], relu(X))
        assert told(session, "IntoPlaces")["copies"] == 1
    with InferenceSession(same, providers=[kit("IntoPlaces")]) as session:
        np.testing.assert_array_equal(session.run(None, {"x": X[:2, :2]})[0], relu(X[:2, :2]))
        assert told(session, "IntoPlaces")["copies"] == 0


def test_a_wrong_count_of_outputs_is_told_with_places_too() -> None:
    with InferenceSession(chain("Relu"), providers=[kit("WrongCount")]) as session:
        for _ in range(2):
            with pytest.raises(errors.ProviderContractError, match="1 outputs .* it returned 2"):
                session.run(None, {"x": X})


def test_what_nobody_reads_is_not_asked_for() -> None:
    nodes = [node("Relu", "x", "y"), node("Neg", "x", "idle"), node("Abs", "idle", "more")]
    made = model(nodes, [tensor("x", ["N", 4])], [tensor("y", ["N", 4])])
    for name in ("IntoPlaces", "Strided", "Overwriting", "Device"):
        with InferenceSession(made, providers=[kit(name)]) as session:
            np.testing.assert_array_equal(session.run(None, {"x": X})[0], relu(X))


def test_chaos_around_such_a_provider_is_such_a_provider() -> None:
    around = ("chaos", {"provider": kit("ByFirst"), "fault": "wrong_dtype", "at": 9, "node": "n0"})
    with InferenceSession(chain("Abs", "Abs"), providers=[around]) as session:
        for sign in (1, 1, -1, -1):
            np.testing.assert_array_equal(session.run(None, {"x": sign * np.abs(X)})[0], np.abs(X))


# capabilities -------------------------------------------------------------------------------------------------------
def many_kinds() -> onnx.ModelProto:
    """A node of each kind that capabilities tell apart; n0 is none of them."""
    floats = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    maybe = helper.make_optional_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, [3, 4]))
    body = helper.make_graph([node("Neg", "fixed", "b", "inner")], "body", [], [tensor("b", [3, 4])])
    words = helper.make_graph([node("StringConcat", "w w", "ww"), node("Identity", "fixed", "c")], "body", [],
                              [tensor("c", [3, 4])])  # fmt: skip
    nodes = [
        node("Relu", "fixed", "y0", "plain"), node("Cast", "fixed", "y1", "double", to=TensorProto.DOUBLE),
        node("SequenceConstruct", "fixed fixed", "y2", "sequence"), node("Optional", "fixed", "y3", "optional"),
        node("If", "flag", "y4", "body", then_branch=body, else_branch=words),
        node("Relu", "dynamic", "y5", "dynamic"), node("Relu", "unknown", "y6", "unranked"),
    ]  # fmt: skip
    inputs = [
        tensor("fixed", [3, 4]), tensor("dynamic", ["N", 4]), tensor("unknown", None),
        tensor("flag", [], TensorProto.BOOL), tensor("w", [1], TensorProto.STRING),
    ]  # fmt: skip
    outputs = [
        tensor("y0", [3, 4]), tensor("y1", [3, 4], TensorProto.DOUBLE), helper.make_value_info("y2", floats),
        helper.make_value_info("y3", maybe), tensor("y4", [3, 4]), tensor("y5", ["N", 4]), tensor("y6", None),
    ]  # fmt: skip
    return model(nodes, inputs, outputs)


KINDS: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({}, {}),
    ({"dtypes": ["float32", "bool"]}, {"double": "does not accept float64", "body": "does not accept string"}),
    ({"sequences": False}, {"sequence": r"no sequences, and 'y2' is sequence\(float32\)"}),
    ({"optionals": False}, {"optional": r"no optionals, and 'y3' is optional\(float32\)"}),
    ({"bodies": False}, {"body": "no node with a body"}),
    ({"shapes": "ranked"}, {"unranked": "not even the rank"}),
    ({"shapes": "static"}, {"unranked": "not even the rank", "dynamic": r"'dynamic' is \[N, 4\]"}),
]


def test_a_node_outside_of_the_capabilities_is_declined_with_the_reason() -> None:
    made = many_kinds()
    names = [f"{kit('Limited')}:{i}" for i in range(len(KINDS))]
    specs = [ProviderSpec(name, options=options) for name, (options, _) in zip(names, KINDS, strict=True)]
    with Fleet([*specs, "cpu"]) as fleet:
        for name, (_, reasons) in zip([kit("Limited"), *names[1:]], KINDS, strict=True):
            with InferenceSession(made, providers=[name, "cpu"], options=SessionOptions(fleet=fleet)) as session:
                report = session.placement().to_dict()
            others = {one["name"] for one in report["nodes"] if one["provider"] == "cpu"}
            declined = {one["examples"][0]: one["reason"] for one in report["declines"] if one["provider"] == name}
            assert others == set(reasons) == set(declined), name
            for which, reason in reasons.items():
                assert re.search(reason, declined[which]), declined[which]


def test_maps_are_told_apart_too() -> None:
    made = Node(0, "n", "Whatever", "", 1, {}, (Value("m", "map(int64,float32)"),), (Value("y", "float32", (1,)),))
    assert lacking(made, Capabilities()) == ""
    assert lacking(made, Capabilities(maps=False)) == "it takes no maps, and 'm' is map(int64,float32)"
    assert lacking(made, Capabilities(dtypes={"float32"})) == "it does not accept int64"
    inside = Node(1, "o", "Loop", "", 21, {"body": Graph("b", (made,), (), (), {})}, (), ())
    assert lacking(inside, Capabilities(maps=False)) == "it takes no maps, and 'm' is map(int64,float32) (in n)"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"writes_out": 1}, "writes_out must be True or False; it gave 1"),
        ({"strided": "yes"}, "strided must be True or False"),
        ({"writable": None}, "writable must be True or False"),
        ({"capabilities": ["float32"]}, "capabilities must be a Capabilities"),
        ({"accepts": ["float32"]}, "capabilities = Capabilities"),
        ({"capabilities": {"maps": 0}}, "capabilities.maps must be True or False"),
        ({"capabilities": {"shapes": "fixed"}}, "capabilities.shapes must be one of 'any', 'ranked', 'static'"),
        ({"capabilities": {"dtypes": "float32"}}, "capabilities.dtypes must be None or a set of names"),
        ({"capabilities": {"dtypes": ["float33"]}}, "it gave float33"),
    ],
)
def test_what_is_malformed_refuses_to_start(options: dict[str, Any], words: str) -> None:
    with pytest.raises(errors.ProviderUnavailableError, match=words):
        InferenceSession(chain("Relu"), providers=[(kit("Malformed"), options)])


# What arrives -------------------------------------------------------------------------------------------------------
def test_inputs_constants_and_values_between_units_are_contiguous_aligned_and_read_only() -> None:
    nodes = [
        node("Transpose", "x", "t"), node("Add", "t w", "s"), node("Transpose", "s", "u"), node("Mul", "u k", "v"),
        node("Exp", "v", "e"), node("Neg", "e", "y"),
    ]  # fmt: skip
    made = model(nodes, [tensor("x", ["N", "M"])], [tensor("y", ["N", "M"])], {"w": X[:, :1].copy(), "k": F32(2)})
    claims = ["Transpose", "Add", "Mul", "Neg"]
    with InferenceSession(made, providers=[(kit("Small"), {"claims": claims}), "cpu"]) as session:
        for x in (X[:, :3], X.T[::-1, :3], np.zeros((0, 3), F32)):
            expected = -np.exp((x.T + X[:, :1]).T * 2)
            np.testing.assert_allclose(session.run(None, {"x": x})[0], expected, rtol=1e-6)
        seen = told(session, "Small")["seen"]
    assert len(seen) == 3 * 7 and {tuple(one) for one in seen} == {(True, True, False)}


def test_results_are_published_before_what_others_wait_for() -> None:
    """Else a run may have ended, by those, while a result is not there yet: whoever is awake may be quick."""
    nodes = [
        node("Exp", "x", "e"), node("Neg", "e", "before"), node("Relu", "e", "a"), node("Neg", "a", "inner"),
        node("Neg", "inner", "after"), node("Abs", "a", "y"),
    ]  # fmt: skip
    names = ["before", "inner", "after", "y"]
    made = model(nodes, [tensor("x", ["N", 4])], [tensor(name, ["N", 4]) for name in names])
    provider, options = (kit("Lingering"), {"claims": ["Relu", "Neg"]}), SessionOptions(max_in_flight=8)
    with InferenceSession(made, providers=[provider, "cpu"], options=options) as session:
        futures = []
        for _ in range(8):  # each start wakes the cpu provider, here while the other one publishes
            futures.append(session.run_async(names, {"x": X}))
            time.sleep(0.04)
        for future in futures:
            for result, sign in zip(future.result(), (-1, -1, 1, 1), strict=True):
                np.testing.assert_allclose(result, sign * np.exp(X), rtol=1e-6)


# strided ------------------------------------------------------------------------------------------------------------
def wide() -> onnx.ModelProto:
    """Views of an input, of values between units and of a constant; some are read late, one is published."""
    nodes = [
        node("Transpose", "x", "a"), node("Neg", "a", "b"), node("Transpose", "b", "c"), node("Exp", "c", "d"),
        node("Abs", "b", "e"), node("Transpose", "e", "f"), node("Add", "d f", "g"), node("Transpose", "g", "h"),
        node("Add", "h a", "i"), node("Transpose", "i", "y"),
    ]  # fmt: skip
    return model(nodes, [tensor("x", ["N", "M"])], [tensor("y", ["N", "M"]), tensor("e", ["M", "N"])])


@pytest.mark.parametrize("name", ["Strided", "StridedPerShape"])
def test_strided_values_pass_from_unit_to_unit_uncopied(name: str) -> None:
    with InferenceSession(wide(), providers=[kit(name)]) as session:
        for x in (X, X[:2], X, X[:, :0], np.resize(X, (300, 400))):
            y, e = session.run(None, {"x": x})
            np.testing.assert_array_equal(y, np.exp(-x) + np.abs(x) + x)
            np.testing.assert_array_equal(e, np.abs(x.T))
        stats = told(session, name)
    assert stats["copies"] == 5 * 3  # the results, and a view of one
    kinds = {tuple(one) for one in stats["seen"]}
    assert (False, True, False) in kinds and not any(writable for *_, writable in kinds)


def test_values_between_units_do_not_change_under_their_readers() -> None:
    """Against the same graph where every value is copied, with many buffers that would be used again."""
    operators = ["Transpose", "Neg", "Abs", "Exp", "Identity"]
    random = np.random.default_rng(7)
    nodes, made = [], ["x"]
    for i in range(40):
        op = str(random.choice([*operators, "Add", "Add"]))
        inputs = [made[int(random.integers(max(0, len(made) - 6), len(made)))] for _ in range(2 if op == "Add" else 1)]
        nodes.append(node(op, " ".join(inputs), f"v{i}"))
        made.append(f"v{i}")
    proto = model(nodes, [tensor("x", ["N", "N"])], [tensor(name, ["N", "N"]) for name in ("v39", "v20", "v31")])
    x = random.uniform(-0.1, 0.1, (5, 5)).astype(F32)
    with InferenceSession(proto, providers=["cpu"]) as session:
        expected = session.run(None, {"x": x})
    for name in ("Strided", "Device"):
        with InferenceSession(proto, providers=[kit(name)]) as session:
            for _ in range(3):
                for one, right in zip(session.run(None, {"x": x}), expected, strict=True):
                    np.testing.assert_allclose(one, right, rtol=1e-5)


# writable -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "copies"), [("Overwriting", 2), ("OverwritingBound", 1)])
def test_private_inputs_may_be_overwritten(name: str, copies: int) -> None:
    nodes = [node("Neg", "x", "a"), node("Abs", "x", "b"), node("Exp", "a", "c"), node("Neg", "a", "d")]
    made = model(nodes, [tensor("x", ["N", 4])], [tensor(one, ["N", 4]) for one in "abcd"])
    with InferenceSession(made, providers=[kit(name)]) as session:
        for rows in (3, 3, 2, 3, 3):
            x = X[:rows].copy()
            results = session.run(None, {"x": x})
            np.testing.assert_array_equal(x, X[:rows])
            for result, expected in zip(results, (-x, np.abs(x), np.exp(-x), x), strict=True):
                np.testing.assert_allclose(result, expected, rtol=1e-6)
        stats = told(session, name)
    assert stats["copies"] == 5 * 4 * copies  # of each unit's input, and of its result if that has no place
    assert all(one == [True, True, True] for one in stats["seen"])


def test_private_sequences_are_private_as_deep_as_they_go() -> None:
    floats = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    values = [helper.make_value_info(name, floats) for name in ("s", "y", "z")]
    made = model([node("Identity", "s", "y"), node("Identity", "s", "z")], values[:1], values[1:])
    given = [np.array([1, 2], F32), np.array([3], F32)]
    with InferenceSession(made, providers=[kit("Overwriting")]) as session:
        for result in session.run(None, {"s": given}):
            assert [one.tolist() for one in result] == [[4], [1, 2]]
    assert [one.tolist() for one in given] == [[1, 2], [3]]


# Values of the provider's own ---------------------------------------------------------------------------------------
def crossing() -> onnx.ModelProto:
    """Relu and Neg for the device, Exp for somebody else, and what both made for the device again."""
    nodes = [
        node("Relu", "x", "a"), node("Neg", "a", "b"), node("Exp", "b", "c"), node("Add", "c b", "d"),
        node("Neg", "d", "e"), node("Sub", "e a", "y"),
    ]  # fmt: skip
    return model(nodes, [tensor("x", ["N", 4])], [tensor("y", ["N", 4]), tensor("b", ["N", 4])])


@pytest.mark.parametrize("name", ["Device", "DevicePerShape"])
def test_values_of_a_device_stay_there_and_are_exported_where_others_read_them(name: str) -> None:
    claims = ["Relu", "Neg", "Add", "Sub"]
    with InferenceSession(crossing(), providers=[(kit(name), {"claims": claims}), "cpu"]) as session:
        assert len(session.placement().partitions) == 3
        for x in (X, X[:2], X, np.resize(X, (20000, 4)), X):
            y, b = session.run(None, {"x": x})
            np.testing.assert_allclose(y, -(np.exp(-relu(x)) - relu(x)) - relu(x), rtol=1e-6)
            np.testing.assert_array_equal(b, -relu(x))
        stats = told(session, name)
    assert stats["uploads"] == 5 * 2  # x, and what the other provider made
    assert stats["exported"] == stats["exports"] == 5 * 3  # a and b, which a later partition reads, and y
    assert stats["copies"] == 0 and stats["exported_bytes"] == 3 * 16 * (3 + 2 + 3 + 20000 + 3)


def test_what_a_later_partition_reads_is_there_after_a_crash() -> None:
    claims = ["Relu", "Neg", "Add", "Sub"]
    with InferenceSession(crossing(), providers=[(kit("Device"), {"claims": claims}), "cpu"]) as session:
        (before, _) = session.run(None, {"x": X})
        session.restart(kit("Device"))
        (after, _) = session.run(None, {"x": X})
    np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("no shape", errors.ProviderContractError, "a DeviceArray without dtype and shape"),
        ("dtype", errors.ProviderContractError, "dtype float32 for 'v1', it returned float64"),
        ("raises", errors.KernelError, "the device is gone"),
    ],
)
def test_what_goes_wrong_with_such_values_is_typed(how: str, error: type[Exception], words: str) -> None:
    with InferenceSession(chain("Relu", "Neg"), providers=[(kit("Device"), {"how": how})]) as session:
        for _ in range(2):
            with pytest.raises(error, match=words):
                session.run(None, {"x": X})


# One thread ---------------------------------------------------------------------------------------------------------
def test_everything_is_called_from_one_thread() -> None:
    with Fleet([kit("OneThread")]) as fleet:
        for _ in range(2):
            with InferenceSession(chain("Relu", "Neg"), options=SessionOptions(fleet=fleet)) as session:
                futures = [session.run_async(None, {"x": X[: 1 + i % 3]}) for i in range(20)]
                stats = [told(session, "OneThread") for _ in range(3)]
                for i, future in enumerate(futures):
                    np.testing.assert_array_equal(future.result()[0], -relu(X[: 1 + i % 3]))
                stats.append(told(session, "OneThread"))
    assert [one["threads"] for one in stats] == [1] * 4
    assert stats[-1]["calls"] == ["claim", "compile", "run", "setup", "stats", "unload"]


# rewrite ------------------------------------------------------------------------------------------------------------
def to_be_rewritten() -> onnx.ModelProto:
    nodes = [node("Neg", "x", "a", "neg"), node("Abs", "a", "b", "abs"), node("Add", "b w", "y", "add")]
    return model(nodes, [tensor("x", ["N", 4])], [tensor("y", ["N", 4])], {"w": X[0]})


@pytest.mark.parametrize("level", ["none", "basic", "all"])
def test_a_provider_rewrites_its_units_before_they_are_compiled(level: str) -> None:
    options = SessionOptions(optimization=level)
    with InferenceSession(to_be_rewritten(), providers=[kit("Rewriting")], options=options) as session:
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], np.abs(X) + X[0])
        assert [one.name for one in session.placement().nodes] == ["neg", "abs", "add"]
        stats = told(session, "Rewriting")
    if level == "none":
        assert stats["compiled"] == ["Neg", "Abs", "Add"] and "nodes_rewritten" not in stats
    else:
        assert stats["compiled"] == ["Abs", "Sub"]
        assert (stats["nodes_before"], stats["nodes_rewritten"]) == (3, 2)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", "ArithmeticError: no idea"),
        ("no unit", r"rewrite\(\) returned a list, no Unit"),
        ("outputs", "other outputs than the unit has"),
        ("lost", "a node 'abs' that reads 'a', which nothing before it makes"),
        ("twice", "a node 'neg' that makes 'a', which is there already"),
        ("unmade", "no node that makes 'y'"),
    ],
)
def test_a_rewrite_that_stands_for_something_else_is_refused(how: str, words: str) -> None:
    with InferenceSession(to_be_rewritten(), providers=[(kit("Rewriting"), {"how": how}), "cpu"]) as session:
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], np.abs(X) + X[0])
        report = session.placement()
    assert {one.provider for one in report.nodes} == {"cpu"}
    assert any(re.search(words, note) for note in report.notes), report.notes


@pytest.mark.parametrize(
    ("name", "words"),
    [("RewritesModels", "do not go together"), ("OnlySaves", r"save\(\) and load\(\) are defined together")],
)
def test_methods_that_do_not_go_together_refuse_to_start(name: str, words: str) -> None:
    with pytest.raises(errors.ProviderUnavailableError, match=words):
        InferenceSession(chain("Relu"), providers=[kit(name)])


# save and load ------------------------------------------------------------------------------------------------------
class Kept:
    """Sessions of a provider that keeps what it compiled, one after the other, and what was called for them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"

    def calls(self, *operators: str, name: str = "Keeping", rows: tuple[int, ...] = (3,), **options: Any) -> list[str]:
        self.log.write_text("")
        with InferenceSession(chain(*operators), providers=[(kit(name), {"log": str(self.log), **options})]) as session:
            for count in rows:
                expected = X[:count]
                for one in operators:
                    expected = relu(expected) if one == "Relu" else -expected
                np.testing.assert_array_equal(session.run(None, {"x": X[:count]})[0], expected)
            self.stats = told(session, name)
        return self.log.read_text().splitlines()

    def files(self) -> list[Path]:
        return sorted((self.folder / "cache" / "compiled").glob("*"))


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return Kept(tmp_path)


def test_what_was_compiled_is_kept_for_later_processes(kept: Kept) -> None:
    assert kept.calls("Relu", "Neg") == ["compile Relu", "compile Neg"]
    assert kept.stats["states_saved"] == 2 and len(kept.files()) == 2
    assert kept.calls("Relu", "Neg") == ["load Relu", "load Neg"]
    assert kept.stats["states_loaded"] == 2
    assert kept.calls("Relu", "Neg", version="2") == ["compile Relu", "compile Neg"]
    assert kept.calls("Relu", "Neg", other=1) == ["compile Relu", "compile Neg"]
    assert kept.calls("Relu", "Relu")[0] == "load Relu"  # the same unit in another model
    assert kept.calls("Relu", "Neg") == ["load Relu", "load Neg"]


def test_each_signature_is_kept(kept: Kept) -> None:
    name = "KeepingPerShape"
    assert kept.calls("Neg", name=name, rows=(1, 2, 1)) == ["compile Neg"] * 2
    assert kept.calls("Neg", name=name, rows=(2, 3, 1)) == ["load Neg", "compile Neg", "load Neg"]


def test_a_state_that_does_not_load_is_dropped_and_compiled_anew(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    kept.calls("Neg", how="load raises")
    before = kept.files()
    assert kept.calls("Neg", how="load raises") == ["load Neg", "compile Neg"]
    assert kept.stats["states_dropped"] == kept.stats["states_saved"] == 1
    assert kept.files() == before


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_state_is_never_loaded(kept: Kept, damage: str) -> None:
    kept.calls("Neg")
    (file,) = kept.files()
    data = file.read_bytes()
    file.write_bytes({"cut": data[:-1], "changed": data[:-1] + b"?", "empty": b""}[damage])
    assert kept.calls("Neg") == ["compile Neg"]
    assert file.read_bytes() == data


@pytest.mark.parametrize("how", ["save raises", "save nothing"])
def test_what_cannot_be_saved_runs_all_the_same(kept: Kept, how: str) -> None:
    assert kept.calls("Neg", how=how) == ["compile Neg"]
    assert kept.files() == []


def test_what_is_saved_must_be_bytes(kept: Kept) -> None:
    with pytest.raises(errors.UnsupportedOpError, match=r"save\(\) must return bytes or None, not str"):
        kept.calls("Neg", how="save text")


def test_a_state_over_which_a_worker_died_is_dropped(kept: Kept) -> None:
    kept.calls("Neg")
    deadly = kept.folder / "log.deadly"
    deadly.touch()
    assert kept.calls("Neg") == ["load Neg", "compile Neg"]  # it died of the first, and its successor knows
    assert [file.suffix for file in kept.files()] == [".state"]
    deadly.unlink()
    assert kept.calls("Neg") == ["load Neg"]


def test_states_are_bounded(tmp_path: Path) -> None:
    for i in range(6):
        assert lasting.write_bytes(str(tmp_path / f"{i}.state"), b"x" * 10, b"y" * 10)
        os.utime(tmp_path / f"{i}.state", ns=(i, i))
    lasting.bound(str(tmp_path), ".state", 4)
    assert sorted(file.name[0] for file in tmp_path.iterdir()) == ["2", "3", "4", "5"]
    lasting.bound(str(tmp_path), ".state", 4, 50)
    assert sorted(file.name[0] for file in tmp_path.iterdir()) == ["4", "5"]
