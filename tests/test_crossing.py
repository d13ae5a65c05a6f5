"""Values of every kind cross cuts and come out as from one worker and as from onnxruntime."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest

from outrider.scheduler import Fleet, InferenceSession, SessionOptions
from tests.kernel_harness import same
from tests.oracle import run_ort
from tests.program_harness import model

pytestmark = pytest.mark.fast

WORKERS = ["cpu", "cpu:1", "cpu:2"]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet(WORKERS) as made:
        yield made


def check(fleet: Fleet, proto: onnx.ModelProto, *feeds: dict[str, Any]) -> None:
    """The model on one worker, and with each node on another worker than the one before it, against onnxruntime."""
    for i, node in enumerate(proto.graph.node):
        node.name = f"n{i}"
    pins = {node.name: WORKERS[i % len(WORKERS)] for i, node in enumerate(proto.graph.node)}
    for options in (SessionOptions(fleet=fleet), SessionOptions(fleet=fleet, pins=pins)):
        with InferenceSession(proto, options=options) as session:
            for feed in feeds:
                for result, expected in zip(
                    session.run(None, feed), run_ort(proto.SerializeToString(), feed).values(), strict=True
                ):
                    same(result, expected, 1e-6, 1e-6)


def test_optionals(fleet: Fleet) -> None:
    proto = model("""agraph (float[N] x, optional(seq(float[])) q) => (float[N] y, bool some, bool none, int64 n) {
        o = Optional(x)  p = Identity(o)  y = OptionalGetElement(p)  some = OptionalHasElement(o)
        none = OptionalHasElement(q)
        s = SequenceConstruct(x, y)  t = Optional(s)  u = OptionalGetElement(t)  n = SequenceLength(u) }""")
    x = np.array([1, 2, 3], np.float32)
    check(fleet, proto, {"x": x, "q": [x]}, {"x": x, "q": []}, {"x": x[:0], "q": [x, x]})
