"""Models that are larger than they may cost: external weights, values beyond memory, functions that multiply."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import outrider
from outrider.providers.wire import messages
from outrider.scheduler.errors import ModelLimitError, ModelLoadError, OutOfMemoryError
from tests.builders import model, node, tensor
from tests.leaks import worker_pids

ROWS, COLUMNS = 3 << 18, 1024  # of float32: 3 GiB
MODEST = 500 << 20  # bytes


def peak_bytes(pid: int | str) -> int:
    """The most memory that a process has had in use at once."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024


def external(name: str, shape: list[int], location: str, offset: int = 0) -> onnx.TensorProto:
    """A float32 initializer whose bytes lie in another file."""
    made = onnx.TensorProto(name=name, dims=shape, data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    size = int(np.prod(shape)) * 4
    for key, value in {"location": location, "offset": offset, "length": size}.items():
        made.external_data.add(key=key, value=str(value))
    return made


@pytest.fixture
def big(tmp_path: Path) -> Path:
    """A table of 3 GiB in a sparse file, of which the last row is not zero; rows are gathered, then negated."""
    last = np.arange(COLUMNS, dtype=np.float32)
    with open(tmp_path / "table.bin", "wb") as file:
        file.seek((ROWS - 1) * COLUMNS * 4)
        file.write(last.tobytes())
    made = model(
        [node("Gather", "table rows", "g", name="gather"), node("Neg", "g", "y", name="negate")],
        [tensor("rows", ["N"], TensorProto.INT64)],
        [tensor("y", ["N", COLUMNS])],
    )
    made.graph.initializer.append(external("table", [ROWS, COLUMNS], "table.bin"))
    path = tmp_path / "big.onnx"
    path.write_bytes(made.SerializeToString())
    return path


def test_external_weights_are_mapped_only_where_they_are_used(big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    pack = messages.pack

    def counted(message: object) -> bytes:
        body = pack(message)
        sizes.append(len(body))
        return body

    monkeypatch.setattr(messages, "pack", counted)
    before = peak_bytes("self")
    options = outrider.SessionOptions(pins={"negate": "cpu:1"})
    with outrider.InferenceSession(str(big), providers=["cpu", "cpu:1"], options=options) as session:
        (y,) = session.run(None, {"rows": np.array([0, ROWS - 1, -1])})
        users, others = [], []
        for pid in worker_pids():
            maps = Path(f"/proc/{pid}/maps").read_text()
            (users if "table.bin" in maps else others).append(pid)
            assert peak_bytes(pid) < MODEST
        placement = session.placement().to_dict()
    assert (len(users), len(others)) == (1, 1)
    assert sizes and max(sizes) < 64 << 10, "weights travel in no message"
    assert "table.bin" not in Path("/proc/self/maps").read_text()
    assert peak_bytes("self") - before < MODEST
    np.testing.assert_array_equal(y[0], 0)
    np.testing.assert_array_equal(y[1:], -np.tile(np.arange(COLUMNS, dtype=np.float32), (2, 1)))
    weights = {item["name"]: item["weight_bytes"] for item in placement["providers"]}
    assert weights == {"cpu": ROWS * COLUMNS * 4, "cpu:1": 0}


@pytest.mark.parametrize("level", ["none", "all"])
def test_onnxruntime_maps_external_weights_and_copies_none(big: Path, level: str) -> None:
    options = outrider.SessionOptions(pins={"negate": "ort:1"}, optimization=level)
    with outrider.InferenceSession(str(big), providers=["ort", "ort:1"], options=options) as session:
        (y,) = session.run(None, {"rows": np.array([0, ROWS - 1])})
        assert max(map(peak_bytes, worker_pids())) < MODEST
    np.testing.assert_array_equal(y, [np.zeros(COLUMNS), -np.arange(COLUMNS)])


def test_a_value_of_a_tebibyte_is_a_typed_error(tmp_path: Path) -> None:
    made = model(
        [node("Expand", "x n", "big", name="grow"), node("Neg", "big", "y", name="negate")],
        [tensor("x", [1]), tensor("n", [1], TensorProto.INT64)],
        [tensor("y", None)],
    )
    options = outrider.SessionOptions(pins={"negate": "cpu:1"})  # so the value is an edge
    with outrider.InferenceSession(made, providers=["cpu", "cpu:1"], options=options) as session:
        feed = {"x": np.ones(1, np.float32), "n": np.array([1 << 38])}
        for _ in range(2):
            with pytest.raises(OutOfMemoryError) as caught:
                session.run(None, feed)
            assert caught.value.value == "big"
            assert caught.value.asked >= 1 << 40 > caught.value.available > 0
        assert max(map(peak_bytes, worker_pids())) < MODEST
        np.testing.assert_array_equal(session.run(None, {**feed, "n": np.array([3])})[0], [-1, -1, -1])
        assert session.health()["cpu"]["deaths"] == 0


def doubling(count: int, cycle: bool = False) -> onnx.ModelProto:
    """Functions f0, f1, ...: each calls the one before twice; in a cycle the first one calls the last one."""
    functions = []
    for i in range(count):
        inner = f"f{i - 1}" if i else f"f{count - 1}"
        nodes = [
            helper.make_node(inner, ["a"], ["b"], domain="own"),
            helper.make_node(inner, ["b"], ["c"], domain="own"),
        ]
        if i == 0 and not cycle:
            nodes = [helper.make_node("Relu", ["a"], ["c"])]
        functions.append(
            helper.make_function(
                "own", f"f{i}", ["a"], ["c"], nodes, [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
            )
        )
    return model(
        [helper.make_node(f"f{count - 1}", ["x"], ["y"], domain="own")],
        [tensor("x", ["N"])],
        [tensor("y", ["N"])],
        functions=functions,
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("own", 1)],
    )


def test_functions_that_double_are_refused_before_anything_expands() -> None:
    with pytest.raises(ModelLimitError):
        outrider.InferenceSession(doubling(28))
    assert worker_pids() == []


def test_a_cycle_of_functions_is_refused() -> None:
    with pytest.raises((ModelLoadError, ModelLimitError), match="f0"):
        outrider.InferenceSession(doubling(3, cycle=True))


def test_functions_that_double_a_little_run() -> None:
    x = np.array([-1, 2], np.float32)
    with outrider.InferenceSession(doubling(6)) as session:
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], [0, 2])
        names = [item["name"] for item in session.placement().to_dict()["nodes"]]
    assert len(names) == 32
    assert len(set(names)) == 32


@pytest.mark.parametrize("location", ["../table.bin", "/table.bin", "link/table.bin", "nowhere.bin", "short.bin"])
def test_external_data_that_must_not_or_cannot_be_read(tmp_path: Path, location: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "table.bin").write_bytes(bytes(64))
    (folder / "short.bin").write_bytes(bytes(60))
    os.symlink(tmp_path, folder / "link")
    if location.startswith("/"):
        location = str(tmp_path / "table.bin")
    made = model([node("Add", "x w", "y")], [tensor("x", [16])], [tensor("y", [16])])
    made.graph.initializer.append(external("w", [16], location))
    (folder / "m.onnx").write_bytes(made.SerializeToString())
    with pytest.raises(ModelLoadError, match="w"):
        outrider.InferenceSession(str(folder / "m.onnx"))


@pytest.mark.parametrize("size", [0, 1, 50, 200])
def test_a_truncated_file_is_refused(tmp_path: Path, size: int) -> None:
    raw = model(
        [node("Neg", "x", "y")], [tensor("x", ["N"])], [tensor("y", ["N"])], {"w": np.ones(40)}
    ).SerializeToString()
    path = tmp_path / "m.onnx"
    path.write_bytes(raw[:size])
    with pytest.raises(ModelLoadError) as caught:
        outrider.InferenceSession(str(path))
    assert str(path) in str(caught.value)
