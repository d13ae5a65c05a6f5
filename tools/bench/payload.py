"""Large tensors through two partitions, beside one copy of them; and how many copies a run makes, from `stats()`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from outrider.scheduler import Fleet
from outrider.tools.bench.chains import dealt, relu_chain, runs_of, session, zeros
from outrider.tools.bench.measure import Budget, Request, Row, Sample, interleave, judged, row, timed

CALLS = 60
SIZES = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20)  # bytes
COUNTED = 1 << 20
WORKERS = ("null", "null:1")
PLAIN = f"{__package__}.providers:Plain"


def rows(request: Request) -> list[Row]:
    """Latencies in microseconds, then copies and bytes per run."""
    with Fleet([*WORKERS]) as fleet:
        return [*_payloads(request, fleet), *_copies(request)]


def _payloads(request: Request, fleet: Fleet) -> list[Row]:
    """Two partitions with a large tensor, beside one copy of it: only the caller's input is copied."""
    with contextlib.ExitStack() as stack:
        variants: dict[str, tuple[Sample, int]] = {}
        bases: dict[str, str] = {}
        for nbytes in SIZES:
            calls = request.calls(max(20, CALLS // max(1, nbytes >> 20)))
            source, target = np.ones(nbytes // 4, np.float32), zeros(nbytes)
            copy, plain = f"one copy of {_size(nbytes)}", f"2 partitions, {_size(nbytes)}"
            shared = f"{plain}, input in shared memory"
            bases |= dict.fromkeys((copy, plain, shared), copy)
            variants[copy] = (timed(_copies_of(source, target)), calls)
            made = stack.enter_context(session(relu_chain(2, [nbytes // 4]), fleet, dealt(2, WORKERS)))
            variants[plain] = (timed(runs_of(made, {"x": source})), calls)
            place: Any = made.empty("x", [nbytes // 4])
            place[...] = source
            variants[shared] = (timed(runs_of(made, {"x": place})), calls)
        taken = interleave(variants, request.rounds)
    return [row(name, "us", rounds, taken[bases[name]], "one copy") for name, rounds in taken.items()]


def _copies(request: Request) -> list[Row]:
    """Copies of one run, counted by the workers and by the coordinator, from `stats()`."""
    made_rows = []
    nbytes = COUNTED
    kinds = {
        "null": ("null", 0, "writes in place"),
        "cpu": ("cpu", 0, "writes in place"),
        "a plain callable": (PLAIN, 2, "one per output"),
    }
    for name, (kind, allowed, note) in kinds.items():
        with Fleet([kind, f"{kind}:1"]) as fleet:
            pins = dealt(2, (kind, f"{kind}:1"))
            with session(relu_chain(2, [nbytes // 4]), fleet, pins) as made:
                call = runs_of(made, {"x": zeros(nbytes)})
                call()
                runs = request.calls(100)
                before = made.stats()
                for _ in range(runs):
                    call()
                after = made.stats()
        workers = (_of_workers(after, "copies") - _of_workers(before, "copies")) / runs
        copied = (_of_workers(after, "copied_bytes") - _of_workers(before, "copied_bytes")) / runs
        callers = (after["copies"] - before["copies"]) / runs - workers
        allocated = (after["allocated_bytes"] - before["allocated_bytes"]) / runs
        what = f"2 partitions of {name}, {_size(nbytes)}"
        made_rows += [
            judged(Row(f"{what}: by the workers", workers, "copies/run", note=note), Budget(value=allowed)),
            judged(Row(f"{what}: by the workers", copied, "bytes/run"), Budget(value=allowed * nbytes)),
            judged(Row(f"{what}: by the coordinator", callers, "copies/run", note="the input"), Budget(value=1)),
            judged(Row(f"{what}: segment memory", allocated, "bytes/run"), Budget(value=0)),
        ]
    return made_rows


def _of_workers(stats: dict[str, Any], key: str) -> int:
    return sum(worker.get(key, 0) for worker in stats["providers"].values())


def _copies_of(source: Any, target: Any) -> Callable[[], object]:
    return lambda: np.copyto(target, source)


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
