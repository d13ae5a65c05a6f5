"""What a run costs beyond its kernels: chains of `null` partitions over two workers, beside other ways to a process.

Further the general path, and what a bound step adds to its NumPy call. All runs are of 64 bytes.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from outrider.scheduler import Fleet, InferenceSession
from outrider.tools.bench.baselines import eventfd_relay, installed, pipe_echo, ray_compiled_graph, zeromq_echo
from outrider.tools.bench.chains import dealt, relu_chain, runs_of, session, zeros
from outrider.tools.bench.measure import (
    Budget,
    Request,
    Round,
    Row,
    Sample,
    differences,
    interleave,
    row,
    skipped,
    timed,
)

CALLS = 600
WORKERS = ("null", "null:1")
ECHO, RELAY, RAY = "ZeroMQ ROUTER/DEALER echo", "eventfd relay (the floor)", "Ray compiled graph"
PIPE = "multiprocessing.Pipe echo"
STEPS = (100, 600)  # lengths of the two chains whose difference is what a bound step costs

SOME, MANY = 12, 200  # shapes: more than a session keeps ready, more than a worker keeps bound
SPIN = 50  # microseconds
MORE = "each further partition"
TWO_SHAPES, NAMED = "1 partition, two shapes in turn", "1 partition, outputs named"
GENERAL = f"1 partition, {SOME} shapes in turn: the general path"
ANEW = f"1 partition, {MANY} shapes in turn: bound anew"
SPINNING = f"1 partition, spinning for {SPIN} us"
_KNOWN = Budget(value=35, ratio=0.4)  # a run of a known signature
_BUDGETS = {
    "1 partition": _KNOWN,
    TWO_SHAPES: Budget(value=35),
    NAMED: Budget(value=35),
    GENERAL: Budget(value=70),
    MORE: Budget(value=25, ratio=0.25),
}


def rows(request: Request) -> list[Row]:
    """Latencies in microseconds, then a step of a program."""
    with Fleet([*WORKERS]) as fleet:
        return [*_latencies(request, fleet), *_step(request)]


def _latencies(request: Request, fleet: Fleet) -> list[Row]:
    calls = request.calls(CALLS)
    with contextlib.ExitStack() as stack:
        variants: dict[str, tuple[Sample, int]] = {
            ECHO: (stack.enter_context(zeromq_echo()), calls),
            PIPE: (stack.enter_context(pipe_echo()), calls),
            RELAY: (stack.enter_context(eventfd_relay()), calls),
        }
        if installed("ray"):
            variants[RAY] = (stack.enter_context(ray_compiled_graph()), calls)
        for length in (1, 2, 3, 4):
            made = stack.enter_context(session(relu_chain(length, [16]), fleet, dealt(length, WORKERS)))
            variants[_name(length)] = (timed(runs_of(made, {"x": zeros(64)})), calls)
        free = stack.enter_context(session(relu_chain(1, ["n"]), fleet, dealt(1, WORKERS)))
        variants[TWO_SHAPES] = (timed(_in_turn(free, range(15, 17))), calls)
        variants[NAMED] = (timed(runs_of(free, {"x": zeros(64)}, ["y"])), calls)
        variants[GENERAL] = (timed(_in_turn(free, range(16, 16 + SOME))), calls)
        variants[ANEW] = (timed(_in_turn(free, range(16, 16 + MANY))), calls)
        spinning = stack.enter_context(
            session(relu_chain(1, [16]), fleet, dealt(1, WORKERS), config={"spin_us": str(SPIN)})
        )
        variants[SPINNING] = (timed(runs_of(spinning, {"x": zeros(64)})), calls)
        taken = interleave(variants, request.rounds)
    echo = taken[ECHO]
    made_rows = [row(name, "us", rounds, echo, "ZeroMQ echo", _BUDGETS.get(name)) for name, rounds in taken.items()]
    more = differences(taken[_name(4)], taken[_name(1)], 3)
    made_rows.append(row(MORE, "us", more, echo, "ZeroMQ echo", _BUDGETS[MORE]))
    if RAY not in taken:
        made_rows.append(skipped(RAY, "us", "ray is not installed"))
    return made_rows


def _name(length: int) -> str:
    return f"{length} partition{'s' if length > 1 else ''}"


def _step(request: Request) -> list[Row]:
    """A bound step of the cpu provider beyond its NumPy call, from two chains in one partition each."""
    calls = request.calls(200)
    out, fed = zeros(64), zeros(64)
    with Fleet(["cpu"]) as fleet, contextlib.ExitStack() as stack:
        variants: dict[str, tuple[Sample, int]] = {}
        for length in STEPS:
            made = stack.enter_context(session(relu_chain(length, [16], "Abs"), fleet, optimization="none"))
            variants[f"{length}"] = (timed(runs_of(made, {"x": fed})), calls)
        prepared = [(np.absolute, (fed, out))] * (STEPS[1] - STEPS[0])
        variants["numpy"] = (timed(_calls_of(prepared)), calls)
        taken = interleave(variants, request.rounds)
    count = STEPS[1] - STEPS[0]
    numpy = [Round(one.p50 / count) for one in taken["numpy"]]
    step = differences(taken[str(STEPS[1])], taken[str(STEPS[0])], count)
    beyond = differences(step, numpy, 1)
    return [
        row("the NumPy call of a step, alone", "us per step", numpy, note="np.absolute of 16 floats, out="),
        row("the bound step", "us per step", step, numpy, "the NumPy call"),
        row("a bound step beyond its NumPy call", "us per step", beyond, budget=Budget(value=1)),
    ]


def _calls_of(prepared: Sequence[tuple[Callable[..., object], tuple[Any, ...]]]) -> Callable[[], object]:
    def call() -> None:
        for function, arguments in prepared:
            function(*arguments)

    return call


def _in_turn(made: InferenceSession, lengths: Iterable[int]) -> Callable[[], object]:
    """Runs of inputs of so many floats, one after the other, again and again."""
    feeds = itertools.cycle([{"x": zeros(4 * length)} for length in lengths])
    return lambda: made.run(None, next(feeds))
