"""Sessions among threads and event loops: made here, used there, closed elsewhere; many at once, again and again."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from outrider.scheduler import Fleet, InferenceSession, SessionOptions, errors
from tests.builders import chain
from tests.leaks import settled_leaks, snapshot, worker_pids
from tests.test_closing import Call, Stuck
from tests.test_surroundings import SCRIPT

ENOUGH = 60.0
X = np.array([[-2, -1, 0.5, 3]], np.float32)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet(["cpu", "cpu:1"]) as made:
        yield made


def test_made_in_a_thread_that_has_ended_shared_by_eight_and_closed_by_another() -> None:
    """A worker dies with the thread that started it: that is none of the user's."""
    made: list[InferenceSession] = []
    maker = Call(lambda: made.append(InferenceSession(chain("Relu", "Neg"), options=SessionOptions(max_in_flight=4))))
    assert maker.end() is None
    (session,) = made
    session.run(None, {"x": X})

    def runs(value: float) -> None:
        x = np.full((1, 4), value, np.float32)
        for _ in range(50):
            assert session.run(None, {"x": x})[0][0, 0] == -value
            assert session.run_async(None, {"x": x}).result(ENOUGH)[0][0, 0] == -value

    callers = [Call(lambda value=value: runs(value)) for value in range(1, 9)]
    assert [caller.end() for caller in callers] == [None] * 8
    assert session.health()["cpu"]["deaths"] == 0
    assert Call(session.close).end() is None
    assert worker_pids() == []


def test_eight_sessions_opened_and_closed_50_times_keep_everything_flat(fleet: Fleet) -> None:
    options = SessionOptions(fleet=fleet, pins={"n1": "cpu:1"})

    def cycle() -> None:
        sessions = [InferenceSession(chain("Relu", "Neg"), options=options) for _ in range(8)]
        for session in sessions:
            np.testing.assert_array_equal(session.run(None, {"x": X})[0], -np.maximum(X, 0))
        for session in sessions[::2] + sessions[1::2]:
            session.close()

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    for _ in range(5):  # caches fill
        cycle()
    before, memory = snapshot(), resident()
    for _ in range(45):
        cycle()
    assert settled_leaks(before, ENOUGH) == []
    assert resident() - memory < 20 << 20


def test_two_coordinators_at_once_know_nothing_of_each_other(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    told = [tmp_path / name for name in ("one", "two")]
    both = [subprocess.Popen([sys.executable, str(script), str(path)], stderr=subprocess.DEVNULL) for path in told]
    assert [process.wait(120) for process in both] == [0, 0]
    assert [path.read_text() for path in told] == ["right", "right"]


# asyncio -------------------------------------------------------------------------------------------------------------
def test_awaiting_many_and_a_loop_that_makes_and_closes_the_session(fleet: Fleet) -> None:
    async def main() -> list[float]:
        with InferenceSession(chain("Neg"), options=SessionOptions(fleet=fleet, max_in_flight=3)) as session:
            feeds = [{"x": np.full((1, 4), value, np.float32)} for value in range(40)]
            results = await asyncio.gather(*(session.run_async(None, feed) for feed in feeds))
            return [float(result[0][0, 0]) for result in results]

    assert asyncio.run(main()) == [-float(value) for value in range(40)]


def test_a_cancelled_task_and_one_that_ran_out_of_time_leave_a_usable_session(tmp_path: Path) -> None:
    stuck = Stuck(tmp_path)

    async def main(session: InferenceSession) -> None:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await session.run_async(None, {"x": X})
        task = asyncio.ensure_future(session.run_async(None, {"x": X}))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stuck.armed.unlink()
        assert (await session.run_async(None, {"x": X}))[0].max() == 3

    options = SessionOptions(max_in_flight=1)
    with InferenceSession(chain("Relu"), providers=[stuck.provider("run")], options=options) as session:
        session.run(None, {"x": X})
        stuck.armed.touch()
        asyncio.run(main(session))


def test_a_loop_that_is_closed_with_runs_in_flight(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stuck = Stuck(tmp_path)
    loop = asyncio.new_event_loop()
    with InferenceSession(chain("Relu"), providers=[stuck.provider("run")]) as session:
        session.run(None, {"x": X})
        stuck.armed.touch()
        futures = [session.run_async(None, {"x": X}) for _ in range(3)]

        async def look() -> None:
            for future in futures:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), 0.01)

        loop.run_until_complete(look())
        stuck.reached()
        loop.close()
        session._resources.hurry()
    assert {type(future.exception(ENOUGH)) for future in futures} == {errors.SessionClosedError}
    assert "Event loop is closed" not in caplog.text


def test_close_in_a_loop_ends_what_other_tasks_await(tmp_path: Path) -> None:
    stuck = Stuck(tmp_path)

    async def main() -> None:
        session = InferenceSession(chain("Relu"), providers=[stuck.provider("run")])
        await session.run_async(None, {"x": X})
        stuck.armed.touch()
        tasks = [asyncio.ensure_future(session.run_async(None, {"x": X})) for _ in range(4)]
        await asyncio.to_thread(stuck.reached)
        session._fleet.monitor.hurry()
        session.close()
        for task in tasks:
            with pytest.raises(errors.SessionClosedError):
                await task

    asyncio.run(main())
