"""Where the milliseconds of a model go in the cpu provider: a trace of some runs, added up.

In a traced run every op is timed by itself, so compiled kernels that follow one another are no longer one call, and
the pool may fall asleep between them: a sum is a little more than what a run takes otherwise. Rows: the run, traced and
not; the sums per kind of op and what computed it; the ops that take longest. The ratio is the share of all ops.
"""

from __future__ import annotations

import bisect
import json
import os
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from outrider.scheduler import InferenceSession, ProviderSpec
from outrider.scheduler.cores import usable_cores
from outrider.tools.bench.measure import Request, Row, interleave, row, timed
from outrider.tools.inputs import make_inputs, read_npz

RUNS = 30
SHOWN = 40  # ops
LONGEST = 70  # characters of a name, whose end says more
_MS = 1e-6  # nanoseconds to milliseconds


class Work(NamedTuple):
    """One op of one run: the node, the operator and the kernels that computed it, us without what ran inside it, as the
    body of a loop does, and its multiplications and additions.
    """

    node: str
    kernel: str
    took: float
    operations: int


def rows(request: Request) -> list[Row]:
    """Per model; milliseconds per run, medians over the runs."""
    return [made for path in request.models for made in _of(request, path)]


def _of(request: Request, path: str) -> list[Row]:
    threads = request.threads or usable_cores()
    spec = ProviderSpec("cpu", threads=threads, options={"compiled": request.compiled})
    title = os.path.basename(path)
    calls = request.calls(RUNS)
    with InferenceSession(path, providers=[spec]) as ours:
        feed = model_feed(request, path, ours)
        ours.run(None, feed)
        plain = interleave({"run": (timed(lambda: ours.run(None, feed), _MS), calls)}, request.rounds)["run"]
        ours.start_trace()
        for _ in range(calls):
            ours.run(None, feed)
        runs = _traced(ours)
    per_node: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * len(runs))
    operations: Counter[tuple[str, str]] = Counter()
    for i, run in enumerate(runs):
        for work in run:
            per_node[work.node, work.kernel][i] += work.took / 1e3
            operations[work.node, work.kernel] += work.operations
    took = {key: statistics.median(times) for key, times in per_node.items()}
    whole = sum(took.values())
    kinds: defaultdict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    effort: Counter[str] = Counter()
    for key, value in took.items():
        kinds[key[1]] += value
        counts[key[1]] += 1
        effort[key[1]] += operations[key] // len(runs)
    made = [row(f"{title}: a run", "ms", plain), Row(f"{title}: all ops", whole, "ms", note=f"{len(took)} ops")]
    for kind, value in sorted(kinds.items(), key=lambda pair: -pair[1]):
        note = f"{counts[kind]} ops{_speed(effort[kind], value)}"
        made.append(Row(f"{title}: all {kind}", value, "ms", ratio=value / whole, to="all", note=note))
    for key, value in sorted(took.items(), key=lambda pair: -pair[1])[:SHOWN]:
        note = f"{key[1]}{_speed(operations[key] // len(runs), value)}"
        made.append(Row(f"{title}: {key[0]}"[-LONGEST:], value, "ms", ratio=value / whole, to="all", note=note))
    return made


def _speed(operations: int, ms: float) -> str:
    return f", {operations / ms / 1e6:.1f} GF/s" if operations and ms else ""


def _traced(ours: InferenceSession) -> list[list[Work]]:
    """The ops of each run since the trace began."""
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder:
        path = os.path.join(folder, "trace.json")
        ours.stop_trace(path)
        events = [event for event in json.loads(Path(path).read_text())["traceEvents"] if event["ph"] == "X"]
    starts = sorted(event["ts"] for event in events if event["cat"] == "run")
    steps = sorted((event for event in events if event["cat"] == "step"), key=lambda e: (e["ts"], -e["dur"]))
    inside = [0.0] * len(steps)  # of each step, the time of the steps in it
    around: list[int] = []
    for at, step in enumerate(steps):
        while around and steps[around[-1]]["ts"] + steps[around[-1]]["dur"] <= step["ts"]:
            around.pop()
        if around:
            inside[around[-1]] += step["dur"]
        around.append(at)
    runs: list[list[Work]] = [[] for _ in starts]
    for step, within in zip(steps, inside, strict=True):
        args = step["args"]
        kernel = args.get("kernel", args.get("op", step["name"]))
        work = Work(step["name"], kernel, max(0.0, step["dur"] - within), args.get("operations", 0))
        runs[bisect.bisect(starts, step["ts"]) - 1].append(work)
    return runs


def model_feed(request: Request, path: str, made: InferenceSession) -> Mapping[str, Any]:
    """The model's own inputs, NAME.npz in the folder that was given or beside the model, else made ones."""
    for folder in (request.feeds, os.path.dirname(path)):
        given = Path(folder or ".", f"{Path(path).stem}.npz")
        if given.exists():
            return read_npz(str(given))
    return make_inputs(made.get_inputs())
