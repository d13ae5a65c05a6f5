"""How a worker's process is bounded and wrapped, and what is left when it ends: in real processes."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from outrider.scheduler import InferenceSession, ProviderSpec, SessionOptions, dumps, errors
from outrider.scheduler.options import smallest_memory
from outrider.scheduler.worker import Incarnation
from tests.builders import chain, model, node, tensor

HERE = os.path.dirname(os.path.abspath(__file__))
FILE = os.path.join(HERE, "limited_providers.py")
X = np.ones((1, 4), np.float32)
ENOUGH = 60.0  # seconds; what is waited for here takes milliseconds
IDENTITY = model([node("Identity", "x", "y", "n0")], [tensor("x", ["N", "M"])], [tensor("y", None)])


def spec(name: str, **settings: object) -> ProviderSpec:
    return ProviderSpec(f"{FILE}:{name}", **settings)


def death_in_a_run(provider: ProviderSpec, x: np.ndarray = X) -> errors.WorkerDiedError:
    with InferenceSession(IDENTITY, providers=[provider]) as session, pytest.raises(errors.WorkerDiedError) as caught:
        session.run(None, {"x": x})
    return caught.value


def death_of(one: Incarnation) -> errors.WorkerDiedError:
    until = time.monotonic() + ENOUGH
    while one.death is None:
        assert time.monotonic() < until
        time.sleep(0.001)
    return one.death


def told(**settings: object) -> dict[str, float]:
    with InferenceSession(IDENTITY, providers=[spec("Told", **settings)]) as session:
        (y,) = session.run(None, {"x": X})
    return dict(zip(("cores", "first", "nice", "core", "threads"), y[0].tolist(), strict=True))


@pytest.mark.fast
def test_cores_niceness_and_no_core_dump() -> None:
    last = max(os.sched_getaffinity(0))
    assert told(cpus=[last], nice=7) == {"cores": 1, "first": last, "nice": 7, "core": 0, "threads": 1}


def test_threads_may_differ_from_the_cores() -> None:
    first = min(os.sched_getaffinity(0))
    assert told(cpus=[first], threads=3)["threads"] == 3


def test_a_worker_that_is_debugged_may_leave_a_core_dump() -> None:
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    assert told(debug=True)["core"] == hard


def test_a_worker_that_is_debugged_has_time_and_writes_to_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    loud = spec("Loud", debug=True, options={"line": b"hello from native code\n"})
    hurry = SessionOptions(start_deadline=1e-3, claim_deadline=1e-3, load_deadline=1e-3)
    with InferenceSession(IDENTITY, providers=[loud], options=hurry) as session:
        session.run(None, {"x": X * 64})
    assert "hello from native code\n" in capfd.readouterr().err
    with pytest.raises(errors.ProviderUnavailableError, match="did not start within"):
        InferenceSession(IDENTITY, providers=[spec("Loud")], options=hurry)


def test_what_the_system_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1000})  # a core that is taken away then
    with pytest.raises(errors.ProviderUnavailableError, match=r"the system refuses cpus=\[1000\]") as caught:
        told(cpus=[1000])
    assert caught.value.provider == f"{FILE}:Told"


# Memory -----------------------------------------------------------------------------------------------------------
def limit(threads: int = 1) -> int:
    return smallest_memory(threads)


@pytest.mark.fast
def test_a_kernel_that_is_refused_memory_raises_and_the_worker_lives() -> None:
    provider = spec("Greedy", memory_limit=limit(), threads=1, options={"how": "numpy"})
    with InferenceSession(IDENTITY, providers=[provider]) as session:
        with pytest.raises(errors.OutOfMemoryError) as caught:
            session.run(None, {"x": X * 4000})
        assert caught.value.value == "n0"
        assert caught.value.available < limit()
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], X)
        assert session.health()[f"{FILE}:Greedy"]["deaths"] == 0


def test_native_code_that_aborts_for_want_of_memory_is_told_as_that() -> None:
    provider = spec("Greedy", memory_limit=limit(), threads=1, options={"how": "native"})
    error = death_in_a_run(provider, X * 4000)
    assert error.signal == "SIGABRT"
    assert error.hint.startswith("Out of memory: it may use 128 MiB (memory_limit)")
    assert error.hint in str(error)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_smallest_limit_lets_the_cpu_provider_multiply(threads: int) -> None:
    w = np.ones((500, 500), np.float32)
    raw = model([node("MatMul", "x w", "y")], [tensor("x", ["N", 500])], [tensor("y", None)], {"w": w})
    with InferenceSession(
        raw, providers=[ProviderSpec("cpu", memory_limit=limit(threads), threads=threads)]
    ) as session:
        np.testing.assert_array_equal(session.run(None, {"x": w})[0], w * 500)


def test_shared_memory_that_outrider_makes_counts_too() -> None:
    raw = model(
        [node("Expand", "x shape", "big"), node("ReduceSum", "big", "y")],
        [tensor("x", [1]), tensor("shape", [1], 7)],
        [tensor("y", None)],
    )
    provider = ProviderSpec("cpu", memory_limit=limit(), threads=1)
    with InferenceSession(raw, providers=[provider]) as session:
        feed = {"x": np.ones(1, np.float32), "shape": np.array([1 << 28])}  # 1 GiB
        with pytest.raises(errors.OutOfMemoryError) as caught:
            session.run(None, feed)
        assert 0 < caught.value.available < limit() < caught.value.asked
        assert session.run(None, {**feed, "shape": np.array([8])})[0].item() == 8


# Wrappers ---------------------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_a_wrapper_that_is_not_there_is_named() -> None:
    with pytest.raises(errors.ProviderUnavailableError, match="'no-such-debugger', which is not on PATH") as caught:
        InferenceSession(IDENTITY, providers=[ProviderSpec("cpu", wrap=["no-such-debugger", "--args"])])
    assert caught.value.provider == "cpu"


def test_a_wrapped_worker_has_its_descriptors_and_says_what_the_wrapper_did() -> None:
    wrap = ["env", "OUTRIDER_TEST_WRAPPED=yes", "nice", "-n", "3"]
    assert told(wrap=wrap)["nice"] == 3


FORKS = """
import os, signal, sys
if pid := os.fork():
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os._exit(code) if code >= 0 else os.kill(os.getpid(), -code)
os.execvp(sys.argv[1], sys.argv[1:])
"""


def test_a_wrapper_that_forks_as_tracers_do() -> None:
    """The process that we started is not the worker; its death is the worker's, and the other way round."""
    wrap = [sys.executable, "-c", FORKS]
    with InferenceSession(IDENTITY, providers=[spec("Crashes", wrap=wrap, options={"signal": "SIGSEGV"})]) as session:
        with pytest.raises(errors.WorkerDiedError) as caught:
            session.run(None, {"x": X})
        assert caught.value.signal == "SIGSEGV"
        assert "in crash" in caught.value.stack
    with InferenceSession(IDENTITY, providers=[ProviderSpec("cpu", wrap=wrap)]) as session:
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], X)


def test_a_wrapped_worker_is_not_asked_for_its_stack() -> None:
    """A debugger would stop at the signal, and in a batch end what it debugs."""
    with InferenceSession(IDENTITY, providers=[ProviderSpec("cpu", wrap=["env"])]) as session:
        fleet = session._fleet
        assert dumps.stacks(fleet.monitor, [fleet.workers[0].current]) == [""]
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], X)


WRAPPED_COORDINATOR = """
import sys, time
sys.path.insert(0, {root!r})
import outrider
from tests.builders import chain
session = outrider.InferenceSession(chain("Relu"), providers=[outrider.ProviderSpec("cpu", wrap={wrap!r})])
print("ready", flush=True)
time.sleep(600)
"""


def test_a_wrapper_dies_with_the_coordinator() -> None:
    """What it started is gone then too: the module's check for processes that are left."""
    script = WRAPPED_COORDINATOR.format(root=os.path.dirname(HERE), wrap=[sys.executable, "-c", FORKS])
    coordinator = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert coordinator.stdout is not None
    assert coordinator.stdout.readline() == "ready\n"
    coordinator.kill()
    coordinator.wait()
    coordinator.stdout.close()


@pytest.mark.skipif(shutil.which("gdb") is None, reason="there is no gdb")
def test_gdb_shows_where_it_crashed(capfd: pytest.CaptureFixture[str]) -> None:
    wrap = ["gdb", "-nx", "-batch", "-ex", "set debuginfod enabled off", "-ex", "run", "-ex", "bt 9", "--args"]
    crashes = spec("Crashes", debug=True, wrap=wrap, options={"signal": "SIGABRT"})
    with InferenceSession(IDENTITY, providers=[crashes]) as session, pytest.raises(errors.WorkerDiedError) as caught:
        session.run(None, {"x": X})
    assert "passed through" in str(caught.value)
    shown = capfd.readouterr()
    assert "native: 7 is poisoned" in shown.out + shown.err
    assert "received signal SIGABRT" in shown.out
    assert "abort" in shown.out


# What is left at the end ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [pytest.param("SIGSEGV", marks=pytest.mark.fast), "SIGABRT"])
def test_a_crash_leaves_its_stack_and_what_native_code_wrote(name: str) -> None:
    error = death_in_a_run(spec("Crashes", options={"signal": name}))
    assert (error.signal, error.phase, error.partition, error.nodes, error.device) == (name, "run", 0, ["n0"], 0)
    assert "Fatal Python error" in error.stack
    assert "limited_providers.py" in error.stack and "in crash" in error.stack
    assert error.stderr == "native: 7 is poisoned\n"
    assert error.stack in str(error) and error.stderr.strip() in str(error)


def test_a_provider_that_took_the_signal_over_leaves_no_stack() -> None:
    crashes = spec("Crashes", options={"signal": "SIGSEGV", "takes_over": True})
    error = death_in_a_run(crashes)
    assert (error.signal, error.stack) == ("SIGSEGV", "")
    assert "handles that signal itself" in str(error)


@pytest.mark.fast
def test_a_crash_at_the_start_leaves_them_too() -> None:
    with pytest.raises(errors.ProviderUnavailableError, match="SIGSEGV") as caught:
        InferenceSession(IDENTITY, providers=[spec("Crashes", options={"signal": "SIGSEGV", "phase": "start"})])
    assert "in setup" in str(caught.value)
    assert "native: 7 is poisoned" in str(caught.value)


def test_a_worker_that_cannot_be_reached_any_more_ends() -> None:
    with InferenceSession(chain("Relu")) as session:
        session.run(None, {"x": X})
        monitor, one = session._fleet.monitor, session._fleet.workers[0].current
        monitor.call(lambda: monitor._send(one, b"no message"))
        error = death_of(one)
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], X)
    assert (error.exit_code, error.signal) == (4, None)
    assert "the control thread of a worker failed" in error.stderr and "WireError" in error.stderr


def test_a_worker_killed_from_outside_is_not_said_to_be_out_of_memory() -> None:
    with InferenceSession(chain("Relu")) as session:
        session.run(None, {"x": X})
        one = session._fleet.workers[0].current
        os.kill(one.pid, signal.SIGKILL)
        error = death_of(one)
    assert (error.signal, error.phase, error.hint, error.reason) == ("SIGKILL", "idle", None, None)


def test_what_a_child_of_a_dead_worker_goes_on_to_write_stops_nobody(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    with InferenceSession(IDENTITY, providers=[spec("LeavesALoudChild", options={"marker": str(marker)})]) as session:
        try:
            with pytest.raises(errors.WorkerDiedError, match=r"\ny\ny\n"):
                session.run(None, {"x": X})
        finally:
            os.kill(int(marker.read_text()), signal.SIGKILL)
