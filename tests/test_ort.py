"""The `ort` provider in a worker: bit for bit what onnxruntime gives in this process, on the same settings."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import outrider
from outrider.providers.wire.dtypes import NUMBER, numpy_dtype, onnx_name
from outrider.scheduler.errors import (
    KernelError,
    OutriderError,
    ProviderUnavailableError,
    UnsupportedOpError,
)
from outrider.tools.conformance.suite import Case, Suite, load_suite
from tests.builders import model, node, tensor
from tests.environments import environment
from tests.leaks import worker_pids
from tests.models import MODELS, feeds, model_path
from tests.skips import pypi_is_unreachable

LEVELS = {"none": "ORT_DISABLE_ALL", "basic": "ORT_ENABLE_BASIC", "all": "ORT_ENABLE_ALL"}
EVERY = 12  # case of the backend suite
PRETENDED = str(Path(__file__).with_name("ort_providers.py"))


def alone(source: Any, level: str) -> onnxruntime.InferenceSession:
    """onnxruntime in this process, on one thread."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, LEVELS[level])
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    source = source.SerializeToString() if isinstance(source, onnx.ModelProto) else source
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def bits(value: Any) -> Any:
    """What is compared: dtype, shape and bytes of tensors, whatever they lie in."""
    if isinstance(value, (list, tuple)):
        return [bits(one) for one in value]
    if isinstance(value, dict):
        return {key: bits(one) for key, one in value.items()}
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        if array.dtype.isbuiltin == 2:  # onnxruntime has bytes where ml_dtypes has types
            array = array.view(f"u{array.dtype.itemsize}")
        return (array.shape, array.tolist()) if array.dtype == object else (array.dtype, array.shape, array.tobytes())
    return value


@pytest.fixture(scope="module")
def fleet() -> Iterator[outrider.Fleet]:
    with outrider.Fleet([outrider.ProviderSpec("ort", threads=1)]) as made:
        yield made


def opened(fleet: outrider.Fleet, source: Any, level: str = "none", **more: Any) -> outrider.InferenceSession:
    return outrider.InferenceSession(source, options=outrider.SessionOptions(fleet=fleet, optimization=level, **more))


def pretended(name: str, *others: str, **options: Any) -> list[Any]:
    """An execution provider of ort_providers.py, then others."""
    return [outrider.ProviderSpec(f"{PRETENDED}:{name}", name=name, threads=1, options=options), *others]


def shares(session: outrider.InferenceSession) -> dict[str, str]:
    """Node -> provider."""
    return {one["name"]: one["provider"] for one in session.placement().to_dict()["nodes"]}


# Real models, and the backend suite -----------------------------------------------------------------------------------
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", MODELS)
def test_real_models_are_bit_for_bit_what_onnxruntime_gives(fleet: outrider.Fleet, name: str, level: str) -> None:
    path = str(model_path(name))
    reference = alone(path, level)
    with opened(fleet, path, level) as session:
        assert set(shares(session).values()) <= {"ort", None}
        for seed in (0, 1, 0):  # shapes change with the seed where the model allows it
            inputs = feeds(name, seed)
            assert bits(session.run(None, inputs)) == bits(reference.run(None, inputs))


@pytest.fixture(scope="module")
def suite() -> Suite:
    return load_suite()


def known_to_onnxruntime(case: Case) -> list[Any] | None:
    """What it answers; None for what it does not run, or cannot hand over as arrays."""
    try:
        session = alone(case.model, "none")
        return [session.run(None, {name: fed(item) for name, item in inputs.items()}) for inputs, _ in case.data]
    except Exception:  # its kinds have no common class
        return None


def fed(item: Any) -> Any:
    if isinstance(item, np.ndarray) and item.dtype.isbuiltin == 2:
        raw = item.view(f"u{item.dtype.itemsize}")
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(raw, NUMBER[onnx_name(item.dtype)])
    return item


@pytest.mark.parametrize("start", range(4))
def test_what_onnxruntime_runs_of_the_backend_suite_runs_here(fleet: outrider.Fleet, suite: Suite, start: int) -> None:
    compared = 0
    wrong: dict[str, Any] = {}
    warnings.simplefilter("ignore")
    for name in suite.names()[start * EVERY :: 4 * EVERY]:
        case = suite.read(name)
        expected = known_to_onnxruntime(case)
        if expected is None or any(kind in name for kind in ("INT4", "INT2")):  # fed as bytes
            continue
        try:
            with opened(fleet, case.model) as session:
                got = [session.run(None, inputs) for inputs, _ in case.data]
            if bits(got) != bits(expected):
                wrong[name] = "other bits"
        except OutriderError as error:
            wrong[name] = error
        compared += 1
    assert not wrong
    assert compared >= 25


@pytest.mark.parametrize("dtype", ["bfloat16", "float8e4m3fn", "float8e5m2"])
def test_types_that_numpy_lacks_arrive_by_their_number(fleet: outrider.Fleet, dtype: str) -> None:
    kind = {"bfloat16": "bfloat16", "float8e4m3fn": "float8_e4m3fn", "float8e5m2": "float8_e5m2"}[dtype]
    cast = model(
        [node("Cast", "x", "c", name="there", to=NUMBER[dtype]), node("Cast", "z", "y", name="back", to=1)],
        [tensor("x", ["N"]), tensor("z", ["N"], NUMBER[dtype])],
        [tensor("c", ["N"], NUMBER[dtype]), tensor("y", ["N"])],
    )
    x = np.linspace(-3, 3, 50, dtype=np.float32)
    narrow = x.astype(getattr(ml_dtypes, kind))
    with opened(fleet, cast) as session:
        c, y = session.run(None, {"x": x, "z": narrow})
    assert bits(c) == bits(narrow)
    assert bits(y) == bits(narrow.astype(np.float32))


@pytest.mark.parametrize("dtype", ["int4", "uint4"])
@pytest.mark.parametrize("shape", [(7,), (2, 4), (0,), ()])
def test_packed_types_cross_between_sessions(fleet: outrider.Fleet, dtype: str, shape: tuple[int, ...]) -> None:
    cast = model(
        [node("Cast", "x", "c", name="there", to=NUMBER[dtype]), node("Cast", "z", "y", name="back", to=1)],
        [tensor("x", [None] * len(shape)), tensor("z", [None] * len(shape), NUMBER[dtype])],
        [tensor("c", [None] * len(shape), NUMBER[dtype]), tensor("y", [None] * len(shape))],
    )
    rng = np.random.default_rng(0)
    x = rng.integers(-8 if dtype == "int4" else 0, 8, shape).astype(np.float32)
    narrow = x.astype(numpy_dtype(dtype))
    with opened(fleet, cast) as session:
        for _ in range(2):
            c, y = session.run(None, {"x": x, "z": narrow})
            assert c.dtype == narrow.dtype
            assert bits(c.astype(np.int8)) == bits(narrow.astype(np.int8))
            assert bits(y) == bits(x)


# Memory ---------------------------------------------------------------------------------------------------------------
def anonymous(pid: int) -> int:
    """Bytes of memory that a process shares with nobody and no file."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Anonymous:")).split()[1]) * 1024


@pytest.mark.parametrize("level", ["none", "all"])
def test_weights_are_not_copied(level: str) -> None:
    table = numpy_helper.from_array(np.ones((16384, 1024), np.float32), "table")  # 64 MiB
    gather = model(
        [node("Gather", "table rows", "y")], [tensor("rows", ["N"], TensorProto.INT64)], [tensor("y", ["N", 1024])]
    )
    gather.graph.initializer.append(table)
    others = set(worker_pids())
    with outrider.Fleet([outrider.ProviderSpec("ort", threads=1)]) as made:
        (pid,) = set(worker_pids()) - others
        with opened(made, model([node("Relu", "x", "y")], [tensor("x", [4])], [tensor("y", [4])])) as session:
            session.run(None, {"x": np.zeros(4, np.float32)})
            before = anonymous(pid)
        with opened(made, gather, level) as session:
            (rows,) = session.run(None, {"rows": np.arange(100)})
            assert rows.shape == (100, 1024) and (rows == 1).all()
            assert anonymous(pid) - before < 16 << 20


def test_sessions_go_when_they_are_unloaded() -> None:
    weights = numpy_helper.from_array(np.ones((2048, 2048), np.float32), "w")  # 16 MiB, packed by onnxruntime
    product = model([node("MatMul", "x w", "y")], [tensor("x", ["N", 2048])], [tensor("y", ["N", 2048])])
    product.graph.initializer.append(weights)
    others = set(worker_pids())
    with outrider.Fleet([outrider.ProviderSpec("ort", threads=1)]) as made:
        (pid,) = set(worker_pids()) - others
        sizes = []
        for _ in range(10):
            with opened(made, product, "all") as session:
                session.run(None, {"x": np.ones((1, 2048), np.float32)})
                assert session.stats()["providers"]["ort"]["programs"] == 1
            sizes.append(anonymous(pid))
    assert sizes[-1] - sizes[0] < 80 << 20  # a few may still be there when the next one is loaded


# Steps of a run -------------------------------------------------------------------------------------------------------
def test_outputs_of_known_shape_are_written_in_place_and_others_copied_once(fleet: outrider.Fleet) -> None:
    both = model(
        [node("Relu", "x", "y"), node("NonZero", "x", "z")],
        [tensor("x", ["N", 4])],
        [tensor("y", ["N", 4]), tensor("z", [2, None], TensorProto.INT64)],
    )
    with opened(fleet, both) as session:
        for rows in (3, 5, 3, 3):
            x = np.ones((rows, 4), np.float32)
            x[0, :rows] = 0
            before = session.stats()["providers"]["ort"]["copies"]
            y, z = session.run(None, {"x": x})
            assert session.stats()["providers"]["ort"]["copies"] - before == 1
            assert bits([y, z]) == bits([x, np.stack(np.nonzero(x))])


def test_values_without_an_address_go_by_value(fleet: outrider.Fleet) -> None:
    split = model(
        [
            node("StringConcat", "s s", "t"),
            node("SplitToSequence", "x", "q", axis=0, keepdims=1),
            node("SequenceAt", "p one", "first"),
            node("SplitToSequence", "x two", "r", axis=1),
        ],
        [
            tensor("s", ["M"], TensorProto.STRING),
            tensor("x", ["N", 2]),
            sequence("p"),
            tensor("one", [], TensorProto.INT64),
            tensor("two", [], TensorProto.INT64),
        ],
        [tensor("t", ["M"], TensorProto.STRING), sequence("q"), tensor("first", None), sequence("r")],
    )
    given = {
        "s": np.array(["ab", "ü"], dtype=object),
        "x": np.arange(6, dtype=np.float32).reshape(3, 2),
        "p": [np.ones(2, np.float32), np.zeros((1, 3), np.float32)],
        "one": np.array(1),
        "two": np.array(2),
    }
    with opened(fleet, split) as session:
        assert bits(session.run(None, given)) == bits(alone(split, "none").run(None, given))


def sequence(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_sequence_value_info(name, TensorProto.FLOAT, None)


def test_an_error_in_a_run_names_the_node(fleet: outrider.Fleet) -> None:
    gather = model(
        [node("Relu", "x", "r", name="relu"), node("Gather", "r i", "y", name="gather")],
        [tensor("x", [3]), tensor("i", [1], TensorProto.INT64)],
        [tensor("y", [1])],
    )
    with opened(fleet, gather) as session:
        for _ in range(2):
            with pytest.raises(KernelError, match="indices element out of data bounds") as caught:
                session.run(None, {"x": np.ones(3, np.float32), "i": np.array([7])})
            assert (caught.value.provider, caught.value.node, caught.value.op) == ("ort", "gather", "ai.onnx::Gather")
        (y,) = session.run(None, {"x": np.ones(3, np.float32), "i": np.array([2])})
        assert y == [1]


# What is declined -----------------------------------------------------------------------------------------------------
UNKNOWN = model(
    [
        node("Relu", "x", "a", name="relu"),
        node("Odd", "a", "b", name="odd", domain="nobody"),
        node("Neg", "b", "y", name="neg"),
    ],
    [tensor("x", [4])],
    [tensor("y", [4])],
)
UNKNOWN.opset_import.add(domain="nobody", version=1)


def test_an_operator_that_onnxruntime_lacks_costs_it_and_what_has_no_type_behind_it(fleet: outrider.Fleet) -> None:
    with pytest.raises(UnsupportedOpError) as caught:
        opened(fleet, UNKNOWN)
    told = str(caught.value)
    assert "no provider takes 2 of 3 nodes" in told and "ai.onnx::Neg declined by ort: the type of input 'b'" in told
    assert "nobody::Odd declined by ort" in told and "Relu" not in told


def test_operators_are_left_to_others_when_asked() -> None:
    providers = [outrider.ProviderSpec("ort", options={"exclude": "Relu"}, threads=1), "cpu"]
    two = model(
        [node("Relu", "x", "a", name="relu"), node("Neg", "a", "y", name="neg")], [tensor("x", [4])], [tensor("y", [4])]
    )
    with outrider.InferenceSession(two, providers=providers) as session:
        assert shares(session) == {"relu": "cpu", "neg": "ort"}
        (decline,) = session.placement().to_dict()["declines"]
        assert decline["reason"] == "the option exclude=Relu leaves it to others"


def test_options_reach_onnxruntime_or_stop_the_start() -> None:
    for options, told in (({"libary": "/x.so"}, "did you mean 'library'"), ({"session.execution_mode": "x"}, "one of")):
        with pytest.raises(ProviderUnavailableError, match=told):
            outrider.Fleet([outrider.ProviderSpec("ort", options=options)])
    with pytest.raises(ProviderUnavailableError, match="has no execution provider 'NopeExecutionProvider'"):
        outrider.Fleet(["NopeExecutionProvider"])


# Execution providers that are pretended -------------------------------------------------------------------------------
def mlp() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    made = model(
        [
            node("MatMul", "x w", "a", name="product"),
            node("Add", "a b", "c", name="bias"),
            node("Tanh", "c", "d", name="tanh"),
            node("Sigmoid", "d", "e", name="sigmoid"),
            node("Mul", "c e", "y", name="gate"),
        ],
        [tensor("x", ["N", 4])],
        [tensor("y", ["N", 4])],
    )
    for name, shape in (("w", (4, 4)), ("b", (4,))):
        made.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
    return made


X = {"x": np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)}
OTHERS = {"product", "bias", "tanh", "gate"}


@pytest.mark.parametrize(
    ("name", "takes"),
    [
        ("Choosy", OTHERS),
        ("Lonely", OTHERS),
        ("Fickle", OTHERS - {"tanh"}),
        ("Paired", {"product", "bias"}),
    ],
)
def test_an_execution_provider_gets_what_it_takes_and_runs(name: str, takes: set[str]) -> None:
    with outrider.InferenceSession(mlp(), providers=pretended(name, "ort")) as session:
        assert {one for one, provider in shares(session).items() if provider == name} == takes
        for _ in range(2):
            (y,) = session.run(None, X)
        np.testing.assert_allclose(y, alone(mlp(), "none").run(None, X)[0], rtol=1e-6)
        declines = {
            one["op"]: one["reason"] for one in session.placement().to_dict()["declines"] if one["provider"] == name
        }
        assert declines["Sigmoid"] == "the execution provider leaves it to onnxruntime's CPU provider"
        if name == "Fickle":  # told when it was built
            assert declines["Tanh"] == declines["Sigmoid"]


def test_what_fails_in_its_first_run_goes_to_the_next_provider() -> None:
    with outrider.InferenceSession(mlp(), providers=pretended("Weak", "ort")) as session:
        assert {one for one, provider in shares(session).items() if provider == "Weak"} == OTHERS
        for _ in range(2):
            np.testing.assert_allclose(session.run(None, X)[0], alone(mlp(), "none").run(None, X)[0], rtol=1e-6)
        assert {one for one, provider in shares(session).items() if provider == "Weak"} == OTHERS - {"tanh"}
        (reason,) = [one["reason"] for one in session.placement().to_dict()["declines"] if one["op"] == "Tanh"]
        assert reason == "onnxruntime took it and cannot run it: no such shape here"


def test_what_has_run_once_is_not_taken_back_for_bad_data() -> None:
    made = model(
        [node("Gather", "x i", "y", name="gather")],
        [tensor("x", ["N"]), tensor("i", ["M"], TensorProto.INT64)],
        [tensor("y", ["M"])],
    )
    x = np.arange(3, dtype=np.float32)
    with outrider.InferenceSession(made, providers=pretended("Choosy", "ort")) as session:
        np.testing.assert_array_equal(session.run(None, {"x": x, "i": np.array([2, 0])})[0], [2, 0])
        elsewhere = session.empty("i", [2])  # another place, which is bound anew
        elsewhere[:] = 0, 99
        with pytest.raises(KernelError, match="gather"):
            session.run(None, {"x": x, "i": elsewhere})
        assert shares(session) == {"gather": "Choosy"}


def test_what_it_leaves_to_the_cpu_provider_may_be_taken_too() -> None:
    with outrider.InferenceSession(mlp(), providers=pretended("Choosy", cpu_fallback="true")) as session:
        assert set(shares(session).values()) == {"Choosy"}
        np.testing.assert_allclose(session.run(None, X)[0], alone(mlp(), "none").run(None, X)[0], rtol=1e-6)


def test_a_unit_is_compiled_for_each_shape_when_asked() -> None:
    with outrider.InferenceSession(mlp(), providers=pretended("Choosy", "ort", static_shapes=True)) as session:
        for rows in (1, 3, 1):
            x: Mapping[str, Any] = {"x": np.full((rows, 4), 0.5, np.float32)}
            np.testing.assert_allclose(session.run(None, x)[0], alone(mlp(), "none").run(None, x)[0], rtol=1e-6)
        assert session.stats()["providers"]["Choosy"]["copies"] == 0


# Custom operators, functions, deaths ---------------------------------------------------------------------------------
def extensions() -> str:
    """A library of custom operators from PyPI."""
    python = environment("custom-ops", ["onnxruntime-extensions==0.15.2"])
    pattern = "lib/python*/site-packages/onnxruntime_extensions/_extensions_pydll*.so"
    (found,) = python.parent.parent.glob(pattern)
    return str(found)


def test_custom_operators_run_beside_others() -> None:
    try:
        library = extensions()
    except RuntimeError:
        if pypi_is_unreachable():
            pytest.skip("PyPI cannot be reached")
        raise
    split = model(
        [
            node("Relu", "x", "r", name="relu"),
            node("NegPos", "r", "n p", name="split", domain="ai.onnx.contrib"),
            node("Add", "n p", "y", name="add"),
        ],
        [tensor("x", ["N"])],
        [tensor("y", ["N"])],
    )
    split.opset_import.add(domain="ai.onnx.contrib", version=1)
    x = np.array([-1, 2, -3], np.float32)
    for exclude, owner in (([], "ort"), (["Relu", "Add"], "cpu")):
        spec = outrider.ProviderSpec("ort", options={"custom_ops": library, "exclude": exclude})
        with outrider.InferenceSession(split, providers=[spec, "cpu"]) as session:
            assert shares(session) == {"relu": owner, "split": "ort", "add": owner}
            assert bits(session.run(None, {"x": x})[0]) == bits(np.maximum(x, 0))


def test_functions_of_a_model_are_asked_for_node_by_node(fleet: outrider.Fleet) -> None:
    calls = model([node("Twice", "x", "y", name="call", domain="mine")], [tensor("x", ["N"])], [tensor("y", ["N"])])
    calls.opset_import.add(domain="mine", version=1)
    body = [node("Add", "a a", "b", name="add"), node("Relu", "b", "c", name="relu")]
    calls.functions.append(helper.make_function("mine", "Twice", ["a"], ["c"], body, [helper.make_opsetid("", 21)]))
    x = np.array([-1, 2], np.float32)
    with opened(fleet, calls) as session:
        assert shares(session) == {"call/add": "ort", "call/relu": "ort"}
        assert bits(session.run(None, {"x": x})) == bits(alone(calls, "none").run(None, {"x": x}))


def test_a_worker_that_dies_comes_back_with_its_sessions() -> None:
    others = set(worker_pids())
    with outrider.Fleet([outrider.ProviderSpec("ort", threads=1)]) as made, opened(made, mlp(), "all") as session:
        expected = bits(session.run(None, X))
        (pid,) = set(worker_pids()) - others
        os.kill(pid, signal.SIGKILL)
        for _ in range(3):
            assert bits(session.run(None, X)) == expected
        assert session.health()["ort"]["deaths"] == 1


def test_a_worker_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime's telemetry would: it is off."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)
    made = model([node("Relu", "x", "y")], [tensor("x", [2])], [tensor("y", [2])])
    with outrider.InferenceSession(made, providers=["ort"]) as session:
        session.run(None, {"x": np.zeros(2, np.float32)})
    assert os.listdir(tmp_path) == []
