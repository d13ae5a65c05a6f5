"""A fork of the user's process: the child gets typed errors, ends as it likes, and the parent notices nothing."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.scheduler import Fleet, InferenceSession, SessionOptions, errors
from tests.builders import chain
from tests.leaks import worker_pids
from tests.test_closing import Call, Stuck

X = np.array([[-2, -1, 0.5, 3]], np.float32)
RELU = np.maximum(X, 0)
LARGE = np.ones((1 << 15, 4), np.float32)  # its results are leased


def in_child(call: Callable[[], object]) -> str:
    """What `call` returns in a fork of this process, or the error that it raises; the fork ends without clean-up."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            told = repr(call())
        except BaseException as error:
            told = type(error).__name__
        os.write(write, told.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        told = file.read()
    assert os.waitpid(child, 0)[1] == 0
    return told


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet(["cpu"]) as made:
        yield made


@pytest.fixture(scope="module", params=["own fleet", "shared fleet"])
def session(request: pytest.FixtureRequest, fleet: Fleet) -> Iterator[InferenceSession]:
    options = SessionOptions(fleet=fleet if request.param == "shared fleet" else None)
    with InferenceSession(chain("Relu"), options=options) as made:
        yield made


CALLS: dict[str, Callable[[InferenceSession], object]] = {
    "run": lambda s: s.run(None, {"x": X}),
    "run_async": lambda s: s.run_async(None, {"x": X}),
    "run_with_ort_values": lambda s: s.run_with_ort_values(None, {"x": X}),
    "run_with_iobinding": lambda s: s.run_with_iobinding(None),  # type: ignore[arg-type]
    "io_binding": lambda s: s.io_binding(),
    "empty": lambda s: s.empty("x", (1, 4)),
    "warmup": lambda s: s.warmup({"x": (1, 4)}),
    "placement": lambda s: s.placement(),
    "health": lambda s: s.health(),
    "stats": lambda s: s.stats(),
    "start_trace": lambda s: s.start_trace(),
    "stop_trace": lambda s: s.stop_trace("/tmp/trace.json"),
    "restart": lambda s: s.restart("cpu"),
    "another session": lambda s: InferenceSession(chain("Neg"), options=SessionOptions(fleet=s._fleet)),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_child_is_told(session: InferenceSession, name: str) -> None:
    expected = session.run(None, {"x": X})
    assert in_child(lambda: CALLS[name](session)) == "ForkedSessionError"
    np.testing.assert_array_equal(session.run(None, {"x": X}), expected)


def test_what_is_plain_data_works_in_the_child(session: InferenceSession) -> None:
    def look() -> object:
        one = session.get_inputs()[0]
        return one.name, one.dtype, session.get_providers(), session.get_outputs()[0].name, repr(session)[:10]

    assert in_child(look) == repr(look())


def test_closing_in_the_child_closes_nothing() -> None:
    """Nor does leaving a `with`, dropping the session, its fleet, and all that is collected."""
    with Fleet(["cpu"]) as fleet:
        shared = SessionOptions(fleet=fleet)
        sessions = [InferenceSession(chain("Relu"), options=options) for options in (shared, None)]
        workers = worker_pids()

        def close() -> str:
            for one in sessions:
                one.close()
                with contextlib.suppress(ZeroDivisionError), one:
                    raise ZeroDivisionError
            fleet.close()
            sessions.clear()
            gc.collect()
            return "done"

        assert in_child(close) == "'done'"
        assert worker_pids() == workers
        for one in sessions:
            np.testing.assert_array_equal(one.run(None, {"x": X})[0], RELU)
            one.close()


def test_a_fork_while_runs_are_in_flight(tmp_path: Path) -> None:
    """Whatever lock another thread holds in that moment; here most of the time one of them does."""
    with InferenceSession(chain("Relu"), options=SessionOptions(max_in_flight=3)) as session:
        ended = threading.Event()

        def runs() -> None:
            while not ended.is_set():
                session.run(None, {"x": X})
                session.run_async(None, {"x": X}).result()

        callers = [Call(runs) for _ in range(3)]
        try:
            for _ in range(10):
                assert in_child(lambda: session.run(None, {"x": X})) == "ForkedSessionError"
                assert in_child(lambda: session.close()) == "None"
        finally:
            ended.set()
        assert [caller.end() for caller in callers] == [None] * 3


def test_a_fork_while_a_run_hangs_ends_by_itself(tmp_path: Path) -> None:
    stuck = Stuck(tmp_path)
    with InferenceSession(chain("Relu"), providers=[stuck.provider("run")]) as session:
        session.run(None, {"x": X})
        stuck.armed.touch()
        caller = Call(lambda: session.run(None, {"x": X}))
        stuck.reached()
        process = multiprocessing.get_context("fork").Process(target=session.close)
        process.start()
        process.join(60)
        assert process.exitcode == 0
        assert caller.is_alive() and session.health()[session.get_providers()[0]]["deaths"] == 0
        session._resources.hurry()
    assert isinstance(caller.end(), errors.SessionClosedError)


SCRIPT = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).resolve().parent.parent)!r})
import numpy as np
import outrider
from tests.builders import chain
x = np.ones((1, 4), np.float32)
with outrider.Fleet(["cpu"]) as fleet:
    session = outrider.InferenceSession(chain("Relu"), options=outrider.SessionOptions(fleet=fleet))
    with outrider.InferenceSession(chain("Neg")) as other:
        session.run(None, {{"x": x}})
        session.start_trace()
        child = os.fork()
        if child == 0:
            sys.exit(4)  # by all `with` blocks, atexit and finalizers
        assert os.waitpid(child, 0)[1] == 4 << 8
        assert session.run(None, {{"x": x}})[0][0, 0] == 1
        assert other.run(None, {{"x": x}})[0][0, 0] == -1
        session.stop_trace(sys.argv[1])
        print("done")
"""


def test_a_child_that_exits_as_any_program_does_not_disturb_its_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", SCRIPT, str(tmp_path / "trace.json")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")


def test_results_do_not_change_in_the_child(session: InferenceSession) -> None:
    """The parent drops its own and runs on; what they and arrays for inputs lie in is not used again."""
    results: list[Any] = [session.run(None, {"x": LARGE})[0], session.empty("x", (4, 4))]
    results[1][...] = 1
    go, gone = os.pipe()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os.read(go, 1)
        os.write(write, bytes([int(results[0].max()), int(results[1].max())]))
        os._exit(0)
    results.clear()
    for _ in range(5):
        assert session.run(None, {"x": LARGE * 7})[0][0, 0] == 7
        session.empty("x", (4, 4))[...] = 7
    os.write(gone, b"g")
    assert os.read(read, 2) == bytes([1, 1])
    assert os.waitpid(child, 0)[1] == 0
    for fd in (go, gone, read, write):
        os.close(fd)


def test_a_child_may_make_sessions_of_its_own(session: InferenceSession, tmp_path: Path) -> None:
    def own() -> float:
        with InferenceSession(chain("Neg")) as mine:
            return float(mine.run(None, {"x": X})[0][0, 0])

    assert in_child(own) == "2.0"
    np.testing.assert_array_equal(session.run(None, {"x": X})[0], RELU)


def test_a_session_may_be_remade_in_the_child(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    built = chain("Relu")
    path.write_bytes(built if isinstance(built, bytes) else built.SerializeToString())
    with InferenceSession(path) as session:

        def again() -> float:
            with pickle.loads(pickle.dumps(session)) as mine:
                return float(mine.run(None, {"x": X})[0].max())

        assert in_child(again) == "3.0"


def test_a_process_that_runs_something_before_exec(session: InferenceSession) -> None:
    done = subprocess.run(["true"], preexec_fn=lambda: session.close())  # which forks, too
    assert done.returncode == 0
    np.testing.assert_array_equal(session.run(None, {"x": X})[0], RELU)
