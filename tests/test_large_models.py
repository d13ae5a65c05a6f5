"""Sizes: weights of gigabytes that no message carries, an edge that would be a terabyte, files meant to do harm."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from outrider.providers.wire import messages
from outrider.scheduler import Fleet, InferenceSession, SessionOptions, errors
from outrider.scheduler import monitor as monitor_module
from tests.builders import model, node, tensor
from tests.leaks import worker_pids

pytestmark = pytest.mark.fast

ROWS, COLUMNS = 3 << 10, 256 << 10  # float32: 3 GiB
GIB = 1 << 30


def external(name: str, location: str, shape: list[int], offset: int = 0) -> TensorProto:
    made = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape, data_location=TensorProto.EXTERNAL)
    nbytes = 4 * int(np.prod(shape))
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(nbytes))):
        made.external_data.add(key=key, value=value)
    return made


@pytest.fixture
def three_gigabytes(tmp_path: Path) -> Path:
    """w (3 GiB, in a sparse file) is gathered from on one worker; the rows are doubled by another."""
    weights = tmp_path / "weights.bin"
    with open(weights, "wb") as file:
        file.truncate(4 * ROWS * COLUMNS)
        for row in (0, 7, ROWS - 1):
            file.seek(4 * row * COLUMNS)
            file.write(np.full(16, row + 1, np.float32).tobytes())
    nodes = [node("Gather", "w i", "rows", "pick"), node("Add", "rows rows", "y", "double")]
    made = model(nodes, [tensor("i", ["N"], TensorProto.INT64)], [tensor("y", ["N", COLUMNS])])
    made.graph.initializer.append(external("w", weights.name, [ROWS, COLUMNS]))
    path = tmp_path / "model.onnx"
    path.write_bytes(made.SerializeToString())
    return path


def _mapped(pid: int, what: str) -> bool:
    return what in Path(f"/proc/{pid}/maps").read_text()


def test_three_gigabytes_of_weights(three_gigabytes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    pack = messages.pack

    def counted(message: object) -> bytes:
        body = pack(message)
        sizes.append(len(body))
        return body

    monkeypatch.setattr(messages, "pack", counted)
    options = {"pins": {"pick": "cpu:1", "double": "cpu"}}
    with Fleet(["cpu", "cpu:1"]) as fleet:
        first, second = (worker.pid for worker in fleet.workers)
        with InferenceSession(three_gigabytes, options=SessionOptions(fleet=fleet, **options)) as session:
            result = session.run(None, {"i": np.array([7, 0, ROWS - 1], np.int64)})[0]
            assert result.shape == (3, COLUMNS)
            assert result[:, :16].tolist() == [[16.0] * 16, [2.0] * 16, [2.0 * ROWS] * 16]
            assert not result[:, 16:].any()
            assert _mapped(second, "weights.bin") and not _mapped(first, "weights.bin")
            assert not _mapped(os.getpid(), "weights.bin")
    assert sizes and max(sizes) < 64 << 10


@pytest.mark.parametrize("where", ["edge", "inside"])
def test_a_terabyte_is_a_typed_error_and_nothing_is_touched(where: str) -> None:
    nodes = [node("Expand", "x shape", "big", "grow"), node("ReduceSum", "big", "y", "sum", keepdims=0)]
    shape = np.array([1 << 20, 1 << 18], np.int64)
    made = model(nodes, [tensor("x", [1, 1])], [tensor("y", [])], {"shape": shape})
    if where == "inside":  # a value that no view can stand for
        made.graph.node.insert(1, node("Exp", "big", "bigger", "exp"))
        made.graph.node[2].input[0] = "bigger"
    pins = {"grow": "cpu", "sum": "cpu:1", **({"exp": "cpu"} if where == "inside" else {})}
    with Fleet(["cpu", "cpu:1"]) as fleet:
        before = _resident(worker_pids())
        with InferenceSession(made, options=SessionOptions(fleet=fleet, pins=pins)) as session:
            for _ in range(2):
                with pytest.raises(errors.OutOfMemoryError) as caught:
                    session.run(None, {"x": np.ones((1, 1), np.float32)})
                error = caught.value
                assert error.value in ("big", "bigger")
                assert error.asked >= 1 << 40
                assert 0 < error.available < error.asked
                assert str(error.available) in str(error).replace(",", "")
        assert _resident(worker_pids()) - before < 500 << 20
        good = model([node("Neg", "x", "y")], [tensor("x", ["N"])], [tensor("y", ["N"])])
        with InferenceSession(good, options=SessionOptions(fleet=fleet)) as session:
            assert session.run(None, {"x": np.ones(2, np.float32)})[0].tolist() == [-1, -1]
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 500 << 10  # KiB


def _resident(pids: list[int]) -> int:
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids) * os.sysconf("SC_PAGE_SIZE")


def doubling(count: int) -> onnx.ModelProto:
    """f0 is Add(x, x); each further function calls the one before it twice."""
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("mine", 1)]
    made = [helper.make_function("mine", "f0", ["x"], ["y"], [helper.make_node("Add", ["x", "x"], ["y"])], opsets)]
    for i in range(1, count):
        calls = [
            helper.make_node(f"f{i - 1}", ["x"], ["h"], domain="mine"),
            helper.make_node(f"f{i - 1}", ["h"], ["y"], domain="mine"),
        ]
        made.append(helper.make_function("mine", f"f{i}", ["x"], ["y"], calls, opsets))
    call = helper.make_node(f"f{count - 1}", ["x"], ["y"], domain="mine")
    return model([call], [tensor("x", [1])], [tensor("y", [1])], functions=made, opset_imports=opsets)


def cyclic() -> onnx.ModelProto:
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("mine", 1)]
    functions = [
        helper.make_function("mine", f"f{i}", ["x"], ["y"], [call], opsets)
        for i, call in enumerate(helper.make_node(f"f{1 - i}", ["x"], ["y"], domain="mine") for i in range(2))
    ]
    call = helper.make_node("f0", ["x"], ["y"], domain="mine")
    return model([call], [tensor("x", [1])], [tensor("y", [1])], functions=functions, opset_imports=opsets)


def climbing() -> onnx.ModelProto:
    made = model([node("Add", "x w", "y")], [tensor("x", [4])], [tensor("y", [4])])
    made.graph.initializer.append(external("w", "../../etc/hostname", [4]))
    return made


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (doubling(27).SerializeToString(), errors.ModelLimitError, "expan"),
        (cyclic().SerializeToString(), errors.ModelLoadError, "f0"),
        (doubling(3).SerializeToString()[:-20], errors.ModelLoadError, None),
        (climbing().SerializeToString(), errors.ModelLoadError, "folder"),
        (b"", errors.ModelLoadError, None),
        (b"no model at all", errors.ModelLoadError, None),
    ],
    ids=["27 doubling functions", "a cycle of functions", "cut short", "climbs out", "empty", "text"],
)
def test_hostile_files_are_typed_errors_before_any_process(
    data: bytes, error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor_module.Monitor, "start", None)  # starting a fleet would fail otherwise
    with pytest.raises(error, match=words) as caught:
        InferenceSession(data, providers=["cpu"])
    assert isinstance(caught.value, (errors.ModelLoadError, errors.ModelLimitError))


def test_a_few_doubling_functions_are_right() -> None:
    with InferenceSession(doubling(4), providers=["cpu"]) as session:
        assert session.run(None, {"x": np.ones(1, np.float32)})[0].tolist() == [2.0**8]
        assert all(one.name.startswith("#0/") for one in session.placement().nodes)
