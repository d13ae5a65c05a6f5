"""Runs that take too long or are cancelled: told at once, with the worker's stack, and the session goes on."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.scheduler import CancelToken, Fleet, InferenceSession, RunOptions, SessionOptions, errors
from tests.builders import chain

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
    """The session answers, if need be after its worker has been ended and started anew."""
    for attempt in itertools.count():
        try:
            (y,) = session.run(None, feed(-2))
        except errors.WorkerDiedError:
            assert attempt < 2
        else:
            np.testing.assert_array_equal(y, np.full((1, 4), 2, np.float32))
            return


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
