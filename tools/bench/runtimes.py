"""Other runtimes, each model of each in a process of its own, which measures itself.

Two thread pools in one process that both look for work take turns at the cores, and a runtime that ends its process
must end no bench. So does the cpu provider, whose workers are processes: wherever a figure comes from, one process
computes and all others sleep in the kernel.

Run as a program, `python -m outrider.tools.bench.runtimes NAME MODEL FEED.npz THREADS`, it opens the model, tells how
long that took, and then makes as many runs as each line of its input says, and tells what each took.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.tools.bench.measure import Sample, timed
from outrider.tools.inputs import read_npz

SPINS, BLOCKS, NXRT, OPENVINO = "onnxruntime", "onnxruntime, no spinning", "nxrt", "openvino"
PACKAGES = {SPINS: "onnxruntime", BLOCKS: "onnxruntime", NXRT: "nxrt", OPENVINO: "openvino"}
_MS = 1e-6  # nanoseconds to milliseconds
_SHOWN = 80  # characters of another runtime's error

Call = Callable[[], object]


class RuntimeRefusal(Exception):
    """Another runtime does not run the model; the message is the beginning of what it says."""


@dataclass(frozen=True)
class Opened:
    """A model that is open in another process. `ready`, `first`: milliseconds until it was, and of the first run."""

    ready: float
    first: float
    sample: Sample


def installed(name: str) -> bool:
    """Whether the package of a runtime can be imported."""
    return importlib.util.find_spec(PACKAGES[name]) is not None


@contextlib.contextmanager
def opened(name: str, path: str, feed: str, threads: int) -> Iterator[Opened]:
    """A model, its inputs in a .npz file, in runtime `name`. Raises RuntimeRefusal."""
    command = [sys.executable, "-m", __name__, name, path, feed, str(threads)]
    environment = {**os.environ, "RAYON_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdin is not None and process.stdout is not None
    questions, answers = process.stdin, process.stdout

    def told() -> Any:
        line = answers.readline()
        if not line:
            raise RuntimeRefusal(f"its process ended with {process.wait()}")
        return json.loads(line)

    def sample(calls: int) -> Sequence[float]:
        print(calls, file=questions, flush=True)
        taken: list[float] = told()
        return taken

    try:
        begun = told()
        if "error" in begun:
            raise RuntimeRefusal(begun["error"])
        yield Opened(begun["ready"], begun["first"], sample)
    finally:
        process.kill()
        process.wait()
        answers.close()
        with contextlib.suppress(BrokenPipeError):
            questions.close()


# In the process of the runtime ---------------------------------------------------------------------------------------
def _onnxruntime(path: str, feed: Mapping[str, Any], threads: int, spinning: bool) -> Call:
    """With every optimisation. Its threads spin while they wait, unless they are told not to."""
    ort: Any = importlib.import_module("onnxruntime")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors
    if not spinning:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    made = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda: made.run(None, feed)


def _nxrt(path: str, feed: Mapping[str, Any]) -> Call:
    made: Any = importlib.import_module("nxrt").InferenceSession(path)
    return lambda: made.run(None, feed)


def _openvino(path: str, feed: Mapping[str, Any], threads: int) -> Call:
    """In float32, as the others compute."""
    core: Any = importlib.import_module("openvino").Core()
    settings = {
        "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32",
    }  # fmt: skip
    request = core.compile_model(path, "CPU", settings).create_infer_request()
    return lambda: request.infer(feed)


def _open(name: str, path: str, feed: Mapping[str, Any], threads: int) -> Call:
    if name == NXRT:
        return _nxrt(path, feed)
    if name == OPENVINO:
        return _openvino(path, feed, threads)
    return _onnxruntime(path, feed, threads, name == SPINS)


def _serve(name: str, path: str, feed: Mapping[str, Any], threads: int) -> Iterator[Any]:
    """What to tell: how the opening went, then the milliseconds of as many runs as each line of the input asks for."""
    importlib.import_module(PACKAGES[name])
    start = time.perf_counter()
    try:
        call = _open(name, path, feed, threads)
        ready = time.perf_counter()
        call()
    except Exception as error:  # other runtimes may raise anything on a model that they do not know
        yield {"error": " ".join(f"{type(error).__name__}: {error}".split())[:_SHOWN]}
        return
    yield {"ready": (ready - start) * 1e3, "first": (time.perf_counter() - ready) * 1e3}
    sample = timed(call, _MS)
    for line in sys.stdin:
        yield sample(int(line))


def main(name: str, path: str, feed: str, threads: str) -> None:
    """Answers go to what standard output is now; whatever a runtime prints goes to standard error."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for answer in _serve(name, path, read_npz(feed), int(threads)):
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
