"""What one run costs beyond its kernels: chains of `null` partitions over two workers, beside a ZeroMQ echo.

In each round every variant is measured once, one after the other, so that what the machine does otherwise hits all
alike; a row is the median over the rounds of each round's median, and of its ratio to the echo of that round.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import zmq
from onnx import TensorProto, helper

from outrider.scheduler import Fleet, InferenceSession, SessionOptions

WARM, CALLS = 100, 600
LARGE = (64 << 10, 1 << 20, 16 << 20)  # bytes
LENGTHS = (1, 2, 3, 4)
_ECHO = """
import sys, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.connect(sys.argv[1])
socket.send(b"here")
while (body := socket.recv()) != b"end":
    socket.send(body)
"""


def rows(rounds: int) -> list[dict[str, Any]]:
    """One dict per variant: what, p50_us, p99_us (medians over rounds), times_echo."""
    with contextlib.ExitStack() as stack:
        calls: dict[str, Callable[[], object]] = {"ZeroMQ ROUTER/DEALER echo, 64 B": stack.enter_context(_echo())}
        fleet = stack.enter_context(Fleet(["null", "null:1"]))
        for length in LENGTHS:
            name = f"{length} partition{'s' if length > 1 else ''}, 64 B"
            calls[name] = stack.enter_context(_chain(fleet, length, 64))
        for nbytes in LARGE:
            calls[f"2 partitions, {nbytes >> 10} KiB"] = stack.enter_context(_chain(fleet, 2, nbytes))
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                taken[name].append(_measure(call, CALLS if "KiB" not in name else CALLS // 10))
    echo = [p50 for p50, _ in taken[next(iter(taken))]]
    return [
        {
            "what": name,
            "p50_us": statistics.median(p50 for p50, _ in pairs),
            "p99_us": statistics.median(p99 for _, p99 in pairs),
            "times_echo": statistics.median(p50 / base for (p50, _), base in zip(pairs, echo, strict=True)),
        }
        for name, pairs in taken.items()
    ]


def _measure(call: Callable[[], object], calls: int) -> tuple[float, float]:
    """(median, 99th percentile) in microseconds."""
    for _ in range(min(WARM, calls)):
        call()
    taken = []
    for _ in range(calls):
        start = time.perf_counter_ns()
        call()
        taken.append(time.perf_counter_ns() - start)
    taken.sort()
    return taken[len(taken) // 2] / 1e3, taken[len(taken) * 99 // 100] / 1e3


@contextlib.contextmanager
def _echo() -> Iterator[Callable[[], object]]:
    """A process that sends back what it gets."""
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder:
        context = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        endpoint = f"ipc://{folder}/e"
        socket.bind(endpoint)
        process = subprocess.Popen([sys.executable, "-c", _ECHO, endpoint])
        body = bytes(64)
        try:
            peer, _ = socket.recv_multipart()

            def call() -> object:
                socket.send_multipart([peer, body])
                return socket.recv_multipart()

            yield call
            socket.send_multipart([peer, b"end"])
            process.wait()
        finally:
            process.kill()
            process.wait()
            socket.close()
            context.term()


@contextlib.contextmanager
def _chain(fleet: Fleet, length: int, nbytes: int) -> Iterator[Callable[[], object]]:
    """A run through `length` partitions of one node each, in turn on two workers."""
    shape = [nbytes // 4]
    names = ["x", *(f"v{i}" for i in range(1, length)), "y"]
    nodes = [helper.make_node("Relu", [names[i]], [names[i + 1]], name=f"n{i}") for i in range(length)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:])
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    pins = {f"n{i}": ("null", "null:1")[i % 2] for i in range(length)}
    feed = {"x": np.zeros(shape, np.float32)}
    with InferenceSession(model, options=SessionOptions(fleet=fleet, pins=pins)) as session:
        yield lambda: session.run(None, feed)
