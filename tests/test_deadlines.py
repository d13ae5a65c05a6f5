"""Runs that take too long or are cancelled: told at once, with the worker's stack, and the session goes on."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from outrider.scheduler import CancelToken, Fleet, InferenceSession, ProviderSpec, RunOptions, SessionOptions, errors
from outrider.scheduler.overdue import GRACE
from outrider.scheduler.stalls import StallWarnings
from tests.builders import chain, model, node, tensor

SLOW = os.path.join(os.path.dirname(os.path.abspath(__file__)), "slow_providers.py") + ":Slow"
ENOUGH = 60.0  # seconds; what is waited for here takes milliseconds, or a second
LONG = 3600.0  # seconds that a kernel takes which nobody waits for
SHORT = 0.3  # seconds of a deadline that passes


def feed(seconds: float) -> dict[str, np.ndarray]:
    return {"x": np.full((1, 4), seconds, np.float32)}


def slow(how: str, operators: tuple[str, ...] = ("Identity", "Neg"), log: Path | None = None, **options: Any) -> Any:
    given: dict[str, Any] = {"how": how}
    if log is not None:
        given["log"] = str(log)
    return InferenceSession(chain(*operators), providers=[(SLOW, given), "cpu"], options=SessionOptions(**options))


def right_again(session: InferenceSession) -> None:
    """The session answers, if need be when its worker has been ended and started anew."""
    np.testing.assert_array_equal(session.run(None, feed(-2))[0], feed(2)["x"])


def wait_until(true: Callable[[], bool]) -> None:
    ends = time.monotonic() + ENOUGH
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.005)


@pytest.mark.parametrize("how", ["sleep", "lock"])
def test_a_kernel_that_does_not_return_ends_the_run_at_its_deadline_and_then_its_worker(how: str) -> None:
    with slow(how) as session:
        session.run(None, feed(0))
        with pytest.raises(errors.RunTimeoutError) as caught:
            session.run(None, feed(LONG), RunOptions(deadline=SHORT))
        error = caught.value
        assert isinstance(error, TimeoutError)
        assert error.deadline == SHORT
        (told,) = error.running
        assert {key: told[key] for key in ("provider", "incarnation", "partition", "nodes", "step")} == {
            "provider": SLOW, "incarnation": 1, "partition": 0, "nodes": ["n0"], "step": 0,
        }  # fmt: skip
        assert "in _sleep" in told["stack"] and "in _run" in told["stack"]
        assert told["stack"] in str(error) and "n0" in str(error)
        copy = pickle.loads(pickle.dumps(error))
        assert (copy.deadline, copy.running, str(copy)) == (error.deadline, error.running, str(error))
        right_again(session)
        assert session.health()[SLOW]["incarnation"] == 2
        assert session.health()["cpu"]["deaths"] == 0


def test_a_kernel_that_asks_whether_it_is_cancelled_keeps_its_worker(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with slow("look", log=log) as session:
        for _ in range(2):  # the general way, then the steady one
            with pytest.raises(errors.RunTimeoutError):
                session.run(None, feed(LONG), RunOptions(deadline=SHORT))
            wait_until(lambda: log.read_text().split()[-1:] == ["stopped"])
            for _ in range(3):
                (y,) = session.run(None, feed(-2))
                np.testing.assert_array_equal(y, np.full((1, 4), 2, np.float32))
        assert log.read_text().count("stopped") == 2
        assert {one["deaths"] for one in session.health().values()} == {0}


@pytest.mark.parametrize("before", [0, 4])
def test_a_cancelled_run_ends_between_two_units_and_tells_which(tmp_path: Path, before: int) -> None:
    """Five units in one partition; in the general way and in the steady state."""
    log = tmp_path / "log"
    with slow("sleep", ("Identity",) * 5, log, max_in_flight=1) as session:
        for _ in range(before):
            session.run(None, feed(0))
        calls = len(log.read_text().split()) // 2 if before else 0
        with pytest.raises(errors.RunTimeoutError) as caught:
            session.run(None, feed(0.4), RunOptions(deadline=0.6))
        (told,) = caught.value.running
        assert (told["partition"], told["step"], told["nodes"]) == (0, 1, [f"n{i}" for i in range(5)])
        session.run(None, feed(0))
        assert len(log.read_text().split()) // 2 == calls + 2 + 5
        assert session.health()[SLOW]["deaths"] == 0


def large_products(count: int) -> Any:
    nodes = [node("MatMul", f"v{i} v{i}", f"v{i + 1}", f"n{i}") for i in range(count)]
    return model(nodes, [tensor("v0", ["N", "N"])], [tensor(f"v{count}", ["N", "N"])])


def test_the_cpu_provider_stops_between_groups_of_steps() -> None:
    with InferenceSession(large_products(400), providers=["cpu"]) as session:
        small = {"v0": np.eye(4, dtype=np.float32)}
        session.run(None, small)
        for _ in range(2):
            with pytest.raises(errors.RunTimeoutError):
                session.run(None, {"v0": np.zeros((600, 600), np.float32)}, RunOptions(deadline=SHORT))
            np.testing.assert_array_equal(session.run(None, small)[0], np.eye(4))
        assert session.health()["cpu"]["deaths"] == 0


def test_the_cpu_provider_stops_in_a_loop() -> None:
    body = helper.make_graph(
        [node("Add", "c one", "d"), node("Identity", "k", "more")],
        "body",
        [tensor("i", [], TensorProto.INT64), tensor("k", [], TensorProto.BOOL), tensor("c", [])],
        [tensor("more", [], TensorProto.BOOL), tensor("d", [])],
        [onnx.numpy_helper.from_array(np.float32(1), "one")],
    )
    loop = model(
        [node("Loop", "trips - x", "y", body=body)],
        [tensor("trips", [], TensorProto.INT64), tensor("x", [])],
        [tensor("y", [])],
    )
    with InferenceSession(loop, providers=["cpu"]) as session:
        with pytest.raises(errors.RunTimeoutError):
            session.run(None, {"trips": np.array(1 << 40), "x": np.float32(0)}, RunOptions(deadline=SHORT))
        assert session.run(None, {"trips": np.array(3), "x": np.float32(0)}) == [3]
        assert session.health()["cpu"]["deaths"] == 0


def test_a_token_cancels_before_while_and_not_after(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with slow("look", log=log) as session:
        token = CancelToken()
        token.cancel()
        for options in (RunOptions(cancel=token), RunOptions(cancel=token, deadline=5)):
            with pytest.raises(errors.RunCancelledError):
                session.run(None, feed(0), options)
            assert isinstance(
                session.run_async(None, feed(0), run_options=options).exception(ENOUGH), errors.RunCancelledError
            )
        assert not log.exists()

        token = CancelToken()
        session.run(None, feed(0), RunOptions(cancel=token))
        caught: list[BaseException] = []

        def run() -> None:
            try:
                session.run(None, feed(LONG), RunOptions(cancel=token))
            except errors.RunCancelledError as error:
                caught.append(error)

        callers = [
            threading.Thread(target=run) for _ in range(3)
        ]  # two run, of which one waits in the worker; one waits
        for caller in callers:
            caller.start()
        wait_until(lambda: log.read_text().split()[-1] == "begun")
        token.cancel()
        for caller in callers:
            caller.join(ENOUGH)
        assert len(caught) == 3
        right_again(session)
        assert session.health()[SLOW]["deaths"] == 0
        assert log.read_text().count("stopped") == 1
        assert not token._waiting


def test_a_token_may_be_used_by_the_handler_of_a_signal() -> None:
    token = CancelToken()
    before = signal.signal(signal.SIGUSR1, lambda *_: token.cancel())
    try:
        with slow("look") as session:
            timer = threading.Timer(SHORT, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1))
            timer.start()
            with pytest.raises(errors.RunCancelledError):
                session.run(None, feed(LONG), RunOptions(cancel=token))
            timer.join()
            right_again(session)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_future_is_cancelled_while_it_waits_and_while_it_runs(tmp_path: Path) -> None:
    log = tmp_path / "log"
    told: list[tuple[Any, Any, str]] = []
    with slow("look", log=log, max_in_flight=1) as session:
        running = session.run_async(None, feed(LONG), lambda *given: told.append(given), "mine")
        waiting = session.run_async(None, feed(LONG))
        last = session.run_async(None, feed(-2))
        wait_until(lambda: log.exists() and log.read_text().split() == ["begun"])
        assert waiting.cancel() and waiting.cancelled()
        assert running.cancel() and running.cancel()
        error = running.exception(ENOUGH)
        assert isinstance(error, errors.RunCancelledError) and not running.cancelled()
        assert told == [([], "mine", str(error))]
        np.testing.assert_array_equal(last.result(ENOUGH)[0], np.full((1, 4), 2, np.float32))
        assert not last.cancel() and not running.cancel()
        with pytest.raises(CancelledError):
            waiting.result()
        assert session.health()[SLOW]["deaths"] == 0


def test_cancelling_a_task_of_asyncio_cancels_the_run(tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def main(session: InferenceSession) -> None:
        async def wait() -> list[Any]:
            return await session.run_async(None, feed(LONG))

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wait(), SHORT)
        (y,) = await session.run_async(None, feed(-2))
        assert y[0, 0] == 2

    with slow("look", log=log, max_in_flight=1) as session:
        session.run(None, feed(0))
        asyncio.run(main(session))
        assert log.read_text().count("stopped") == 1


def test_a_deadline_covers_the_wait_for_a_slot_and_in_the_queue(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with slow("look", log=log, max_in_flight=1, queue_size=2) as session:
        running = session.run_async(None, feed(LONG))
        wait_until(lambda: log.exists() and log.read_text().split() == ["begun"])
        with pytest.raises(errors.RunTimeoutError, match="waited for a run slot") as caught:
            session.run(None, feed(0), RunOptions(deadline=SHORT))
        assert (caught.value.deadline, caught.value.running) == (SHORT, [])
        begun = time.monotonic()
        token = CancelToken()
        queued = [
            session.run_async(None, feed(0), run_options=RunOptions(deadline=SHORT)),
            session.run_async(None, feed(0), run_options=RunOptions(cancel=token)),
        ]
        with pytest.raises(errors.RunTimeoutError, match="room in the queue"):
            session.run_async(None, feed(0), run_options=RunOptions(deadline=SHORT / 3))
        assert isinstance(queued[0].exception(ENOUGH), errors.RunTimeoutError)
        assert time.monotonic() - begun >= SHORT
        assert not queued[1].done()
        token.cancel()
        assert isinstance(queued[1].exception(ENOUGH), errors.RunCancelledError)
        assert not running.done()
        running.cancel()
        right_again(session)
        assert log.read_text().split() == ["begun", "stopped", "begun", "ended"]


def test_the_options_of_the_session_hold_for_each_run_that_has_none_of_its_own(tmp_path: Path) -> None:
    with slow("look", deadline=SHORT) as session:
        binding = session.io_binding()
        binding.bind_cpu_input("x", feed(LONG)["x"])
        binding.bind_output("y")
        for run in (
            lambda: session.run(None, feed(LONG)),
            lambda: session.run_with_iobinding(binding),
            lambda: session.run_async(None, feed(LONG)).result(ENOUGH),
        ):
            with pytest.raises(errors.RunTimeoutError) as caught:
                run()
            assert caught.value.deadline == SHORT
        assert session.run(None, feed(2 * SHORT), RunOptions(deadline=ENOUGH))[0][0, 0] == np.float32(-2 * SHORT)


@pytest.mark.parametrize("provider", ["Slow", "Stopping"])
def test_a_partition_that_takes_too_long_is_the_death_of_its_worker(provider: str) -> None:
    """With its stack, if the process can tell it: one that was stopped cannot."""
    own = SLOW.replace("Slow", provider)
    options = SessionOptions(partition_deadline=SHORT, replay=False, fallback=False)
    with InferenceSession(chain("Identity", "Neg"), providers=[own, "cpu"], options=options) as session:
        session.run(None, feed(0))
        session.run(None, feed(0.5 * SHORT if provider == "Slow" else 0))
        with pytest.raises(errors.WorkerDiedError) as caught:
            session.run(None, feed(LONG))
        error = caught.value
        assert (error.signal, error.provider, error.partition, error.nodes) == ("SIGKILL", own, 0, ["n0"])
        assert error.reason == f"partition 0 ran longer than its partition_deadline of {SHORT:g} s"
        assert ("in _sleep" in error.stack) == (provider == "Slow")
        right_again(session)
        assert session.health()[own]["incarnation"] == 2


def test_a_worker_that_is_stopped_while_it_is_idle_does_not_hold_up_runs_for_ever() -> None:
    """It is ended, and as it had not begun the partition, its successor serves that without any replay."""
    with slow("sleep", replay=False, fallback=False) as session:
        session.run(None, feed(0))
        worker = session._resources.workers[0]
        os.kill(worker.pid, signal.SIGSTOP)
        (y,) = session.run(None, feed(-2), RunOptions(partition_deadline=SHORT))
        np.testing.assert_array_equal(y, feed(2)["x"])
        assert worker.incarnation == 2

        os.kill(worker.pid, signal.SIGSTOP)
        with pytest.raises(errors.RunTimeoutError) as caught:
            session.run(None, feed(0), RunOptions(deadline=SHORT))
        (told,) = caught.value.running
        assert (told["provider"], told["partition"], told["step"], told["stack"]) == (SLOW, 0, None, "")
        right_again(session)
        assert worker.incarnation == 3
        assert session.health()["cpu"]["deaths"] == 0


def test_a_debugged_worker_is_not_ended() -> None:
    spec = ProviderSpec(SLOW, debug=True, options={"how": "sleep"})
    with InferenceSession(chain("Identity", "Neg"), providers=[spec, "cpu"]) as session:
        session.run(None, feed(0))
        took = SHORT + GRACE + 0.5  # longer than any other worker would be let
        with pytest.raises(errors.RunTimeoutError) as caught:
            session.run(None, feed(took), RunOptions(deadline=SHORT, partition_deadline=SHORT / 2))
        assert "in _sleep" in caught.value.running[0]["stack"]
        right_again(session)
        assert session.health()[SLOW]["incarnation"] == 1


def test_a_deadline_covers_the_time_until_a_worker_is_there_again(tmp_path: Path) -> None:
    own, gate = SLOW.replace("Slow", "Sluggish"), tmp_path / "gate"
    with InferenceSession(chain("Identity", "Neg"), providers=[(own, {"gate": str(gate)}), "cpu"]) as session:
        session.run(None, feed(0))
        os.kill(session._resources.workers[0].pid, signal.SIGKILL)
        for _ in range(3):
            with pytest.raises(errors.RunTimeoutError) as caught:
                session.run(None, feed(0), RunOptions(deadline=SHORT))
            assert caught.value.running == []
        gate.touch()
        right_again(session)
        assert session.health()[own]["incarnation"] == 2


def test_warmup_keeps_to_the_partition_deadline() -> None:
    options = {"partition_deadline": SHORT, "replay": False, "fallback": False}
    with slow("three rows", **options) as session, pytest.raises(errors.WorkerDiedError):
        session.warmup({"x": (3, 4)})


def test_with_replay_and_fallback_such_a_partition_ends_with_another_claimant() -> None:
    with slow("lock", partition_deadline=SHORT) as session:
        (y,) = session.run(None, feed(LONG))
        np.testing.assert_array_equal(y, -feed(LONG)["x"])
        assert session.health()[SLOW]["deaths"] == 2
        assert [one["nodes"] for one in session.health()[SLOW]["quarantined"]] == [["n0"]]


def test_runs_behind_one_that_is_given_up_are_served_by_the_successor() -> None:
    with slow("lock", max_in_flight=3) as session:
        session.run(None, feed(0))
        late = session.run_async(None, feed(LONG), run_options=RunOptions(deadline=SHORT))
        others = [session.run_async(None, feed(-number)) for number in range(1, 6)]
        assert isinstance(late.exception(ENOUGH), errors.RunTimeoutError)
        for number, other in enumerate(others, 1):
            np.testing.assert_array_equal(other.result(ENOUGH)[0], feed(number)["x"])
        assert session.health()[SLOW]["incarnation"] == 2


def test_runs_of_others_are_not_touched(tmp_path: Path) -> None:
    """Of another session on the same fleet, on another worker."""
    with Fleet([(SLOW, {"how": "lock"}), "cpu"]) as fleet:
        on = {"options": SessionOptions(fleet=fleet)}
        with (
            InferenceSession(chain("Identity", "Neg"), **on) as stuck,
            InferenceSession(chain("Abs"), providers=["cpu"], **on) as other,
        ):
            late = stuck.run_async(None, feed(LONG), run_options=RunOptions(deadline=SHORT))
            while not late.done():
                np.testing.assert_array_equal(other.run(None, feed(-3))[0], feed(3)["x"])
            assert isinstance(late.exception(), errors.RunTimeoutError)
            right_again(stuck)
            assert fleet.health()["cpu"]["deaths"] == 0


@pytest.mark.parametrize(
    ("how", "options", "frame"),
    [
        ("claim", {"claim_deadline": SHORT}, "in claim"),
        ("compile", {"load_deadline": SHORT}, "in compile"),
        ("setup", {"start_deadline": 3}, "in setup"),
    ],
)
def test_the_stack_is_told_of_a_provider_that_does_not_get_there(
    how: str, options: dict[str, float], frame: str
) -> None:
    with pytest.raises(errors.ProviderUnavailableError, match=f"within {next(iter(options.values()))} s") as caught:
        slow(how, fallback=False, **options)
    assert frame in str(caught.value) and "in _sleep" in str(caught.value)


def test_a_worker_that_does_not_move_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, seconds in (("FIRST", 0.2), ("AGAIN", 0.4), ("EVERY", 0.05)):
        monkeypatch.setattr(StallWarnings, name, seconds)
    with caplog.at_level(logging.WARNING, "outrider.fleet"), slow("look", ("Identity", "Identity")) as session:
        for _ in range(20):
            session.run(None, feed(0.01))
        assert not caplog.records
        future = session.run_async(None, feed(LONG))
        wait_until(lambda: len(caplog.records) >= 2)
        future.cancel()
        assert isinstance(future.exception(ENOUGH), errors.RunCancelledError)
    first, second = (record.getMessage() for record in caplog.records[:2])
    assert "at unit 0 of partition 0 (n0, n1) of run 21" in first and "in _sleep" in first and SLOW in first
    assert "in _sleep" in second


def test_a_worker_that_does_not_begin_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, seconds in (("FIRST", 0.2), ("EVERY", 0.05)):
        monkeypatch.setattr(StallWarnings, name, seconds)
    with caplog.at_level(logging.WARNING, "outrider.fleet"), slow("sleep") as session:
        session.run(None, feed(0))
        pid = session._resources.workers[0].pid
        os.kill(pid, signal.SIGSTOP)
        future = session.run_async(None, feed(-2))
        wait_until(lambda: bool(caplog.records))
        os.kill(pid, signal.SIGCONT)
        np.testing.assert_array_equal(future.result(ENOUGH)[0], feed(2)["x"])
    message = caplog.records[0].getMessage()
    assert "has not begun partition 0 (n0) of run 2" in message and "no Python stack" in message


def test_many_runs_with_limits_all_end_and_none_wrongly() -> None:
    """Deadlines, tokens and futures at random, from several threads, about as long as the runs take."""
    wrong: list[Any] = []
    right: list[int] = []

    def calls(number: int, session: InferenceSession) -> None:
        some = random.Random(number)
        for _ in range(60):
            x = np.full((1, 4), some.choice([-1.0, 0.001, 0.003, 0.01]), np.float32)
            x[0, 1:] = some.random()
            token = CancelToken()
            options = RunOptions(
                deadline=some.choice([None, 0.002, 0.005, 0.02]), partition_deadline=ENOUGH, cancel=token
            )
            timer = threading.Timer(some.choice([0.004, 0.02, 0.1]), token.cancel)
            timer.start()
            try:
                if some.random() < 0.5:
                    (y,) = session.run(None, {"x": x}, options)
                else:
                    future = session.run_async(None, {"x": x}, run_options=options)
                    if some.random() < 0.3:
                        time.sleep(0.005 * some.random())
                        if future.cancel():
                            with pytest.raises((CancelledError, errors.RunCancelledError)):
                                future.result(ENOUGH)
                            continue
                    (y,) = future.result(ENOUGH)
                if (y == -x).all():
                    right.append(number)
                else:
                    wrong.append((x, y))
            except (errors.RunTimeoutError, errors.RunCancelledError):
                pass
            except BaseException as error:  # whatever it is: this thread has no other way to tell
                wrong.append(error)
                return
            finally:
                timer.cancel()
                timer.join()

    with slow("look", max_in_flight=3) as session:
        session.run(None, feed(0))
        threads = [threading.Thread(target=calls, args=(number, session)) for number in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(ENOUGH)
        assert not wrong and not any(thread.is_alive() for thread in threads)
        assert right
        right_again(session)
        assert {one["deaths"] for one in session.health().values()} == {0}
