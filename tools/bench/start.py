"""Start-up, from the import to the first run, and what is lost when a worker is killed. All in milliseconds."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import onnx

from outrider.scheduler import Fleet, InferenceSession, SessionOptions
from outrider.scheduler.deploy import Deployer
from outrider.scheduler.errors import WorkerDiedError
from outrider.scheduler.placement import Placer
from outrider.tools.bench.chains import relu_chain, session, zeros
from outrider.tools.bench.measure import Budget, Request, Round, Row, Sample, interleave, row, skipped, summary

KINDS = ("null", "cpu")
NODES = 20_000
IMPORT = "from outrider.scheduler import InferenceSession, SessionOptions; InferenceSession, SessionOptions"
STUCK = f"{__package__}.providers:Stuck"
_DEATH, _REVIVAL, _PLAN = Budget(value=50), Budget(value=1000), Budget(value=2000)


def rows(request: Request) -> list[Row]:
    """In the order in which a user meets them."""
    return [*_imports(request), *_sessions(request), *_deaths(request), *_large(request)]


def _imports(request: Request) -> list[Row]:
    bare, ours = "python starts and ends", "python imports outrider's session"
    variants: dict[str, tuple[Sample, int]] = {bare: (_python("pass"), 2), ours: (_python(IMPORT), 2)}
    taken = interleave(variants, request.rounds)
    return [row(name, "ms", rounds, taken[bare], "python") for name, rounds in taken.items()]


def _python(code: str) -> Sample:
    def sample(calls: int) -> list[float]:
        taken = []
        for _ in range(calls):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True, stdin=subprocess.DEVNULL)
            taken.append(_ms(start))
        return taken

    return sample


def _sessions(request: Request) -> list[Row]:
    """Each step of a session of one small model, with a new fleet each time."""
    steps = ("workers said Hello", "session ready on them", "first run", "session closed", "workers stopped")
    taken: dict[tuple[str, str], list[Round]] = {(kind, step): [] for kind in KINDS for step in steps}
    model, feed = relu_chain(1, [16]), {"x": zeros(64)}
    for _ in range(request.rounds):
        for kind in KINDS:
            clock = [time.perf_counter()]
            fleet = Fleet([kind])
            clock.append(time.perf_counter())
            with fleet:
                with session(model, fleet) as made:
                    clock.append(time.perf_counter())
                    made.run(None, feed)
                    clock.append(time.perf_counter())
                clock.append(time.perf_counter())
            clock.append(time.perf_counter())
            for step, begun, ended in zip(steps, clock, clock[1:], strict=False):
                taken[kind, step].append(Round((ended - begun) * 1e3))
    return [row(f"{kind}: {step}", "ms", rounds) for (kind, step), rounds in taken.items()]


def _deaths(request: Request) -> list[Row]:
    """A worker is killed in a run: until the caller has its error. One is killed idle: until a run has its result."""
    count = request.calls(50)
    died, revived = summary(_errors(count)), summary(_revivals(count))
    return [
        row("SIGKILL in a run -> WorkerDiedError", "ms", [died], budget=_DEATH),
        row("SIGKILL of an idle cpu worker -> right result", "ms", [revived], budget=_REVIVAL),
        skipped("SIGKILL in a run -> right result", "ms", "replay is not built yet; budget 1 s"),
    ]


def _errors(count: int) -> list[float]:
    """Milliseconds from the kill to the error in the thread that called `run`."""
    taken = []
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder, contextlib.ExitStack() as stack:
        fifo = f"{folder}/running"
        os.mkfifo(fifo)
        running = os.open(fifo, os.O_RDWR)  # so that neither end waits for the other to open it
        stack.callback(os.close, running)
        fleet = stack.enter_context(Fleet([(STUCK, {"running": fifo})]))
        made = stack.enter_context(session(relu_chain(1, [16]), fleet))
        crew = stack.enter_context(ThreadPoolExecutor(1))
        for _ in range(count):
            error = crew.submit(_death_seen, made)
            os.read(running, 1)
            start = _kill(fleet)
            taken.append((error.result() - start) * 1e3)
    return taken


def _death_seen(made: InferenceSession) -> float:
    """A run that ends with its worker; the moment at which its caller knows."""
    try:
        made.run(None, {"x": zeros(64)})
    except WorkerDiedError:
        return time.perf_counter()
    raise AssertionError("a provider that never returns has returned")


def _revivals(count: int) -> list[float]:
    """Milliseconds from the kill to the first result after it."""
    taken = []
    with Fleet(["cpu"]) as fleet, session(relu_chain(1, [16]), fleet) as made:
        for _ in range(count):
            made.run(None, {"x": zeros(64)})
            start = _kill(fleet)
            while not _runs(made):
                pass
            taken.append(_ms(start))
    return taken


def _runs(made: InferenceSession) -> bool:
    """False when the run met the death."""
    try:
        made.run(None, {"x": zeros(64)})
    except WorkerDiedError:
        return False
    return True


def _kill(fleet: Fleet) -> float:
    """Kill the fleet's only worker; the moment before."""
    process = fleet.workers[0].current.process
    assert process is not None
    start = time.perf_counter()
    os.kill(process.pid, signal.SIGKILL)
    return start


def _large(request: Request) -> list[Row]:
    """A file of many nodes: reading it, asking and planning, loading the plan on a `null` worker."""
    steps = ("file read, checked, lowered", "claimed and planned", "loaded")
    taken: dict[str, list[Round]] = {step: [] for step in (*steps, "file -> plan")}
    nodes = request.calls(NODES)
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder, Fleet(["null"]) as fleet:
        path = Path(folder) / "large.onnx"
        onnx.save(relu_chain(nodes, ["n", 4]), path)
        for _ in range(1 if request.quick else min(5, request.rounds)):
            spent: dict[str, float] = {}
            with _clocked(Placer, "place", spent), _clocked(Deployer, "deploy", spent):
                start = time.perf_counter()
                made = InferenceSession(str(path), options=SessionOptions(fleet=fleet))
                total = _ms(start)
            made.close()
            parts = [total - spent["place"] - spent["deploy"], spent["place"], spent["deploy"]]
            for step, part in zip(steps, parts, strict=True):
                taken[step].append(Round(part))
            taken["file -> plan"].append(Round(parts[0] + parts[1]))
    return [
        row(f"{nodes:,} nodes: {step}", "ms", rounds, budget=_PLAN if step == "file -> plan" else None)
        for step, rounds in taken.items()
    ]


@contextlib.contextmanager
def _clocked(owner: Any, name: str, spent: dict[str, float]) -> Iterator[None]:
    """While the block runs, calls of this method add their milliseconds to `spent[name]`."""
    method = getattr(owner, name)

    def call(*args: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(*args)
        finally:
            spent[name] = spent.get(name, 0.0) + _ms(start)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, method)


def _ms(start: float) -> float:
    return (time.perf_counter() - start) * 1e3
