"""The restart policy in real processes: back-off and the open breaker, with and without someone else to do the work."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

from outrider.scheduler import Fleet, InferenceSession, SessionOptions, errors, restarts
from tests.builders import chain

X = np.array([[-2, -1, 0.5, 3]], np.float32)
ENOUGH = 60.0  # seconds; what is waited for here takes less than one
LONG = 1000.0  # seconds; no test lasts that long


def until(session: InferenceSession, provider: str, *states: str) -> dict:
    """Wait for one of these states; its health then."""
    deadline = time.monotonic() + ENOUGH
    while True:
        health = session.health()[provider]
        if health["state"] in states:
            return health
        assert time.monotonic() < deadline, health
        time.sleep(0.01)


def kill_idle(fleet: Fleet, session: InferenceSession, provider: str) -> dict:
    """End an idle worker; its health when that has been noticed and it is not being started."""
    (worker,) = [one for one in fleet.workers if one.name == provider]
    until(session, provider, "ready")
    deaths = session.health()[provider]["deaths"]
    os.kill(worker.pid, signal.SIGKILL)
    deadline = time.monotonic() + ENOUGH
    while session.health()[provider]["deaths"] == deaths:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return until(session, provider, "ready", "back-off", "open")


def placed(session: InferenceSession) -> list[int]:
    """How many nodes each provider has."""
    return [one.nodes for one in session.placement().providers]


def test_a_provider_in_back_off_leaves_its_nodes_to_the_next_claimant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "WAITS", (0.0, 0.0, LONG))
    with (
        Fleet(["cpu", "cpu:1"]) as fleet,
        InferenceSession(chain("Relu"), options=SessionOptions(fleet=fleet)) as session,
    ):
        assert kill_idle(fleet, session, "cpu")["state"] == "ready"  # the first restart is immediate
        health = kill_idle(fleet, session, "cpu")
        assert health["state"] == "back-off" and LONG - ENOUGH < health["seconds"] <= LONG
        assert health["quarantined"] == []  # an idle worker's death blames nobody
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], np.maximum(X, 0))
        assert placed(session) == [0, 1]
        assert "back-off (" in str(session.placement())
        session.restart("cpu")
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], np.maximum(X, 0))
        assert session.health()["cpu"]["state"] == "ready"
        assert placed(session) == [1, 0]


def test_back_off_ends_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "WAITS", (0.0, 0.0, 0.3))
    with (
        Fleet(["cpu", "cpu:1"]) as fleet,
        InferenceSession(chain("Relu"), options=SessionOptions(fleet=fleet)) as session,
    ):
        for _ in range(2):
            kill_idle(fleet, session, "cpu")
        deadline = time.monotonic() + ENOUGH
        while placed(session) != [1, 0] or session.health()["cpu"]["state"] != "ready":
            np.testing.assert_array_equal(session.run(None, {"x": X})[0], np.maximum(X, 0))
            assert time.monotonic() < deadline, session.placement()
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], np.maximum(X, 0))


@pytest.mark.parametrize("fallback", [True, False])
def test_the_breaker_opens_at_five_deaths_and_says_how_long(monkeypatch: pytest.MonkeyPatch, fallback: bool) -> None:
    monkeypatch.setattr(restarts, "WAITS", (0.0, 0.0, 0.0, 0.0, 0.0))
    monkeypatch.setattr(restarts, "OPEN_SECONDS", LONG)
    with (
        Fleet(["cpu"]) as fleet,
        InferenceSession(chain("Relu"), options=SessionOptions(fleet=fleet, fallback=fallback)) as session,
    ):
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], np.maximum(X, 0))
        states = [kill_idle(fleet, session, "cpu")["state"] for _ in range(5)]
        assert states == ["ready"] * 4 + ["open"]
        with pytest.raises(errors.ProviderUnavailableError, match="5 times in a row") as caught:
            session.run(None, {"x": X})
        assert caught.value.provider == "cpu" and LONG - ENOUGH < caught.value.seconds <= LONG
        session.restart("cpu")
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], np.maximum(X, 0))
        assert session.health()["cpu"]["deaths"] == 5


def test_a_completed_partition_ends_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "WAITS", (0.0, 0.0, LONG))
    with Fleet(["cpu"]) as fleet, InferenceSession(chain("Relu"), options=SessionOptions(fleet=fleet)) as session:
        for _ in range(3):
            assert kill_idle(fleet, session, "cpu")["state"] == "ready"
            np.testing.assert_array_equal(session.run(None, {"x": X})[0], np.maximum(X, 0))
