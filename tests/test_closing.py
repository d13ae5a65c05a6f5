"""`close` completes, from wherever it is called and whatever the workers do, and whoever was at work is told."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.scheduler import Fleet, InferenceSession, SessionOptions, asynchronous, errors, monitor
from outrider.scheduler.replica import Replica
from tests.builders import chain
from tests.interrupts import interrupted
from tests.leaks import settled_leaks, snapshot, worker_pids

HERE = os.path.dirname(os.path.abspath(__file__))
STUCK = os.path.join(HERE, "stuck_providers.py") + ":Stuck"
X = np.array([[-2, -1, 0.5, 3]], np.float32)
RELU = np.maximum(X, 0)
ENOUGH = 60.0  # seconds; what is waited for here takes a few


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a hung worker gets; its length is not what is tested."""
    monkeypatch.setattr(monitor, "STOP_SECONDS", 0.3)
    monkeypatch.setattr(asynchronous, "CALLBACK_SECONDS", 0.3)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + ENOUGH
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Call(threading.Thread):
    """A call in a thread of its own; `end()` waits for it and gives what it raised, or None."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self._raised: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self._raised = error

    def end(self) -> BaseException | None:
        self.join(ENOUGH)
        assert not self.is_alive()
        return self._raised


class Stuck:
    """A provider that gets stuck; `reached()` waits until it is."""

    def __init__(self, folder: Path) -> None:
        self.mark = folder / "mark"
        self.armed = folder / "armed"

    def provider(self, where: str, how: str = "sleeps") -> tuple[str, dict[str, Any]]:
        return STUCK, {"where": where, "how": how, "mark": str(self.mark), "armed": str(self.armed)}

    def reached(self) -> None:
        until(lambda: self.mark.exists() and self.mark.read_text())
        if "T" in Path(f"/proc/{self.mark.read_text()}/stat").read_text().rpartition(")")[2][:3]:
            return
        time.sleep(0.02)  # it may be about to stop


@pytest.fixture
def stuck(tmp_path: Path) -> Stuck:
    return Stuck(tmp_path)


def forever(session: InferenceSession) -> Callable[[], None]:
    def run() -> None:
        while True:
            np.testing.assert_array_equal(session.run(None, {"x": X})[0], RELU)

    return run


def test_close_again_and_again() -> None:
    session = InferenceSession(chain("Relu"))
    (y,) = session.run(None, {"x": X})
    for _ in range(3):
        session.close()
    with contextlib.suppress(ZeroDivisionError), session:
        raise ZeroDivisionError
    np.testing.assert_array_equal(y, RELU)
    for call in (lambda: session.run(None, {"x": X}), lambda: session.stats(), session.io_binding):
        with pytest.raises(errors.SessionClosedError):
            call()


def test_who_closes_second_waits_for_the_first(stuck: Stuck) -> None:
    stuck.armed.touch()
    session = InferenceSession(chain("Relu"), providers=[stuck.provider("close")])
    closers = [Call(session.close) for _ in range(4)]
    for closer in closers:
        assert closer.end() is None
        assert worker_pids() == []


@pytest.mark.parametrize("shared", [False, True], ids=["own fleet", "shared fleet"])
@pytest.mark.parametrize("how", ["sleeps", "holds the lock", "stops"])
def test_close_while_runs_hang(stuck: Stuck, how: str, shared: bool) -> None:
    """Callers of `run` and `run_async`, in flight and waiting for a slot, are told; one that warms up, too."""
    with contextlib.ExitStack() as last:
        given: dict[str, Any] = {"providers": [stuck.provider("run", how)]}
        if shared:
            given = {"options": SessionOptions(fleet=last.enter_context(Fleet(given["providers"])))}
        session = InferenceSession(chain("Relu"), **given)
        session.run(None, {"x": X})
        futures = [session.run_async(None, {"x": X}) for _ in range(2)]
        for future in futures:
            np.testing.assert_array_equal(future.result(ENOUGH)[0], RELU)
        stuck.armed.touch()
        futures = [session.run_async(None, {"x": X}) for _ in range(3)]
        stuck.reached()
        calls = [Call(forever(session)) for _ in range(2)]
        calls += [Call(lambda: session.warmup({"x": (1, 4)})), Call(lambda: session.run_async(None, {"x": X}).result())]
        until(lambda: len(session._runner.slots._waiting) >= 4)
        assert Call(session.close).end() is None
        assert [type(call.end()) for call in calls] == [errors.SessionClosedError] * 4
        assert [type(future.exception(ENOUGH)) for future in futures] == [errors.SessionClosedError] * 3


@pytest.mark.parametrize("shared", [False, True], ids=["own fleet", "shared fleet"])
@pytest.mark.parametrize("where", ["claim", "compile"])
def test_an_interrupt_while_a_provider_hangs_at_load(stuck: Stuck, where: str, shared: bool) -> None:

    def interrupt() -> None:
        stuck.reached()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with contextlib.ExitStack() as last:
        given: dict[str, Any] = {"providers": [stuck.provider(where)]}
        if shared:
            given = {"options": SessionOptions(fleet=last.enter_context(Fleet(given["providers"])))}
        stuck.armed.touch()
        thread = Call(interrupt)
        with pytest.raises(KeyboardInterrupt):
            InferenceSession(chain("Relu"), **given)
        assert thread.end() is None
        if not shared:
            assert worker_pids() == []


@pytest.mark.parametrize("shared", [False, True], ids=["own fleet", "shared fleet"])
@pytest.mark.parametrize("where", ["setup", "compile"])
def test_close_while_a_dead_worker_comes_back_and_hangs(stuck: Stuck, where: str, shared: bool) -> None:
    """Whoever brings it back is told that the session was closed."""
    with contextlib.ExitStack() as last:
        given: dict[str, Any] = {"providers": [stuck.provider(where)]}
        if shared:
            given = {"options": SessionOptions(fleet=last.enter_context(Fleet(given["providers"])))}
        session = InferenceSession(chain("Relu"), **given)
        session.run(None, {"x": X})
        stuck.armed.touch()
        os.kill(worker_pids()[0], signal.SIGKILL)

        def run_on() -> None:
            while True:
                with contextlib.suppress(errors.WorkerDiedError):
                    session.run(None, {"x": X})

        caller = Call(run_on)
        stuck.reached()
        if shared and where == "setup":
            last.close()  # a session does not stop a worker that others may wait for
        assert Call(session.close).end() is None
        assert isinstance(caller.end(), errors.SessionClosedError)


def test_close_in_the_middle_of_stats_and_traces(stuck: Stuck, tmp_path: Path) -> None:
    """They need answers of a worker that gives none."""
    session = InferenceSession(chain("Relu"), providers=[stuck.provider("run")])
    session.start_trace()
    stuck.armed.touch()
    run = Call(lambda: session.run(None, {"x": X}))
    stuck.reached()
    stats = Call(session.stats)
    trace = Call(lambda: session.stop_trace(tmp_path / "trace.json"))
    until(lambda: len(session._fleet.monitor._replies) >= 2)
    assert Call(session.close).end() is None
    assert isinstance(run.end(), errors.SessionClosedError)
    for call in (stats, trace):
        assert isinstance(call.end(), (type(None), errors.SessionClosedError))


@pytest.mark.parametrize("signal_while", ["running", "hung", "idle"])
def test_the_handler_of_a_signal_may_close(stuck: Stuck, signal_while: str) -> None:
    """The thread that it interrupts holds a run slot."""
    session = InferenceSession(chain("Relu"), providers=[stuck.provider("run")])
    session.run(None, {"x": X})
    before = signal.signal(signal.SIGUSR1, lambda *_: session.close())
    main = threading.main_thread().ident or 0
    try:
        if signal_while == "idle":
            signal.raise_signal(signal.SIGUSR1)
            assert worker_pids() == []
        elif signal_while == "running":
            timer = threading.Timer(0.05, lambda: signal.pthread_kill(main, signal.SIGUSR1))
            timer.start()
            with pytest.raises(errors.SessionClosedError):
                forever(session)()
            timer.join()
        else:
            stuck.armed.touch()
            sender = Call(lambda: (stuck.reached(), signal.pthread_kill(main, signal.SIGUSR1)))
            with pytest.raises(errors.SessionClosedError):
                session.run(None, {"x": X})
            sender.end()
        with pytest.raises(errors.SessionClosedError):
            session.run(None, {"x": X})
    finally:
        signal.signal(signal.SIGUSR1, before)
        session.close()
    assert worker_pids() == []


def test_a_signal_within_any_call_may_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler runs within a lock of ours here: `close` must not want it in the same thread."""
    closing: list[InferenceSession] = []
    session = InferenceSession(chain("Relu"))
    check = Replica.check

    def checked(self: Replica, *run: Any) -> None:
        with self._lock:
            if closing:
                signal.raise_signal(signal.SIGUSR1)
        check(self, *run)

    before = signal.signal(signal.SIGUSR1, lambda *_: closing.pop().close())
    try:
        monkeypatch.setattr(Replica, "check", checked)
        session.run(None, {"x": X})
        closing.append(session)
        session._runner.replicas[0].ended = True  # it is looked at why
        with contextlib.suppress(errors.SessionClosedError):
            session.run(None, {"x": X})
        assert not closing
        session.close()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert worker_pids() == []


def test_a_callback_that_waits_for_who_closes_does_not_stop_it(caplog: pytest.LogCaptureFixture) -> None:
    session = InferenceSession(chain("Relu"))
    closed = threading.Event()
    future = session.run_async(None, {"x": X}, lambda *_: closed.wait(ENOUGH))
    until(lambda: session.stats()["runs"] == 1)
    session.close()
    closed.set()
    np.testing.assert_array_equal(future.result(ENOUGH)[0], RELU)
    assert "callback" in caplog.text


def test_callbacks_that_close_meet(stuck: Stuck) -> None:
    """Two at once, a third thread, and a Future's own callback."""
    session = InferenceSession(chain("Relu"), options=SessionOptions(max_in_flight=2))
    both = threading.Barrier(2)

    def close(*_: object) -> None:
        both.wait(ENOUGH)
        session.close()

    futures = [session.run_async(None, {"x": X}, close) for _ in range(2)]
    for future in futures:
        future.add_done_callback(lambda _: session.close())
        np.testing.assert_array_equal(future.result(ENOUGH)[0], RELU)
    session.close()
    assert worker_pids() == []


@pytest.mark.parametrize("where", ["monitor", "a run's thread", "another session's run"])
def test_a_session_in_a_cycle_is_collected_in_any_thread(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot()
    with Fleet(["cpu"]) as fleet:
        options = SessionOptions(fleet=fleet)
        with InferenceSession(chain("Relu"), options=options) as living:
            session = InferenceSession(chain("Neg"), options=options)
            session.run_async(None, {"x": X}).result(ENOUGH)
            threads = session._resources.asynchronous._threads
            cycle: list[Any] = [session]
            cycle.append(cycle)
            gc.disable()
            try:
                del session, cycle
                if where == "monitor":
                    fleet.monitor.call(lambda: [gc.collect(), None][1])
                elif where == "a run's thread":
                    living.run_async(None, {"x": X}, lambda *_: gc.collect()).result(ENOUGH)
                else:
                    wake = Replica.wake
                    (replica,) = living._runner.replicas

                    def waking(self: Replica) -> None:
                        with replica._lock:
                            gc.collect()
                        wake(self)

                    monkeypatch.setattr(Replica, "wake", waking)
                    fleet.monitor.call(replica.wake)
                until(lambda: threads and not any(thread.is_alive() for thread in threads))
            finally:
                gc.enable()
            np.testing.assert_array_equal(living.run(None, {"x": X})[0], RELU)
    assert settled_leaks(before, ENOUGH) == []


def moments() -> Iterator[int]:
    """0, 1, 2, ... at growing distances."""
    moment = 0
    while True:
        yield moment
        moment += 1 + moment // 3


def test_ctrl_c_at_any_moment_of_close_and_close_again() -> None:
    """What was interrupted is closed as far as it got; the next `close` closes the rest."""
    files = ("scheduler/closing.py", "resources.py", "fleet.py", "monitor.py", "asynchronous.py", "slots.py")
    with Fleet(["cpu"]) as fleet:
        for own in (True, False):
            for moment in moments():
                options = SessionOptions() if own else SessionOptions(fleet=fleet)
                session = InferenceSession(chain("Relu"), options=options)
                (y,) = session.run_async(None, {"x": X}).result(ENOUGH)
                ended = False
                with contextlib.suppress(KeyboardInterrupt), interrupted(files, moment):
                    session.close()
                    ended = True
                with pytest.raises(errors.SessionClosedError):
                    session.close()
                    session.run(None, {"x": X})
                assert len(worker_pids()) == 1
                np.testing.assert_array_equal(y, RELU)
                if ended:
                    break
            assert moment > 5


SETUP = ("session", "fleet", "monitor", "deploy", "placement", "supervisor", "trace", "resources")


@pytest.mark.parametrize("shared", [False, True], ids=["own fleet", "shared fleet"])
def test_ctrl_c_at_any_moment_of_the_constructor(shared: bool) -> None:
    """Nothing is left of what was made so far, and a fleet goes on."""
    files = tuple(f"scheduler/{name}.py" for name in SETUP)
    with Fleet(["cpu"]) as fleet:
        before = snapshot()
        for moment in moments():
            ended = False
            gc.collect()  # Python swallows what is raised in a finalizer
            with contextlib.suppress(KeyboardInterrupt), interrupted(files, moment):
                session = InferenceSession(chain("Relu"), options=SessionOptions(fleet=fleet) if shared else None)
                ended = True
            if ended:
                np.testing.assert_array_equal(session.run(None, {"x": X})[0], RELU)
                session.close()
                del session
            assert settled_leaks(before, 5.0) == [], moment
            if ended:
                break
        assert moment > 50
        with InferenceSession(chain("Relu"), options=SessionOptions(fleet=fleet)) as session:
            np.testing.assert_array_equal(session.run(None, {"x": X})[0], RELU)


def test_ctrl_c_at_any_moment_of_warmup() -> None:
    files = ("session.py", "warming.py", "runner.py", "slots.py", "execution.py", "scheduler/replica.py")
    with InferenceSession(chain("Relu"), options=SessionOptions(max_in_flight=2)) as session:
        for moment in moments():
            ended = False
            with contextlib.suppress(KeyboardInterrupt), interrupted(files, moment):
                session.warmup({"x": (1, 4)})
                ended = True
            for _ in range(3):
                np.testing.assert_array_equal(session.run(None, {"x": X})[0], RELU)
            assert all(future.result(ENOUGH) for future in [session.run_async(None, {"x": X}) for _ in range(3)])
            if ended:
                break
        assert moment > 20
