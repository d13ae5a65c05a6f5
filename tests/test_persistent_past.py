"""A decoder whose past lies in memory of the caller's that is kept, input and output of each step in the same place."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.scheduler import InferenceSession
from tests.builders import model, node, tensor

pytestmark = pytest.mark.fast

CAPACITY, FIRST, STEPS = 128, 4, 8


def test_a_past_that_grows_in_place_is_replayed() -> None:
    nodes = [node("Concat", "past x", "present", axis=0), node("ReduceSum", "present axes", "y", keepdims=0)]
    inputs, outputs = [tensor("past", ["L", 4]), tensor("x", [1, 4])], [tensor("present", ["T", 4]), tensor("y", [4])]
    with InferenceSession(model(nodes, inputs, outputs, {"axes": np.array([0], np.int64)})) as session:
        past = session.empty("past", (CAPACITY, 4))
        past[:FIRST] = np.arange(FIRST * 4).reshape(FIRST, 4)
        x = session.empty("x", (1, 4))
        wanted = past[:FIRST].copy()
        for length in range(FIRST, FIRST + STEPS):
            x[...] = length
            binding = session.io_binding()
            binding.bind_cpu_input("past", past[:length])
            binding.bind_cpu_input("x", x)
            present = past[: length + 1]
            binding.bind_output("present", "cpu", 0, np.float32, present.shape, present.ctypes.data)
            binding.bind_output("y")
            session.run_with_iobinding(binding)
            wanted = np.concatenate([wanted, x])
            np.testing.assert_array_equal(past[: length + 1], wanted)
            np.testing.assert_array_equal(binding.get_outputs()[1].numpy(), wanted.sum(0))
        made = session.stats()
    assert made["providers"]["cpu"]["reshaped"] == {"primed": 1, "rebuilt": 1, "replayed": STEPS - 2}
    assert made["copies"] == 2 * STEPS  # the present, which overlaps what the run reads, and y; no input
