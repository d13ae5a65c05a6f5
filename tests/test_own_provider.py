"""Anyone's own class as a provider: the design's example unchanged, options, claims of several nodes, misbehaviour."""

from __future__ import annotations

import inspect
import os
import pickle
import time
import traceback
from pathlib import Path

import numpy as np
import pytest

from outrider.scheduler import InferenceSession, ProviderSpec, SessionOptions, errors
from tests import own_providers
from tests.builders import chain, model, node, tensor

FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "own_providers.py")
X = np.array([[-2, -1, 0.5, 3], [1, -4, 0, -0.0]], np.float32)


def own(name: str) -> str:
    return f"{FILE}:{name}"


def shape_of(name: str) -> object:
    x, out = tensor("x", ["N", 4]), [tensor("y", ["N", 4]), tensor("z", ["N", 4])]
    if name == "siblings":
        return model([node("Relu", "x", "y"), node("Relu", "x", "z")], [x], out)
    if name == "chained":
        return model([node("Relu", "x", "y"), node("Relu", "y", "z")], [x], out)
    nodes = [node("Relu", "x", "a"), node("Neg", "a", "b"), node("Neg", "a", "c"), node("Add", "b c", "d")]
    return model([*nodes, node("Relu", "d", "y"), node("Relu", "b", "z")], [x], out)


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


EXPECTED = {
    "siblings": [relu(X), relu(X)],
    "chained": [relu(X), relu(X)],
    "diamond": [relu(-2 * relu(X)), relu(-relu(X))],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_example_of_the_design(name: str) -> None:
    with InferenceSession(shape_of(name), providers=[own("MyProvider"), "cpu"]) as session:
        results = session.run(None, {"x": X})
        owners = {one["op"]: one["provider"] for one in session.placement().to_dict()["nodes"]}
    assert owners["Relu"] == own("MyProvider")
    for result, expected in zip(results, EXPECTED[name], strict=True):
        np.testing.assert_array_equal(result, expected)


def test_the_example_is_that_of_the_design_word_for_word() -> None:
    source = inspect.getsource(own_providers.MyProvider)
    assert [line.strip() for line in source.splitlines() if line.strip()] == [
        "class MyProvider(Provider):",
        "def claim(self, graph):",
        'return [Claim([node]) for node in graph.nodes if node.op_type == "Relu"]',
        "def compile(self, unit):",
        "return lambda inputs: [numpy.maximum(inputs[0], 0)]",
    ]


TWINS = {
    "siblings": [node("Relu", "x", "y"), node("Abs", "x", "z")],
    "chained": [node("Abs", "x", "y"), node("Relu", "y", "z")],
    "diamond": [
        node("Relu", "x", "a"), node("Abs", "a", "b"), node("Relu", "a", "c"), node("Sub", "b c", "d"),
        node("Abs", "x", "e"), node("Relu", "e", "f"), node("Abs", "e", "g"), node("Add", "f g", "h"),
        node("Abs", "d", "y"), node("Relu", "h", "z"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", TWINS)
def test_its_twin_on_the_same_shapes(name: str) -> None:
    made = model(TWINS[name], [tensor("x", ["N", 4])], [tensor("y", ["N", 4]), tensor("z", ["N", 4])])
    expected = {
        "siblings": [relu(X), np.abs(X)], "chained": [np.abs(X), np.abs(X)], "diamond": [0 * X, 2 * np.abs(X)],
    }[name]  # fmt: skip
    with InferenceSession(made, providers=[own("ReluAndAbs"), "cpu"]) as session:
        results = session.run(None, {"x": X})
        owners = {one["op"]: one["provider"] for one in session.placement().to_dict()["nodes"]}
    assert owners["Relu"] == owners["Abs"] == own("ReluAndAbs")
    for result, right in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result, right)


@pytest.mark.parametrize("operators", [("Relu", "Abs"), ("Abs", "Relu"), ("Relu", "Abs", "Abs", "Relu")])
def test_its_twin_for_two_operators(operators: tuple[str, ...]) -> None:
    expected = X
    for op in operators:
        expected = relu(expected) if op == "Relu" else np.abs(expected)
    with InferenceSession(chain(*operators), providers=[own("ReluAndAbs")]) as session:
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], expected)
        assert len(session.placement().partitions) == 1


def test_what_the_contract_promises_is_there() -> None:
    nodes = [node("Add", "x w", "sum"), node("Squeeze", "sum", "y", axes=[1])]
    w = np.arange(3, dtype=np.float32)
    made = model(nodes, [tensor("x", ["N", 1, 3])], [tensor("y", ["N", 3])], {"w": w}, opset=11)
    spec = ProviderSpec(own("Witness") + ":2", threads=1, options={"depth": [1, {"a": None}]})
    x = np.arange(600000, dtype=np.float32).reshape(3, 1, -1).T.reshape(-1, 1, 3)
    with InferenceSession(made, providers=[spec]) as session:
        for given in (x, x[:2], x[::-1]):  # any strides in, Fortran order out
            (y,) = session.run(None, {"x": given})
            np.testing.assert_array_equal(y, given[:, 0] + w)
            assert y.flags.writeable and y.flags.c_contiguous
        assert set(session.stats()) >= {
            "runs", "copies", "copied_bytes", "allocated_bytes", "reference_nodes", "partitions",
        }  # fmt: skip
        assert session.health() == {
            own("Witness") + ":2": {"state": "ready", "incarnation": 1, "deaths": 0, "quarantined": []}
        }
        (arg,) = session.get_inputs()
        assert (arg.name, arg.type, arg.shape, arg.dtype) == ("x", "tensor(float)", ["N", 1, 3], "float32")


def test_results_that_are_inputs_are_the_callers_own() -> None:
    x = np.arange(1 << 18, dtype=np.float32).reshape(-1, 4)
    with InferenceSession(chain("Relu"), providers=[own("Returns")]) as session:
        (first,) = session.run(None, {"x": x})
        (second,) = session.run(None, {"x": x + 1})
        first[0] = -1
    np.testing.assert_array_equal(first[1:], x[1:])
    np.testing.assert_array_equal(second, x + 1)
    assert first.flags.writeable and first.flags.c_contiguous
    assert x[0, 0] == 0


def test_a_provider_that_need_not_start_is_reported_and_skipped() -> None:
    absent = ProviderSpec(own("Wrong"), options={"how": "setup"}, required=False)
    with InferenceSession(chain("Relu"), providers=[absent, "cpu"]) as session:
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], relu(X))
        assert session.get_providers() == ["cpu"]
        assert session.health()[own("Wrong")]["state"] == "absent"
        (told,) = [one for one in session.placement().providers if one.name == own("Wrong")]
    assert told.state == "absent" and "no device of mine" in told.reason
    with pytest.raises(errors.ProviderUnavailableError, match="none|no provider"):
        InferenceSession(chain("Relu"), providers=[absent])


def test_a_module_name_works_as_well_as_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(os.path.dirname(FILE))  # the worker gets this process's sys.path
    with InferenceSession(chain("Relu"), providers=["own_providers:MyProvider"]) as session:
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], relu(X))


def test_options_and_reasons_travel() -> None:
    providers = [(own("Picky") + ":3", {"operator": "Neg"}), "cpu"]
    with InferenceSession(chain("Neg", "Exp"), providers=providers) as session:
        np.testing.assert_allclose(session.run(None, {"x": X})[0], np.exp(-X), rtol=1e-6)
        (decline,) = [one for one in session.placement().to_dict()["declines"] if one["provider"] != "cpu"]
    assert decline["reason"] == "only Neg on 3"
    assert (decline["op"], decline["count"], decline["examples"]) == ("Exp", 1, ["n1"])


def test_an_indivisible_claim_is_one_unit() -> None:
    with InferenceSession(chain("Relu", "Neg", "Exp", "Abs"), providers=[own("Pair"), "cpu"]) as session:
        np.testing.assert_allclose(session.run(None, {"x": X})[0], np.exp(-relu(X)), rtol=1e-6)
        assert [part["nodes"] for part in session.placement().to_dict()["partitions"]] == [["n0"], ["n1", "n2"], ["n3"]]


def test_compiled_once_per_signature() -> None:
    with InferenceSession(chain("Identity"), providers=[own("PerShape")]) as session:
        for rows in (1, 3, 1, 2):
            x = np.zeros((rows, 4), np.float32)
            np.testing.assert_array_equal(session.run(None, {"x": x})[0], x + 4 * rows)


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("count", errors.ProviderContractError, "1 outputs"),
        ("dtype", errors.ProviderContractError, "dtype float32"),
        ("rank", errors.ProviderContractError, "rank 2"),
        ("kind", errors.ProviderContractError, "str"),
        ("none", errors.ProviderContractError, "an array of float32 for 'a', it returned NoneType"),
        ("nothing", errors.ProviderContractError, "a list of outputs for 'mine', it returned NoneType"),
        ("an array", errors.ProviderContractError, "a list of outputs for 'mine', it returned ndarray"),
        ("raises", errors.KernelError, "the kernel went wrong"),
        ("exits", errors.KernelError, "SystemExit"),
        ("writes input", errors.KernelError, "read-only"),
    ],
)
def test_what_goes_wrong_in_a_run_is_typed_and_survived(how: str, error: type[Exception], words: str) -> None:
    nodes = [node("Relu", "x", "a", "mine"), node("Neg", "a", "y", "theirs")]
    made = model(nodes, [tensor("x", ["N", 4])], [tensor("y", ["N", 4])])
    with InferenceSession(made, providers=[(own("Wrong"), {"how": how}), "cpu"]) as session:
        for _ in range(2):
            with pytest.raises(error, match=words) as caught:
                session.run(None, {"x": X})
            assert caught.value.provider == own("Wrong")
            again = pickle.loads(pickle.dumps(caught.value))
            assert (str(again), again.fields()) == (str(caught.value), caught.value.fields())


def test_a_kernel_error_tells_the_node_and_its_inputs() -> None:
    with (
        InferenceSession(chain("Relu"), providers=[(own("Wrong"), {"how": "raises"})]) as session,
        pytest.raises(errors.KernelError) as caught,
    ):
        session.run(None, {"x": X})
    error = caught.value
    assert (error.node, error.op, error.opset) == ("n0", "ai.onnx::Relu", 21)
    assert error.inputs == [{"name": "x", "dtype": "float32", "shape": [2, 4]}]
    assert "ArithmeticError" in error.remote_traceback and "_run" in error.remote_traceback
    shown = "".join(traceback.format_exception(error))  # as Python shows an error that nobody catches
    assert "In the worker:" in shown and "own_providers.py" in shown


def test_what_a_provider_printed_before_it_died_is_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    wrong, once = (own("Wrong"), {"how": "prints and dies"}), SessionOptions(replay=False, fallback=False)
    with (
        InferenceSession(chain("Relu"), providers=[wrong], options=once) as session,
        pytest.raises(errors.WorkerDiedError, match="SIGKILL") as caught,
    ):
        session.run(None, {"x": X})
    first, *output = str(caught.value).splitlines()
    assert first.endswith("died while it ran partition 0 (n0): it was ended by SIGKILL.")
    assert output == ["Its last output:", "the cache is poisoned"]


def test_a_provider_without_claim_is_told_so() -> None:
    with pytest.raises(errors.ClaimBrokenError, match=r"Incomplete has no method claim\(self, graph\)"):
        InferenceSession(chain("Relu"), providers=[own("Incomplete")])


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("claim raises", errors.ClaimBrokenError, "claim went wrong"),
        ("claim returns", errors.ProviderContractError, "list of Claim"),
        ("foreign node", errors.ProviderContractError, "Node objects"),
        ("claim of a node", errors.ClaimBrokenError, r"Claim\(\[node\]\)"),
        ("overlap", errors.ClaimError, "n0"),
        ("empty claim", errors.ClaimError, "empty"),
        ("compile", errors.UnsupportedOpError, "too big for me"),
        ("not callable", errors.UnsupportedOpError, "callable"),
        ("setup", errors.ProviderUnavailableError, "no device of mine"),
    ],
)
def test_what_goes_wrong_before_a_run_is_typed(how: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        InferenceSession(chain("Relu"), providers=[(own("Wrong"), {"how": how})])


@pytest.mark.parametrize("how", ["compile", "compile, of a node"])
def test_a_unit_that_does_not_compile_goes_to_the_next_claimant(how: str) -> None:
    with InferenceSession(chain("Relu", "Neg"), providers=[(own("Wrong"), {"how": how}), "cpu"]) as session:
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], -relu(X))
        report = session.placement()
    assert {one.provider for one in report.nodes} == {"cpu"}
    assert any("too big for me" in note for note in report.notes)
    assert report.idle_providers == [own("Wrong")]


def test_without_fallback_a_broken_claim_is_the_error() -> None:
    with pytest.raises(errors.ClaimBrokenError, match="too big for me") as caught:
        InferenceSession(
            chain("Relu"), providers=[(own("Wrong"), {"how": "compile"}), "cpu"], options=SessionOptions(fallback=False)
        )
    assert caught.value.nodes == ["n0"]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (own("MyProvidr"), "no class 'MyProvidr'; it offers .*MyProvider"),
        (own("NotAProvider"), "no subclass of"),
        ("no_such_package.there:Class", "no module 'no_such_package'"),
    ],
)
def test_a_typo_in_a_provider_says_what_is_missing(spec: str, words: str) -> None:
    with pytest.raises(errors.ProviderUnavailableError, match=words):
        InferenceSession(chain("Relu"), providers=[spec])


def test_a_class_of_main_is_refused_with_the_way_out() -> None:
    with pytest.raises(errors.InvalidOptionError, match="file of its own"):
        InferenceSession(chain("Relu"), providers=["__main__:MyProvider"])


def test_omitted_inputs_keep_their_position_and_trailing_ones_are_dropped() -> None:
    nodes = [node("Clip", "x - top", "a"), node("Clip", "a low -", "b"), node("Resize", "b - s", "y")]
    constants = {"top": np.float32(1), "s": np.array([1, 2], np.float32)}
    low = tensor("low", [])
    made = model(nodes, [tensor("x", ["N", 4]), low], [tensor("y", None)], constants)
    with InferenceSession(made, providers=[own("Clipper"), "cpu"]) as session:
        (y,) = session.run(None, {"x": X, "low": np.float32(-1)})
        declines = session.placement().to_dict()["declines"]
    np.testing.assert_array_equal(y, np.repeat(np.clip(X, -1, 1), 2, axis=1))
    assert [one["reason"] for one in declines if one["op"] == "Resize"] == ["Resize: float32 undefined float32"]


def test_a_claim_with_a_dtype_that_is_not_accepted_is_declined() -> None:
    with InferenceSession(chain("Relu"), providers=[own("Narrow"), "cpu"]) as session:
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], relu(X))
        report = session.placement()
    assert report.idle_providers == [own("Narrow")]
    assert any("does not accept float32" in decline.reason for decline in report.declines)


@pytest.mark.parametrize(("name", "words"), [("BadMerge", "merge must be True or False"), ("BadAccepts", "float99")])
def test_attributes_of_a_provider_are_checked_when_it_starts(name: str, words: str) -> None:
    with pytest.raises(errors.ProviderUnavailableError, match=words):
        InferenceSession(chain("Relu"), providers=[own(name)])


def test_what_a_provider_started_ends_with_its_worker(tmp_path: Path) -> None:
    marker = tmp_path / "child"
    with InferenceSession(chain("Relu"), providers=[(own("LeavesAChild"), {"marker": str(marker)})]) as session:
        child = int(marker.read_text())
        os.kill(child, 0)  # it runs
        session.run(None, {"x": X})
    for _ in range(2000):  # whoever inherits it must wait for it before its number is free
        try:
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            break
        if state == "Z":
            break
        time.sleep(0.01)
    else:
        raise AssertionError(f"process {child} was left behind")
