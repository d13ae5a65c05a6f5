"""The restart policy in real processes: back-off and the open breaker, with and without someone else to do the work."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from outrider.scheduler import Fleet, InferenceSession, SessionOptions, errors, recovery, restarts
from tests.builders import chain

OWN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "own_providers.py")
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
    return until(session, provider, "ready", "back-off", "open", "failed")


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


def right(session: InferenceSession) -> None:
    np.testing.assert_array_equal(session.run(None, {"x": X})[0], np.maximum(X, 0))


@pytest.mark.parametrize("fallback", [True, False])
def test_a_provider_that_does_not_start_again_is_not_tried_again_until_asked_for(
    tmp_path: Path, fallback: bool
) -> None:
    closed = tmp_path / "closed"
    mine = f"{OWN}:Moody"
    with Fleet([(mine, {"closed": str(closed)}), "cpu"]) as fleet:
        options = SessionOptions(fleet=fleet, fallback=fallback)
        with InferenceSession(chain("Relu"), options=options) as session:
            right(session)
            closed.touch()
            health = kill_idle(fleet, session, mine)
            assert (health["state"], health["incarnation"], health["deaths"]) == ("failed", 2, 1)
            assert "closed today" in health["reason"]
            if fallback:
                right(session)
                assert placed(session) == [0, 1]
                assert "failed (" in str(session.placement()) and "closed today" in str(session.placement())
            else:
                with pytest.raises(errors.ProviderUnavailableError, match="closed today") as caught:
                    session.run(None, {"x": X})
                assert caught.value.seconds is None
            assert session.health()[mine]["incarnation"] == 2  # no loop
            with pytest.raises(errors.ProviderUnavailableError, match="closed today"):
                session.restart(mine)
            closed.unlink()
            session.restart(mine)
            right(session)
            assert placed(session) == [1, 0] and session.health()[mine]["state"] == "ready"


def test_sessions_that_share_a_fleet_leave_and_come_back_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "WAITS", (0.0, 0.0, LONG))
    with Fleet(["cpu", "cpu:1"]) as fleet:
        options = SessionOptions(fleet=fleet)
        with (
            InferenceSession(chain("Relu"), options=options) as one,
            InferenceSession(chain("Neg", "Relu"), options=options) as two,
        ):
            for _ in range(2):
                kill_idle(fleet, one, "cpu")
            for session, expected in ((one, np.maximum(X, 0)), (two, np.maximum(-X, 0))):
                np.testing.assert_array_equal(session.run(None, {"x": X})[0], expected)
                assert placed(session)[0] == 0
            two.restart("cpu")
            assert placed(two) == [2, 0]
            deadline = time.monotonic() + ENOUGH
            while placed(one) != [1, 0]:  # it moves by itself
                assert time.monotonic() < deadline
                time.sleep(0.01)
            for session, expected in ((one, np.maximum(X, 0)), (two, np.maximum(-X, 0))):
                np.testing.assert_array_equal(session.run(None, {"x": X})[0], expected)


def test_a_quarantine_is_of_one_model() -> None:
    chaos = ("chaos", {"fault": "sigkill", "phase": "run", "node": "Neg"})
    with Fleet([chaos, "cpu"]) as fleet:
        options = SessionOptions(fleet=fleet)
        with (
            InferenceSession(chain("Neg"), options=options) as bad,
            InferenceSession(chain("Relu"), options=options) as good,
        ):
            np.testing.assert_array_equal(bad.run(None, {"x": X})[0], -X)
            assert len(fleet.health()["chaos"]["quarantined"]) == 1
            bad.restart("chaos")
            np.testing.assert_array_equal(bad.run(None, {"x": X})[0], -X)
            until(bad, "chaos", "ready", "back-off")
            right(good)
            assert "quarantined" in str(bad.placement()) and "quarantined" not in str(good.placement())


class Behind:
    """The lock of a queue of slots, which other threads than `first` have only after `gone` is set."""

    def __init__(self, lock: threading.Lock, first: threading.Thread, gone: threading.Event) -> None:
        self.lock, self.first, self.gone = lock, first, gone

    def acquire(self, wait: bool = True) -> bool:
        held = self.lock.acquire(wait)
        if threading.current_thread() is not self.first:
            assert self.gone.wait(ENOUGH)
        return held

    def release(self) -> None:
        self.lock.release()


def test_a_worker_that_dies_while_its_session_waits_to_move_back_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The time in back-off ends during a restart; the next run is quicker than the supervisor, and kills its worker."""
    monkeypatch.setattr(restarts, "WAITS", (0.0, 0.0, LONG))
    chaos = ("chaos", {"fault": "sigkill", "phase": "run"})
    with InferenceSession(chain("Neg"), providers=[chaos, "cpu"]) as session:
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], -X)  # kills two, and goes to cpu
        (supervisor,), (replica,) = session._resources.supervisors.values(), session._runner.replicas
        slots, gone = session._runner.slots, threading.Event()
        monkeypatch.setattr(slots, "_exclusive", Behind(slots._exclusive, threading.current_thread(), gone))
        place, take = supervisor.place_anew, slots.take

        def due_first() -> object:
            supervisor.call(lambda: supervisor._handle(recovery.Due()))
            deadline = time.monotonic() + ENOUGH
            while not replica.moving:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            return place()

        def taken(*given: object) -> object:
            slot = take(*given)
            gone.set()
            return slot

        monkeypatch.setattr(supervisor, "place_anew", due_first)
        monkeypatch.setattr(slots, "take", taken)
        session.restart("chaos")
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], -X)
        assert session.health()["chaos"]["deaths"] in (3, 4)
