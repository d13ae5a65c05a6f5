"""The cpu provider beside onnxruntime on real models: same threads, interleaved, and how long loading and binding take.

onnxruntime is measured as it comes (its threads spin while they wait) and with `allow_spinning=0`. Inputs are read from
the folder `--feeds`, else made: standard normals, integers 0 or 1, sizes of 1 for free dimensions. Between two variants
there is a pause, since a pool that spins still takes a core for a while.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from outrider.scheduler import InferenceSession, ProviderSpec
from outrider.scheduler.cores import usable_cores
from outrider.tools.bench.baselines import installed
from outrider.tools.bench.measure import Budget, Request, Round, Row, Sample, interleave, judged, row, skipped, timed
from outrider.tools.bench.nodes import model_feed

SECONDS = 0.4  # of runs per variant and round
PAUSE = 0.05
SPINS, BLOCKS, NXRT = "onnxruntime", "onnxruntime, no spinning", "nxrt"
_BUDGET = Budget(ratio=1.5)  # of the geometric mean, in NumPy; compiled kernels are to reach 1.0
_NXRT_BUDGET = Budget(ratio=0.5)
_MS = 1e-6  # nanoseconds to milliseconds

Call = Callable[[], object]


def rows(request: Request) -> list[Row]:
    """Milliseconds per run, per model and number of threads; then what a first run needs."""
    made: list[Row] = []
    ratios: dict[int, list[float]] = {}
    for path in request.models:
        for threads in sorted({1, min(2, usable_cores())}):
            table, ratio = _compared(request, path, threads)
            made += table
            if ratio is not None:
                ratios.setdefault(threads, []).append(ratio)
        made += _opening(request, path)
    for threads, values in ratios.items():
        mean = Row(f"geometric mean, {_threads(threads)}: cpu", None, "x", note="with pure NumPy kernels")
        value = math.exp(statistics.fmean(map(math.log, values)))
        made.append(judged(replace(mean, value=value, ratio=value, to=SPINS), _BUDGET))
    for package in ("onnxruntime", NXRT):
        if not installed(package):
            made.append(skipped(package, "ms", f"{package} is not installed"))
    made.append(skipped("ort worker", "ms", "the ort provider is not built yet; budget 1.03 x onnxruntime + 60 us"))
    return made


def _compared(request: Request, path: str, threads: int) -> tuple[list[Row], float | None]:
    """Rows of one model, and the ratio of cpu to onnxruntime as it comes."""
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(InferenceSession(path, providers=[ProviderSpec("cpu", threads=threads)]))
        feed = model_feed(request, path, ours)
        calls: dict[str, Call] = {"cpu": lambda: ours.run(None, feed)}
        if installed("onnxruntime"):
            calls[SPINS] = _onnxruntime(path, feed, threads, spinning=True)
            calls[BLOCKS] = _onnxruntime(path, feed, threads, spinning=False)
        reason = ""
        if installed(NXRT):
            try:
                calls[NXRT] = _nxrt(path, feed)
            except Exception as error:  # another runtime may raise anything on a model that it does not know
                reason = f"{type(error).__name__}: {error}".splitlines()[0][:80]
        variants: dict[str, tuple[Sample, int]] = {}
        for name, call in calls.items():
            call()
            start = time.perf_counter()
            call()
            count = int(SECONDS / max(1e-6, time.perf_counter() - start))
            variants[name] = (timed(call, _MS), request.calls(min(200, max(2, count))))
        taken = interleave(variants, request.rounds, PAUSE)
    title = f"{os.path.basename(path)}, {_threads(threads)}"
    base = taken.get(SPINS)
    made = [row(f"{title}: {name}", "ms", rounds, base, SPINS) for name, rounds in taken.items() if name != NXRT]
    if NXRT in taken:
        made.append(row(f"{title}: {NXRT}", "ms", taken[NXRT]))
        made.append(row(f"{title}: cpu", "ms", taken["cpu"], taken[NXRT], NXRT, _NXRT_BUDGET))
    elif reason:
        made.append(skipped(f"{title}: {NXRT}", "ms", reason))
    return made, made[0].ratio


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def _onnxruntime(path: str, feed: Mapping[str, Any], threads: int, spinning: bool) -> Call:
    """A run in this process, with every optimisation."""
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
    """A run in this process. Raises what nxrt raises."""
    made: Any = importlib.import_module(NXRT).InferenceSession(path)
    made.run(None, feed)
    return lambda: made.run(None, feed)


def _opening(request: Request, path: str) -> list[Row]:
    """Session ready, and the first run, which binds kernels to shapes; a new session each time."""
    opened: dict[str, list[Round]] = {"cpu": [], SPINS: []}
    first: dict[str, list[Round]] = {"cpu": [], SPINS: []}
    feed: Mapping[str, Any] = {}
    for _ in range(1 if request.quick else min(5, request.rounds)):
        start = time.perf_counter()
        with InferenceSession(path) as ours:
            opened["cpu"].append(_since(start))
            feed = feed or model_feed(request, path, ours)
            start = time.perf_counter()
            ours.run(None, feed)
            first["cpu"].append(_since(start))
        if installed("onnxruntime"):
            start = time.perf_counter()
            call = _onnxruntime(path, feed, usable_cores(), spinning=True)
            opened[SPINS].append(_since(start))
            start = time.perf_counter()
            call()
            first[SPINS].append(_since(start))
    title = os.path.basename(path)
    return [
        row(f"{title}: {what}, {name}", "ms", rounds, taken[SPINS] or None, SPINS)
        for what, taken in (("session ready", opened), ("first run", first))
        for name, rounds in taken.items()
        if rounds
    ]


def _since(start: float) -> Round:
    return Round((time.perf_counter() - start) * 1e3)
