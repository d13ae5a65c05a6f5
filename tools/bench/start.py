"""Start-up, from the import to the first run. All in milliseconds."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx

from outrider.scheduler import Fleet, InferenceSession, SessionOptions
from outrider.scheduler.deploy import Deployer
from outrider.scheduler.placement import Placer
from outrider.tools.bench.chains import relu_chain, session, zeros
from outrider.tools.bench.measure import Budget, Request, Round, Row, Sample, interleave, row

KINDS = ("null", "cpu")
NODES = 20_000
IMPORT = "from outrider.scheduler import InferenceSession, SessionOptions; InferenceSession, SessionOptions"
_PLAN = Budget(value=2000)


def rows(request: Request) -> list[Row]:
    """In the order in which a user meets them."""
    return [*_imports(request), *_sessions(request), *_large(request)]


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
