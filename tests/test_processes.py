"""Processes come and go without a trace: cycles of open and close, and the death of either side at any moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import outrider
from outrider.scheduler.errors import ForkedSessionError, OutriderError, WorkerDiedError
from tests.builders import model, node, tensor
from tests.leaks import settled_leaks, snapshot, worker_pids

NEGATE = model([node("Neg", "x", "y")], [tensor("x", ["N"])], [tensor("y", None)])
X = np.arange(3, dtype=np.float32)
PATIENCE = 20.0  # seconds until what should happen at once counts as not happening


def wait_until(what: Callable[[], bool]) -> bool:
    """Whether `what()` came true; generous, so that a busy machine does not fail a test."""
    deadline = time.monotonic() + PATIENCE
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def provider(folder: Path, text: str) -> str:
    """A provider in a file of its own."""
    path = folder / "my_provider.py"
    path.write_text(text)
    return f"{path}:MyProvider"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cycle() -> None:
    with outrider.InferenceSession(NEGATE) as session:
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], -X)


def test_200_cycles_keep_descriptors_and_memory_flat() -> None:
    for _ in range(20):  # caches fill
        cycle()
    before, memory = snapshot(), resident_bytes()
    for _ in range(180):
        cycle()
    assert settled_leaks(before, PATIENCE) == []
    assert resident_bytes() - memory < 20 << 20  # less than 120 KB a cycle


def test_200_sessions_on_one_fleet_keep_descriptors_and_memory_flat() -> None:
    with outrider.Fleet(["cpu", "cpu:1"]) as fleet:
        options = outrider.SessionOptions(fleet=fleet, pins={"b": "cpu:1"})
        raw = model(
            [node("Neg", "x", "m", name="a"), node("Exp", "m", "y", name="b")],
            [tensor("x", ["N"])],
            [tensor("y", None)],
        )

        def once() -> None:
            with outrider.InferenceSession(raw, options=options) as session:
                np.testing.assert_allclose(session.run(None, {"x": X})[0], np.exp(-X), rtol=1e-6)

        def settle() -> None:  # what was said to the workers before this has been done when they answer
            assert [fleet.stats_of(worker)["sessions"] for worker in fleet.workers] == [{}, {}]

        for _ in range(20):
            once()
        settle()
        workers = worker_pids()
        before, memory = snapshot(), resident_bytes()
        inside = {pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in workers}
        for _ in range(180):
            once()
        settle()
        assert settled_leaks(before, PATIENCE) == []
        assert resident_bytes() - memory < 20 << 20
        assert {pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in workers} == inside


def test_a_session_that_is_dropped_without_close_leaves_nothing() -> None:
    before = snapshot()
    session = outrider.InferenceSession(NEGATE)
    (y,) = session.run(None, {"x": X})
    del session
    np.testing.assert_array_equal(y, -X)
    del y
    assert settled_leaks(before, PATIENCE) == []


def test_a_closed_session_that_is_kept_holds_no_memory() -> None:
    before = snapshot()
    kept = []
    for _ in range(3):
        with outrider.InferenceSession(NEGATE) as session:
            for _ in range(3):
                session.run(None, {"x": X})
        kept.append(session)
    assert settled_leaks(before, PATIENCE) == []
    assert "(closed)" in repr(kept[0])


def test_an_idle_worker_that_dies_is_noticed_and_started_anew() -> None:
    with outrider.InferenceSession(NEGATE) as session:
        session.run(None, {"x": X})
        (pid,) = worker_pids()
        os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: session.health()["cpu"]["deaths"] == 1)
        (y,) = session.run(None, {"x": X})
        np.testing.assert_array_equal(y, -X)
        assert session.health()["cpu"]["incarnation"] == 2
        assert wait_until(lambda: not alive(pid))


def test_one_of_three_workers_dies_in_a_run(tmp_path: Path) -> None:
    """The others live on, and the next run is right."""
    slow = provider(
        tmp_path,
        "import os, numpy\n"
        "from outrider.providers.contract import Provider, Claim\n"
        "class MyProvider(Provider):\n"
        "    def claim(self, graph):\n"
        "        return [Claim([node]) for node in graph.nodes if node.op_type == 'Relu']\n"
        "    def compile(self, unit):\n"
        "        def run(inputs):\n"
        "            if inputs[0].max() > 100:\n"
        "                os.kill(os.getpid(), 9)\n"
        "            return [numpy.maximum(inputs[0], 0)]\n"
        "        return run\n",
    )
    raw = model(
        [node("Neg", "x", "a", name="a"), node("Relu", "a", "b", name="b"), node("Exp", "b", "y", name="c")],
        [tensor("x", ["N"])],
        [tensor("y", None)],
    )
    options = outrider.SessionOptions(pins={"c": "cpu:1"}, replay=False, fallback=False)
    with outrider.InferenceSession(raw, providers=[slow, "cpu", "cpu:1"], options=options) as session:
        for _ in range(3):
            with pytest.raises(WorkerDiedError) as caught:
                session.run(None, {"x": X - 1000})
            assert (caught.value.provider, caught.value.signal) == (slow, "SIGKILL")
            assert caught.value.nodes == ["b"]
            np.testing.assert_allclose(session.run(None, {"x": X})[0], 1)
        for one, deaths in zip(session.health().values(), (3, 0, 0), strict=True):
            assert one == {"state": "ready", "incarnation": deaths + 1, "deaths": deaths, "quarantined": []}


COORDINATOR = """
import os, sys, time
import numpy as np
sys.path.insert(0, {root!r})
import outrider
from tests.builders import model, node, tensor
raw = model([node("Relu", "x", "r"), node("Neg", "r", "y")], [tensor("x", ["N"])], [tensor("y", None)])
session = outrider.InferenceSession(raw, providers={providers!r})
session.run(None, {{"x": np.ones(3, np.float32)}})
{fork}
print("ready", flush=True)
{then}
"""
FORK = """
if os.fork() == 0:
    sys.stdout.close()
    os.close(1)
    time.sleep(600)
    os._exit(0)
"""
HOLDS_THE_GIL = """
import ctypes, numpy
from outrider.providers.contract import Provider, Claim
class MyProvider(Provider):
    def claim(self, graph):
        return [Claim([node]) for node in graph.nodes if node.op_type == "Relu"]
    def compile(self, unit):
        def run(inputs):
            if inputs[0].max() > 100:
                open({flag!r}, "w").close()
                ctypes.PyDLL(None).sleep(600)
            return [numpy.maximum(inputs[0], 0)]
        return run
"""


@pytest.mark.parametrize("fork", [False, True], ids=["", "a fork lives on"])
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "native code holds the GIL"])
def test_kill_9_of_the_coordinator_leaves_nothing(tmp_path: Path, fork: bool, busy: bool) -> None:
    before = snapshot()
    flag = tmp_path / "busy"
    mine = provider(tmp_path, HOLDS_THE_GIL.format(flag=str(flag)))
    script = COORDINATOR.format(
        root=str(Path(__file__).resolve().parent.parent),
        providers=[mine, "cpu"],
        fork=FORK if fork else "",
        then="session.run(None, {'x': np.full(3, 1000, np.float32)})" if busy else "time.sleep(600)",
    )
    coordinator = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert coordinator.stdout is not None
    assert coordinator.stdout.readline() == "ready\n"
    workers = worker_pids()
    forked = [pid for pid in snapshot().processes if pid not in (*workers, *before.processes, coordinator.pid)]
    assert len(workers) == 2
    assert len(forked) == fork
    if busy:
        assert wait_until(flag.exists)
    coordinator.kill()
    coordinator.wait()
    coordinator.stdout.close()
    try:
        assert wait_until(lambda: not any(alive(pid) for pid in workers))
        folders = [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("outrider-")]
        assert wait_until(
            lambda: not any(name.startswith("outrider-") for name in os.listdir(tempfile.gettempdir()))
        ), folders
    finally:
        for pid in forked:
            os.kill(pid, signal.SIGKILL)
    assert settled_leaks(before, PATIENCE) == []


def test_ctrl_c_in_the_coordinator_does_not_reach_the_workers() -> None:
    with outrider.InferenceSession(NEGATE) as session:
        session.run(None, {"x": X})
        (pid,) = worker_pids()
        os.kill(pid, signal.SIGINT)
        for _ in range(20):
            np.testing.assert_array_equal(session.run(None, {"x": X})[0], -X)
        assert session.health()["cpu"]["deaths"] == 0
        assert os.getsid(pid) != os.getsid(0)


def test_a_session_in_a_forked_process_is_an_error_there_and_works_here() -> None:
    with outrider.InferenceSession(NEGATE) as session:
        session.run(None, {"x": X})
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                session.run(None, {"x": X})
                told = b"no error"
            except ForkedSessionError:
                told = b"ForkedSessionError"
            except BaseException as error:
                told = repr(error).encode()
            os.write(write, told)
            os._exit(0)
        os.close(write)
        assert os.read(read, 1000) == b"ForkedSessionError"
        os.close(read)
        os.waitpid(child, 0)
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], -X)


def test_failing_to_start_leaves_nothing(tmp_path: Path) -> None:
    before = snapshot()
    mine = provider(tmp_path, "import os; os._exit(3)")
    for _ in range(5):
        with pytest.raises(OutriderError):
            outrider.InferenceSession(NEGATE, providers=["cpu", mine])
    assert settled_leaks(before, PATIENCE) == []
