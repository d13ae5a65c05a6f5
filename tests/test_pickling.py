"""What pickle carries to another process, and what it refuses by name."""

from __future__ import annotations

import concurrent.futures
import copy
import multiprocessing
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.scheduler import (
    CancelToken,
    Fleet,
    InferenceSession,
    OrtValue,
    ProviderSpec,
    RunOptions,
    SessionOptions,
    errors,
)
from tests.builders import chain
from tests.leaks import worker_pids

X = np.array([[-2, -1, 0.5, 3]], np.float32)
CHAIN = chain("Relu", "Neg")
EXPECTED = -np.maximum(X, 0)


def through_pickle(what: Any) -> Any:
    return pickle.loads(pickle.dumps(what))


WAYS: list[Callable[[Any], Any]] = [through_pickle, copy.copy, copy.deepcopy]


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "model.onnx"
    file.write_bytes(CHAIN if isinstance(CHAIN, bytes) else CHAIN.SerializeToString())
    return str(file)


def made(path: str) -> InferenceSession:
    options = SessionOptions(pins={"n1": "second"}, max_in_flight=3, config={"spin_us": "7"})
    return InferenceSession(path, providers=["cpu", ProviderSpec("cpu:1", name="second", threads=1)], options=options)


@pytest.mark.parametrize("way", WAYS, ids=["pickle", "copy", "deepcopy"])
def test_a_session_from_a_path_is_made_anew(
    path: str, way: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, name = os.path.split(path)
    monkeypatch.chdir(folder)
    with made(name) as session:
        monkeypatch.chdir("/")
        with way(session) as other:
            assert len(worker_pids()) == 4
            assert other is not session and other.get_providers() == session.get_providers() == ["cpu", "second"]
            assert other.placement().to_dict()["nodes"] == session.placement().to_dict()["nodes"]
            assert len(other._runner.slots.items) == 3
            session.close()
            np.testing.assert_array_equal(other.run(None, {"x": X})[0], EXPECTED)
    with pytest.raises(errors.SessionClosedError):
        pickle.dumps(session)


def _runs(session: InferenceSession, x: np.ndarray) -> tuple[int, np.ndarray]:
    with session:
        return os.getpid(), session.run(None, {"x": x})[0]


def test_a_session_is_an_argument_for_a_spawned_process(path: str) -> None:
    spawn = multiprocessing.get_context("spawn")
    with made(path) as session, concurrent.futures.ProcessPoolExecutor(1, spawn) as pool:
        pid, y = pool.submit(_runs, session, X).result()
        assert pid != os.getpid()
        np.testing.assert_array_equal(y, EXPECTED)
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], EXPECTED)
    _end_resource_tracker()


def _end_resource_tracker() -> None:
    """The process that multiprocessing keeps."""
    from multiprocessing import resource_tracker

    resource_tracker._resource_tracker._stop()


@pytest.mark.fast
def test_what_belongs_to_this_process_says_so() -> None:
    with Fleet(["cpu"]) as fleet, InferenceSession(CHAIN, options=SessionOptions(fleet=fleet)) as session:
        future = session.run_async(None, {"x": X})
        future.result()
        refused: dict[str, Any] = {
            "Fleet": fleet,
            "IOBinding": session.io_binding(),
            "RunFuture": future,
            "OrtValue": OrtValue.ortvalue_from_numpy(X),
            "CancelToken": CancelToken(),
        }
        for name, what in refused.items():
            for way in WAYS:
                with pytest.raises(errors.NotPicklableError, match=name) as caught:
                    way(what)
                assert caught.value.what == name and ";" in caught.value.reason
        with pytest.raises(errors.NotPicklableError, match="Fleet"):
            pickle.dumps(SessionOptions(fleet=fleet))
        for way in WAYS:
            with pytest.raises(errors.NotPicklableError, match="bytes or proto"):
                way(session)


def test_a_session_on_a_fleet_refuses(path: str) -> None:
    with Fleet(["cpu"]) as fleet, InferenceSession(path, options=SessionOptions(fleet=fleet)) as session:
        with pytest.raises(errors.NotPicklableError, match="Fleet") as caught:
            pickle.dumps(session)
        assert caught.value.what == "InferenceSession"
        report = through_pickle(session.placement())
        assert report.to_dict() == session.placement().to_dict() and str(report) == str(session.placement())
        for value in (*session.get_inputs(), *session.get_outputs()):
            assert repr(through_pickle(value)) == repr(value)
        assert vars(through_pickle(session.get_modelmeta())) == vars(session.get_modelmeta())


OPTIONS = [
    RunOptions(),
    SessionOptions(),
    SessionOptions(pins={"a": "cpu"}, strategy="cost", config={"optimization": "basic", "spin_us": "3"}),
    ProviderSpec("cpu"),
    ProviderSpec("m:C", name="mine", env={"A": "1"}, threads=2, required=False, options={"deep": [1, {"a": b"b"}]}),
]


@pytest.mark.fast
@pytest.mark.parametrize("options", OPTIONS, ids=repr)
@pytest.mark.parametrize("way", WAYS, ids=["pickle", "copy", "deepcopy"])
def test_options_travel(options: Any, way: Callable[[Any], Any]) -> None:
    again = way(options)
    assert again == options and type(again) is type(options) and repr(again) == repr(options)
