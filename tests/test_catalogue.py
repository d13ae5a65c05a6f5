"""Every error that `run` raises, on one session: after each of them the next good input is answered right."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from outrider.scheduler import InferenceSession, SessionOptions, errors
from tests.builders import model, node, tensor
from tests.gates import end
from tests.leaks import worker_pids

MOODY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "own_providers.py") + ":Moody"
NODES = [node("Relu", "x", "r", "mine"), node("Reshape", "r s", "q", "shaper"), node("Expand", "q n", "y", "grow")]
MODEL = model(
    NODES,
    [tensor("x", ["N", 2]), tensor("s", [2], TensorProto.INT64), tensor("n", ["rank"], TensorProto.INT64)],
    [tensor("y", None)],
)


def f32(*rows: Any) -> np.ndarray:
    return np.array(rows, np.float32)


GOOD = {"x": f32([1, -2], [3, 4]), "s": np.array([1, 4]), "n": np.array([1, 1])}
RIGHT = f32([1, 0, 3, 4])
STARTS_BY = {code: f32([code, 1]) for code in (-101, -102, -103, -104, -105, -106)}

# What is wrong -> the arguments of run(), the error, and words of it.
FAULTS: dict[str, tuple[tuple[Any, ...], type[Exception], str]] = {
    "run options": ((None, GOOD, "fast"), errors.InvalidOptionError, "run_options"),
    "output names": (("y", GOOD), errors.InvalidOptionError, "output_names"),
    "unknown output": ((["z"], GOOD), errors.OutputNotFoundError, "'z'"),
    "no mapping": ((None, [1]), errors.InputTypeError, "dict"),
    "unknown input": ((None, {**GOOD, "z": 1}), errors.InputNotFoundError, "'z'"),
    "missing input": ((None, {"x": GOOD["x"]}), errors.InputNotFoundError, "'s'"),
    "not a tensor": ((None, {**GOOD, "x": object()}), errors.InputTypeError, "'x'"),
    "dtype": ((None, {**GOOD, "x": np.ones((2, 2))}), errors.DtypeMismatchError, "float64"),
    "rank": ((None, {**GOOD, "x": f32(1)}), errors.RankMismatchError, "'x'"),
    "dimension": ((None, {**GOOD, "x": f32([1, 2, 3])}), errors.ShapeMismatchError, "'x'"),
    "kernel of cpu": ((None, {**GOOD, "s": np.array([3, 3])}), errors.KernelError, "shaper"),
    "a value too large": ((None, {**GOOD, "n": np.array([1 << 38, 1])}), errors.OutOfMemoryError, "y"),
    "provider raises": ((None, {**GOOD, "x": STARTS_BY[-101]}), errors.KernelError, "unlucky"),
    "provider exits": ((None, {**GOOD, "x": STARTS_BY[-102]}), errors.KernelError, "SystemExit"),
    "number of outputs": ((None, {**GOOD, "x": STARTS_BY[-103]}), errors.ProviderContractError, "mine"),
    "dtype of an output": ((None, {**GOOD, "x": STARTS_BY[-104]}), errors.ProviderContractError, "float64"),
    "provider is short of memory": ((None, {**GOOD, "x": STARTS_BY[-105]}), errors.OutOfMemoryError, "not that much"),
    "a shape that does not compile": (
        (None, {**GOOD, "x": np.ones((13, 2), np.float32)}), errors.ClaimBrokenError, "no 13 rows",
    ),
    "worker dies": ((None, {**GOOD, "x": STARTS_BY[-106]}), errors.WorkerDiedError, "SIGKILL"),
}  # fmt: skip


def test_after_each_error_the_same_session_is_right(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    options = SessionOptions(replay=False, fallback=False)
    with InferenceSession(MODEL, providers=[(MOODY, {"closed": str(closed)}), "cpu"], options=options) as session:

        def good() -> None:
            for _ in range(2):
                np.testing.assert_array_equal(session.run(None, GOOD)[0], RIGHT)

        good()
        for what, (arguments, error, words) in FAULTS.items():
            for _ in range(2):
                with pytest.raises(error) as caught:
                    session.run(*arguments)
                assert type(caught.value) is error, what
                assert words in str(caught.value), what
                good()
        with pytest.raises(errors.ClaimBrokenError) as broken:
            session.run(*FAULTS["a shape that does not compile"][0])
        assert (broken.value.provider, broken.value.nodes) == (MOODY, ["mine"])
        assert broken.value.reason == "ValueError: no 13 rows"
        assert "in compile" in broken.value.remote_traceback
        # A worker that cannot be started anew, until it can and somebody asks for that.
        closed.touch()
        with pytest.raises(errors.WorkerDiedError):
            session.run(*FAULTS["worker dies"][0])
        for _ in range(2):
            with pytest.raises(errors.ProviderUnavailableError, match="closed today") as caught:
                session.run(None, GOOD)
            assert (caught.value.provider, caught.value.seconds) == (MOODY, None)
            closed.unlink(missing_ok=True)
        health = session.health()
        assert (health[MOODY]["state"], health[MOODY]["deaths"], health["cpu"]["deaths"]) == ("failed", 3, 0)
        session.restart(MOODY)
        good()
        assert (session.health()[MOODY]["state"], session.health()[MOODY]["incarnation"]) == ("ready", 5)


def test_two_sizes_of_one_symbol_and_the_next_good_feed() -> None:
    made = model([node("Add", "x z", "y")], [tensor("x", ["N"]), tensor("z", ["N"])], [tensor("y", None)])
    with InferenceSession(made) as session:
        for _ in range(2):
            with pytest.raises(errors.SymbolConflictError):
                session.run(None, {"x": f32(1, 2), "z": f32(1)})
            np.testing.assert_array_equal(session.run(None, {"x": f32(1, 2), "z": f32(1, 1)})[0], [2, 3])


def test_a_file_of_weights_that_is_gone_when_a_worker_starts_anew_and_then_is_back(tmp_path: Path) -> None:
    made = model([node("Add", "x w", "y", "add")], [tensor("x", [4])], [tensor("y", None)])
    weight = made.graph.initializer.add(name="w", dims=[4], data_type=1, data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value="w.bin")
    (tmp_path / "w.bin").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
    x = f32(1, 1, 1, 1)
    with InferenceSession(str(tmp_path / "m.onnx")) as session:
        session.run(None, {"x": x})
        (tmp_path / "w.bin").rename(tmp_path / "moved")
        end(worker_pids()[0])
        for _ in range(3):
            with pytest.raises(errors.WeightFileChangedError) as caught:
                session.run(None, {"x": x})
        assert "w.bin" in str(caught.value)
        (tmp_path / "moved").rename(tmp_path / "w.bin")
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], [1, 2, 3, 4])
