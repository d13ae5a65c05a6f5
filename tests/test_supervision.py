"""Deaths: of a worker, seen at once and typed; of the coordinator, which leaves nothing; and what a fork may not do."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from outrider.scheduler import Fleet, InferenceSession, SessionOptions, errors
from tests.builders import chain
from tests.leaks import worker_pids

pytestmark = pytest.mark.fast

HERE = os.path.dirname(os.path.abspath(__file__))
OWN = os.path.join(HERE, "own_providers.py")
X = np.array([[-2, -1, 0.5, 3]], np.float32)
CUT = SessionOptions(pins={"n0": "cpu", "n1": "cpu:1", "n2": "cpu"})
ENOUGH = 60.0  # seconds; what is waited for here takes milliseconds


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


@pytest.mark.parametrize(
    ("how", "name", "code"), [("dies", "SIGKILL", -9), ("segfaults", "SIGSEGV", -11), ("leaves", None, 9)]
)
def test_a_provider_that_ends_its_process_in_a_run(how: str, name: str | None, code: int) -> None:
    with InferenceSession(chain("Relu", "Neg"), providers=[(f"{OWN}:Wrong", {"how": how}), "cpu"]) as session:
        for incarnation in (1, 2):
            with pytest.raises(errors.WorkerDiedError) as caught:
                session.run(None, {"x": X})
            error = caught.value
            assert (error.signal, error.exit_code, error.incarnation) == (name, code, incarnation)
            assert (error.provider, error.partition, error.nodes) == (f"{OWN}:Wrong", 0, ["n0"])
        assert session.health()[f"{OWN}:Wrong"]["deaths"] == 2
        assert session.health()["cpu"] == {"state": "ready", "incarnation": 1, "deaths": 0, "quarantined": False}


def _right_again(session: InferenceSession, expected: np.ndarray) -> None:
    """The next run starts the dead worker again, or is its victim if the monitor has not told yet; then the one after."""
    try:
        result = session.run(None, {"x": X})
    except errors.WorkerDiedError:
        result = session.run(None, {"x": X})
    np.testing.assert_array_equal(result[0], expected)


def test_the_death_of_an_idle_worker_is_mended_by_the_next_run() -> None:
    with InferenceSession(chain("Relu", "Neg", "Abs"), providers=["cpu", "cpu:1"], options=CUT) as session:
        expected = session.run(None, {"x": X})[0]
        for pid in worker_pids():
            os.kill(pid, signal.SIGKILL)
            _gone(pid)
            _right_again(session, expected)
        assert [one["deaths"] for one in session.health().values()] == [1, 1]


def test_every_caller_that_waits_on_a_dead_worker_is_woken() -> None:
    options = SessionOptions(max_in_flight=3)
    seen: list[BaseException] = []

    def run() -> None:
        try:
            while True:
                session.run(None, {"x": X})
        except errors.WorkerDiedError as error:
            seen.append(error)

    with InferenceSession(chain("Relu"), providers=[f"{OWN}:Slow"], options=options) as session:
        callers = [threading.Thread(target=run) for _ in range(3)]
        for caller in callers:
            caller.start()
        session.run(None, {"x": X})
        os.kill(worker_pids()[0], signal.SIGKILL)
        for caller in callers:
            caller.join(ENOUGH)
        assert not any(caller.is_alive() for caller in callers)
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], relu(X))
    assert len(seen) == 3


def test_two_sessions_on_one_fleet_survive_a_death() -> None:
    with Fleet(["cpu"]) as fleet:
        options = SessionOptions(fleet=fleet)
        with (
            InferenceSession(chain("Relu"), options=options) as one,
            InferenceSession(chain("Neg"), options=options) as two,
        ):
            (pid,) = worker_pids()
            os.kill(pid, signal.SIGKILL)
            _gone(pid)
            _right_again(one, relu(X))
            _right_again(two, -X)
            np.testing.assert_array_equal(one.run(None, {"x": X})[0], relu(X))


def test_close_while_a_run_is_in_flight_ends_it() -> None:
    caught: list[BaseException] = []
    session = InferenceSession(chain("Relu"), providers=[f"{OWN}:Slow"])

    def run() -> None:
        try:
            while True:
                session.run(None, {"x": X})
        except errors.OutriderError as error:
            caught.append(error)

    caller = threading.Thread(target=run)
    caller.start()
    session.run(None, {"x": X})
    session.close()
    caller.join(ENOUGH)
    assert not caller.is_alive()
    assert isinstance(caught[0], errors.SessionClosedError)


def test_a_fork_of_the_caller_may_not_use_the_session_nor_end_it() -> None:
    with InferenceSession(chain("Relu"), providers=["cpu"]) as session:
        pid = os.fork()
        if pid == 0:
            try:
                session.run(None, {"x": X})
            except errors.ForkedSessionError:
                session.close()
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], relu(X))


COORDINATOR = """
import os, sys, threading, time
import numpy as np
from outrider.scheduler import InferenceSession
model, spec, seconds, marker, fork = sys.argv[1:]
options = {"seconds": int(seconds), "marker": marker} if spec.endswith("Lock") else {}
session = InferenceSession(model, providers=[(spec, options)])
if fork == "fork" and os.fork() == 0:
    time.sleep(60)          # lives on with every descriptor of its parent
    os._exit(0)
print("ready", flush=True)
threading.Thread(target=session.run, args=(None, {"x": np.ones((1, 4), np.float32)}), daemon=True).start()
time.sleep(60)
"""


def _gone(pid: int) -> None:
    """Wait until a process has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        assert poll.poll(ENOUGH * 1000), f"process {pid} lives on"
    finally:
        os.close(fd)


@pytest.mark.parametrize("fork", ["fork", "alone"])
@pytest.mark.parametrize("provider", ["HoldsTheLock", "MyProvider"])
def test_when_the_coordinator_is_killed_its_workers_end(tmp_path: Path, provider: str, fork: str) -> None:
    """Also while native code holds the interpreter lock of a worker, and while a fork of the coordinator lives on."""
    path, marker = tmp_path / "model.onnx", tmp_path / "marker"
    path.write_bytes(chain("Relu").SerializeToString())
    arguments = [str(path), f"{OWN}:{provider}", "120", str(marker), fork]
    process = subprocess.Popen([sys.executable, "-c", COORDINATOR, *arguments], stdout=subprocess.PIPE, text=True)
    forked: list[int] = []
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        workers = [pid for pid in worker_pids() if b"outrider.providers.worker" in _command(pid)]
        forked = [pid for pid in worker_pids() if pid not in workers and pid != process.pid]
        assert len(workers) == 1 and len(forked) == (fork == "fork")
        if provider == "HoldsTheLock":
            while not marker.exists() or not marker.read_text():  # the worker is in native code after this
                assert process.poll() is None
        process.kill()
        process.wait()
        _gone(workers[0])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        for pid in forked:
            os.kill(pid, signal.SIGKILL)
            _gone(pid)


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_two_hundred_sessions_leave_descriptors_and_memory_flat() -> None:
    """On one fleet, where what leaks would add up."""
    model = chain("Relu", "Neg", "Abs")
    with Fleet(["cpu", "cpu:1"]) as fleet:
        options = SessionOptions(fleet=fleet, pins=dict(CUT.pins))
        pids = [os.getpid(), *worker_pids()]

        def cycle() -> None:
            with InferenceSession(model, options=options) as session:
                session.run(None, {"x": X})

        def cycles(count: int) -> None:
            for _ in range(count):
                cycle()
            for worker in fleet.workers:
                assert fleet.stats_of(worker)["sessions"] == {}  # what was said before it has been done, too

        cycles(40)
        descriptors, memory = [_descriptors(pid) for pid in pids], [_resident(pid) for pid in pids]
        cycles(160)
        assert [_descriptors(pid) for pid in pids] == descriptors
        grown = [now - then for now, then in zip([_resident(pid) for pid in pids], memory, strict=True)]
        assert max(grown) < 4 << 20, f"resident bytes grew by {grown}"


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _resident(pid: int) -> int:
    """Private and shared bytes in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
