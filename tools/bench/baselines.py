"""What a message costs by other means on this machine: the baselines of `outrider bench hop`.

Each baseline is a context that gives a `Sample` in microseconds. Its other end is a Python process of its own, started
by exec, which ends when its input does.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import zmq

from outrider.tools.bench.measure import Sample, timed

_RELAY = """
import os, sys
wake, answer = int(sys.argv[1]), int(sys.argv[2])
while int.from_bytes(os.read(wake, 8), sys.byteorder) < 1 << 32:
    os.eventfd_write(answer, 1)
"""
_END = 1 << 32  # a ring that no relay would count up to

_ECHO = """
import sys, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.connect(sys.argv[1])
socket.send(b"here")
while (body := socket.recv()) != b"end":
    socket.send(body)
"""

# The caller's end is in a process of its own too: multiprocessing is nothing that Outrider imports.
_PIPE_ECHO = """
import sys
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[1]))
try:
    while True:
        pipe.send_bytes(pipe.recv_bytes())
except EOFError:
    pass
"""
_PIPE_CALLER = """
import json, multiprocessing, subprocess, sys, time
mine, theirs = multiprocessing.Pipe()
fd = theirs.fileno()
echo = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(fd)], pass_fds=[fd], stdin=subprocess.DEVNULL)
theirs.close()
body = bytes(64)
for line in sys.stdin:
    taken = []
    for _ in range(int(line)):
        start = time.perf_counter_ns()
        mine.send_bytes(body)
        mine.recv_bytes()
        taken.append((time.perf_counter_ns() - start) / 1e3)
    print(json.dumps(taken), flush=True)
mine.close()
echo.wait()
"""


@contextlib.contextmanager
def eventfd_relay() -> Iterator[Sample]:
    """The floor: a ring and the answering ring, between two Python processes, with nothing else."""
    wake, answer = os.eventfd(0), os.eventfd(0)
    try:
        arguments = [sys.executable, "-c", _RELAY, str(wake), str(answer)]
        with _ended(subprocess.Popen(arguments, pass_fds=[wake, answer], stdin=subprocess.DEVNULL)):

            def call() -> None:
                os.eventfd_write(wake, 1)
                os.read(answer, 8)

            call()
            yield timed(call)
            os.eventfd_write(wake, _END)
    finally:
        os.close(wake)
        os.close(answer)


@contextlib.contextmanager
def zeromq_echo() -> Iterator[Sample]:
    """64 bytes to a DEALER and back to the ROUTER over `ipc://`, as control messages travel."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-bench-"))
        socket = stack.enter_context(stack.enter_context(zmq.Context()).socket(zmq.ROUTER))
        socket.setsockopt(zmq.LINGER, 0)
        endpoint = f"ipc://{folder}/e"
        socket.bind(endpoint)
        body = bytes(64)
        process = subprocess.Popen([sys.executable, "-c", _ECHO, endpoint], stdin=subprocess.DEVNULL)
        stack.enter_context(_ended(process))
        peer, _ = socket.recv_multipart()

        def call() -> object:
            socket.send_multipart([peer, body])
            return socket.recv_multipart()

        yield timed(call)
        socket.send_multipart([peer, b"end"])


@contextlib.contextmanager
def pipe_echo() -> Iterator[Sample]:
    """64 bytes through a `multiprocessing.Pipe` and back."""
    command = [sys.executable, "-c", _PIPE_CALLER, _PIPE_ECHO]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    with _ended(process), process.stdout as answers, process.stdin as questions:

        def sample(calls: int) -> Sequence[float]:
            print(calls, file=questions, flush=True)
            taken: list[float] = json.loads(answers.readline())
            return taken

        yield sample


def installed(name: str) -> bool:
    """Whether a package that is no dependency of ours can be imported."""
    return importlib.util.find_spec(name) is not None


@contextlib.contextmanager
def ray_compiled_graph() -> Iterator[Sample]:
    """One actor's method in a Ray compiled graph, called with 64 bytes. Needs `ray`."""
    ray: Any = importlib.import_module("ray")
    dag: Any = importlib.import_module("ray.dag")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-", ignore_cleanup_errors=True))
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # it would report to its makers
        settings = {"include_dashboard": False, "log_to_driver": False, "configure_logging": False}
        ray.init(num_cpus=2, _temp_dir=folder, **settings)
        stack.callback(ray.shutdown)

        class Echo:
            def call(self, body: bytes) -> bytes:
                return body

        actor = ray.remote(Echo).remote()
        with dag.InputNode() as fed:
            graph = actor.call.bind(fed)
        compiled = graph.experimental_compile()
        body = bytes(64)
        yield timed(lambda: ray.get(compiled.execute(body)))
        compiled.teardown()


@contextlib.contextmanager
def _ended(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Wait for the process if the block ends well; kill it otherwise."""
    try:
        yield
        process.wait()
    finally:
        process.kill()
        process.wait()
