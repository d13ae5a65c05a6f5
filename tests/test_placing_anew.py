"""The model is placed anew again and again, and workers are shipped what they lack each time."""

from __future__ import annotations

import os

import numpy as np

from outrider.scheduler import InferenceSession
from tests.builders import chain

DOOMED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "slow_providers.py") + ":Doomed"


def test_a_worker_that_dropped_a_unit_for_a_plan_that_failed_elsewhere_gets_it_again() -> None:
    """`cpu` has both nodes; then only the second, in a plan that its neighbour does not survive; then both again."""
    x = np.ones((1, 4), np.float32)
    with InferenceSession(chain("Identity", "Neg"), providers=[DOOMED, "cpu"]) as session:
        for _ in range(2):
            np.testing.assert_array_equal(session.run(None, {"x": x})[0], -x)
            assert {node["provider"] for node in session.placement().to_dict()["nodes"]} == {"cpu"}
            session.restart(DOOMED)
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], -x)
        assert session.health()[DOOMED]["deaths"] >= 4
        assert session.health()["cpu"]["deaths"] == 0
