"""Partitions of one worker that wait for each other: whatever order their words come in, no run waits for ever."""

import os
import time

import numpy as np
import pytest

from outrider.scheduler import InferenceSession, ProviderSpec, SessionOptions
from tests.builders import model, node, tensor

pytestmark = pytest.mark.fast

OWN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "own_providers.py")
ENOUGH = 60.0  # seconds; only a run that hangs takes so long
X = np.array([[1, -2, 3, -4]], np.float32)


def test_a_lane_passed_over_is_looked_at_again_when_what_it_waits_for_was_served(tmp_path):
    """`add` is put behind `p`, the last partition of its worker that it needs, but needs `q` too, and `q` comes last:
    it becomes ready by a word of its own worker, after which nobody rings."""
    gates = {name: str(tmp_path / name) for name in ("slow", "quick")}
    log = tmp_path / "log"
    log.touch()
    for path in gates.values():
        os.mkfifo(path)
    nodes = [
        node("Identity", "x", "s", "s"), node("Neg", "s", "r", "r"), node("Abs", "r", "t", "t"),
        node("Neg", "t", "q", "q"), node("Abs", "q", "a", "a"), node("Neg", "a", "b", "b"), node("Abs", "b", "z", "z"),
        node("Identity", "x", "f", "f"), node("Neg", "f", "p", "p"), node("Identity", "p", "v", "v"),
        node("Add", "q v", "y", "add"),
    ]  # fmt: skip
    built = model(nodes, [tensor("x", [1, 4])], [tensor("y", [1, 4]), tensor("z", [1, 4])])
    pins = {
        **dict.fromkeys(["r", "q", "p", "add"], "cpu"), **dict.fromkeys(["t", "a", "z"], "cpu:1"), "b": "cpu:2",
        "s": "slow", "f": "quick", "v": "quick",
    }  # fmt: skip
    own = [
        ProviderSpec(f"{OWN}:Gated", name="slow", options={"gate": gates["slow"]}),
        ProviderSpec(f"{OWN}:Gated", name="quick", options={"gate": gates["quick"], "log": str(log)}),
    ]
    opened = {name: os.open(path, os.O_RDWR) for name, path in gates.items()}
    try:
        with InferenceSession(
            built, providers=["cpu", "cpu:1", "cpu:2", *own], options=SessionOptions(pins=pins)
        ) as one:
            order = [part["nodes"] for part in one.placement().to_dict()["partitions"]]
            assert order.index(["r"]) < order.index(["q"]) < order.index(["p"]) < order.index(["add"])
            for number in range(2):
                future = one.run_async(None, {"x": X})
                os.write(opened["quick"], b"..")  # `f` and `v` run
                while len(log.read_text().splitlines()) < 2 * (number + 1):
                    time.sleep(0.01)
                time.sleep(0.05)  # `add` has been looked at once
                os.write(opened["slow"], b".")
                y, z = future.result(ENOUGH)
                np.testing.assert_array_equal(y, -np.abs(X) - X)
                np.testing.assert_array_equal(z, np.abs(X))
    finally:
        for descriptor in opened.values():
            os.close(descriptor)
