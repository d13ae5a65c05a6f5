"""The cpu provider beside other runtimes on real models: same threads, interleaved; and how long opening them takes.

The provider is measured with its compiled kernels and in NumPy, a session on `--providers` if they are given,
onnxruntime as it comes (its threads spin while they wait) and with `allow_spinning=0`, `nxrt` and `openvino` where they
are installed. Inputs are `NAME.npz` in the folder
`--feeds` or beside `NAME.onnx`, else made: standard normals, integers 0 or 1, sizes of 1 for free dimensions. Every
runtime has a process of its own (`runtimes.py`). Between two variants there is a pause, since a pool that spins still
takes a core for a while.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from outrider.scheduler import InferenceSession, ProviderSpec
from outrider.scheduler.cores import usable_cores
from outrider.tools.bench.chains import runs_of
from outrider.tools.bench.measure import Budget, Request, Round, Row, Sample, interleave, judged, row, skipped, timed
from outrider.tools.bench.nodes import model_feed
from outrider.tools.bench.runtimes import NXRT, OPENVINO, PACKAGES, SPINS, RuntimeRefusal, installed, opened

SECONDS = 0.3  # of runs per variant and round
PAUSE = 0.05
CPU, NUMPY = "cpu", "cpu, NumPy"
OURS: dict[str, bool] = {CPU: True, NUMPY: False}  # -> the option `compiled`
_MODEL = Budget(ratio=1.3)  # of each model, to onnxruntime
_NXRT = Budget(ratio=0.5)
_MEAN = {(CPU, 1): Budget(ratio=1.05), (CPU, 2): Budget(ratio=1.0), (NUMPY, 2): Budget(ratio=1.5)}  # by threads
_MS = 1e-6  # nanoseconds to milliseconds


@dataclass
class _Taken:
    """Ratios over all models: (variant, threads, to) -> one per model."""

    ratios: dict[tuple[str, int, str], list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, name: str, threads: int, to: str, made: Row) -> Row:
        """Note the ratio of a row, and return the row."""
        if made.ratio is not None:
            self.ratios[name, threads, to].append(made.ratio)
        return made

    def means(self) -> list[Row]:
        """Geometric means; the models that `to` does not run are not in them."""
        made = []
        for (name, threads, to), values in sorted(self.ratios.items(), key=lambda pair: (pair[0][2] != SPINS, *pair)):
            value = math.exp(statistics.fmean(map(math.log, values)))
            title = f"geometric mean, {threads_of(threads)}: {name}{'' if to == SPINS else f' to {to}'}"
            mean = Row(title, value, "x", None, min(values), max(values), value, to, note=f"{len(values)} models")
            made.append(judged(mean, _MEAN.get((name, threads)) if to == SPINS else None))
        return made


def rows(request: Request) -> list[Row]:
    """Milliseconds per run, per model and number of threads; what a first run needs; the means over the models."""
    made: list[Row] = []
    taken = _Taken()
    counts = [request.threads] if request.threads else sorted({1, min(2, usable_cores())})
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder:
        for path in request.models:
            feed = str(Path(folder, "feed.npz"))
            for threads in counts:
                made += _compared(request, path, feed, threads, taken)
            made += _opening(request, path, feed, counts[-1])
    made += taken.means()
    for package in dict.fromkeys(PACKAGES.values()):
        if not installed(package):
            made.append(skipped(package, "ms", f"{package} is not installed"))
    return made


def _compared(request: Request, path: str, feed: str, threads: int, means: _Taken) -> list[Row]:
    """Rows of one model; leaves its inputs in the file `feed`."""
    title = f"{os.path.basename(path)}, {threads_of(threads)}"
    samples: dict[str, Sample] = {}
    refused: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        ours = {
            name: stack.enter_context(InferenceSession(path, providers=[_spec(threads, compiled)]))
            for name, compiled in OURS.items()
        }
        if request.providers:
            specs = [replace(spec, threads=spec.threads or threads) for spec in request.providers]
            ours[_session_on(specs)] = stack.enter_context(InferenceSession(path, providers=specs))
        inputs = model_feed(request, path, ours[CPU])
        np.savez(feed, **inputs)
        for name, made in ours.items():
            made.run(None, inputs)
            samples[name] = timed(runs_of(made, inputs), _MS)
        told = ours[CPU].stats()["providers"]["cpu"]
        for name in filter(installed, PACKAGES):
            try:
                samples[name] = stack.enter_context(opened(name, path, feed, threads)).sample
            except RuntimeRefusal as reason:
                refused[name] = str(reason)
        variants = {name: (sample, runs_per_round(request, sample)) for name, sample in samples.items()}
        taken = interleave(variants, request.rounds, PAUSE)
    table = []
    for name, rounds in taken.items():
        note = _kernels(told) if name == CPU else ""
        budget = _MODEL if name == CPU else None
        one = row(f"{title}: {name}", "ms", rounds, taken.get(SPINS), SPINS, budget, note)
        table.append(means.add(name, threads, SPINS, one) if name != SPINS else one)
    for name, budget in ((NXRT, _NXRT), (OPENVINO, None)):
        if name in taken:
            one = row(f"{title}: {CPU} to {name}", "ms", taken[CPU], taken[name], name, budget)
            table.append(means.add(CPU, threads, name, one))
    table += _memory(title, told)
    return table + [skipped(f"{title}: {name}", "ms", reason) for name, reason in refused.items()]


def _spec(threads: int, compiled: bool) -> ProviderSpec:
    return ProviderSpec("cpu", threads=threads, options={"compiled": compiled})


def _session_on(specs: Sequence[ProviderSpec]) -> str:
    return f"session on {', '.join(spec.display for spec in specs)}"


def _kernels(told: Mapping[str, Any]) -> str:
    """Steps of the bound program by what does them, ops by what fused them: '62 or_conv, 3 numpy; fused 40 conv'."""

    def listed(counts: Mapping[str, int]) -> str:
        return ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda pair: -pair[1]))

    return f"{listed(told['steps'])}; fused {listed(told['fused']) or 'nothing'}"


def _memory(title: str, told: Mapping[str, Any]) -> list[Row]:
    """Scratch memory beside what all values would take, packed weights beside what they were made of, in MiB."""
    parts = {
        key: sum(one[key] for one in told["memory"]) / (1 << 20) for key in ("planned", "naive", "originals", "packed")
    }
    rows = []
    for what, made, to in (("scratch memory", "planned", "naive"), ("packed weights", "packed", "originals")):
        ratio = parts[made] / parts[to] if parts[to] else None
        named = "all values" if to == "naive" else "the originals"
        rows.append(Row(f"{title}: {what}", parts[made], "MiB", ratio=ratio, to=named))
    return rows


def runs_per_round(request: Request, sample: Sample) -> int:
    """How many runs of a variant are one round."""
    [taken] = sample(1)
    return request.calls(min(500, max(1, round(SECONDS * 1e3 / max(1e-3, taken)))))


def threads_of(count: int) -> str:
    """'1 thread', '2 threads'."""
    return f"{count} thread{'s' if count > 1 else ''}"


def _opening(request: Request, path: str, feed: str, threads: int) -> list[Row]:
    """Session ready, and the first run, which binds kernels to shapes; a new session in a new process each time."""
    ready: dict[str, list[Round]] = defaultdict(list)
    first: dict[str, list[Round]] = defaultdict(list)
    others = [name for name in (SPINS, OPENVINO) if installed(name)]
    for _ in range(1 if request.quick else min(3, request.rounds)):
        start = time.perf_counter()
        with InferenceSession(path, providers=[_spec(threads, True)]) as ours:
            ready[CPU].append(_since(start))
            inputs = model_feed(request, path, ours)
            start = time.perf_counter()
            ours.run(None, inputs)
            first[CPU].append(_since(start))
        for name in others:
            with contextlib.suppress(RuntimeRefusal), opened(name, path, feed, threads) as other:
                ready[name].append(Round(other.ready))
                first[name].append(Round(other.first))
    return [*_beside(path, "session ready", ready), *_beside(path, "first run", first)]


def _beside(path: str, what: str, taken: Mapping[str, Sequence[Round]]) -> list[Row]:
    base = taken.get(SPINS)
    title = os.path.basename(path)
    return [row(f"{title}: {what}, {name}", "ms", rounds, base, SPINS) for name, rounds in taken.items()]


def _since(start: float) -> Round:
    return Round((time.perf_counter() - start) * 1e3)
