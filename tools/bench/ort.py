"""The worker of `ort` beside onnxruntime in process: same threads, neither spins, both optimise all they can.

What the worker takes beyond the other is what a process of its own costs. Nothing else is measured in between, the two
take turns; the process of onnxruntime measures itself (`runtimes.py`). Inputs are those of `models.py`.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from outrider.scheduler import InferenceSession, ProviderSpec
from outrider.scheduler.cores import usable_cores
from outrider.scheduler.errors import OutriderError
from outrider.tools.bench.chains import runs_of
from outrider.tools.bench.measure import Budget, Request, Round, Row, interleave, judged, row, skipped, timed
from outrider.tools.bench.models import PAUSE, runs_per_round, threads_of
from outrider.tools.bench.nodes import model_feed
from outrider.tools.bench.runtimes import BLOCKS, RuntimeRefusal, installed, opened

RATIO, HOP = 1.03, 0.06  # what the design allows: so many times onnxruntime's time, and ms on top
LONG = 5.0  # ms; the budget is for the median over the models that take so long in onnxruntime
_MS = 1e-6  # nanoseconds to milliseconds


def rows(request: Request) -> list[Row]:
    """Milliseconds per run, per model and number of threads; then the medians over the long models."""
    if not installed(BLOCKS):
        return [skipped("ort worker", "ms", "onnxruntime is not installed")]
    made: list[Row] = []
    for threads in [request.threads] if request.threads else sorted({1, min(2, usable_cores())}):
        long: list[float] = []
        for path in request.models:
            made += _compared(request, path, threads, long)
        if long:
            what = f"median, {threads_of(threads)}: less {HOP * 1e3:g} us, models of {LONG:g} ms and more"
            value = statistics.median(long)
            note = f"{len(long)} models"
            line = Row(what, value, "x", None, min(long), max(long), value, BLOCKS, note=note)
            made.append(judged(line, Budget(ratio=RATIO)))
    return made


def _compared(request: Request, path: str, threads: int, long: list[float]) -> list[Row]:
    """The two rows of one model; its ratio without the hop is added to those of long models, if it is one."""
    title = f"{os.path.basename(path)}, {threads_of(threads)}"
    try:
        with (
            InferenceSession(path, providers=[ProviderSpec("ort", threads=threads)]) as ours,
            tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder,
        ):
            inputs = model_feed(request, path, ours)
            feed = str(Path(folder, "feed.npz"))
            np.savez(feed, **inputs)
            ours.run(None, inputs)
            with opened(BLOCKS, path, feed, threads) as other:
                samples = {"ort worker": timed(runs_of(ours, inputs), _MS), BLOCKS: other.sample}
                variants = {name: (sample, runs_per_round(request, sample)) for name, sample in samples.items()}
                taken = interleave(variants, request.rounds, PAUSE)
    except (OutriderError, RuntimeRefusal) as error:
        return [skipped(f"{title}: ort worker", "ms", str(error).splitlines()[0])]
    worker, base = taken["ort worker"], taken[BLOCKS]
    if statistics.median(one.p50 for one in base) >= LONG:
        long.append(statistics.median((one.p50 - HOP) / other.p50 for one, other in zip(worker, base, strict=True)))
    note = f"{_beyond(worker, base):+,.0f} us beyond {RATIO:g} x + {HOP * 1e3:g} us"
    return [
        row(f"{title}: ort worker", "ms", worker, base, BLOCKS, note=note),
        row(f"{title}: {BLOCKS}", "ms", base),
    ]


def _beyond(worker: Sequence[Round], base: Sequence[Round]) -> float:
    """Microseconds that the worker takes more than the budget allows; below 0 what is left of it."""
    return 1e3 * statistics.median(one.p50 - RATIO * other.p50 - HOP for one, other in zip(worker, base, strict=True))
