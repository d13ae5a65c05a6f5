"""What `health()` and the placement report say of providers: how they are, and what is held against them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from outrider.scheduler import InferenceSession
from outrider.scheduler.health import told
from outrider.scheduler.restarts import Quarantine, Restarts
from tests.builders import chain

pytestmark = pytest.mark.fast
X = np.array([[-2, -1, 0.5, 3]], np.float32)


def test_health_tells_how_long_a_dead_worker_must_wait() -> None:
    restarts = Restarts()
    seen = [told("dead", 1, 0, restarts=restarts, now=100.0)["state"]]
    for _ in range(5):
        restarts.died(100.0)
        health = told("dead", 1, restarts.deaths, restarts=restarts, now=100.5)
        seen.append((health["state"], health.get("seconds")))
    assert seen == ["dead", ("dead", None), ("back-off", 0.5), ("back-off", 1.5), ("back-off", 3.5), ("open", 59.5)]
    assert told("dead", 1, 5, restarts=restarts, now=160.0)["state"] == "dead"  # the next run starts it
    assert told("ready", 2, 5, restarts=restarts, now=100.0) == {
        "state": "ready", "incarnation": 2, "deaths": 5, "quarantined": [],
    }  # fmt: skip
    restarts.boot_failed("no device")
    health = told("dead", 2, 5, restarts=restarts, now=100.0)
    assert (health["state"], health["reason"], "seconds" in health) == ("failed", "no device", False)


def test_health_is_plain_data() -> None:
    quarantine = Quarantine()
    for _ in range(2):
        quarantine.blame("m", ["a", "b"], "own")
    health = told("absent", 0, 0, quarantine.of("own"), reason="no device")
    assert json.loads(json.dumps(health)) == health
    assert health == {
        "state": "absent", "incarnation": 0, "deaths": 0, "reason": "no device",
        "quarantined": [{"model": "m", "nodes": ["a", "b"], "deaths": 2}],
    }  # fmt: skip


def test_a_partition_that_kills_its_worker_is_seen_in_quarantine() -> None:
    providers = [("chaos", {"fault": "sigkill", "phase": "run"}), "cpu"]
    with InferenceSession(chain("Relu", "Neg"), providers=providers) as session:
        assert "quarantined" not in str(session.placement())
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], -np.maximum(X, 0))
        (blamed,) = session.health()["chaos"]["quarantined"]
        assert (blamed["nodes"], blamed["deaths"]) == (["n0", "n1"], 2)
        report = session.placement()
        chaos, cpu = report.to_dict()["providers"]
        assert (chaos["quarantined"], cpu["nodes"]) == ([["n0", "n1"]], 2)
        line = next(line for line in str(report).splitlines() if line.strip().startswith("chaos"))
        assert "quarantined: n0, n1: got nothing, since " in line and "claims none" not in line
