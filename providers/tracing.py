"""Spans of units, for the worker: only where a session is traced does anything here run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from time import monotonic_ns
from typing import Any

import numpy as np

from outrider.providers.binding import BoundUnit
from outrider.providers.contract import Run, Unit
from outrider.providers.wire.failures import first_names
from outrider.providers.wire.spans import Args, Recorder
from outrider.shm.board import Layout


@contextlib.contextmanager
def unit_span(recorder: Recorder, unit: Unit, args: Args) -> Iterator[Args]:
    """The span of one run of a unit. A unit of one node counts for its operator, unless its provider told of steps."""
    steps, start = recorder.steps, monotonic_ns()
    with recorder.timed("unit", unit_name(unit), args):
        yield args
    if len(unit.nodes) == 1 and recorder.steps == steps:
        recorder.count(unit.nodes[0].label, monotonic_ns() - start)


def unit_name(unit: Unit) -> str:
    """Names of its nodes, the first three of many."""
    return first_names([node.name for node in unit.nodes])


def run_unit(
    recorder: Recorder, bound: BoundUnit, slot: int, arguments: Sequence[Any], targets: Mapping[str, Layout]
) -> list[tuple[int, Any]]:
    """`bound.run(slot, arguments, targets)` with its span, which tells what was written."""
    with unit_span(recorder, bound.unit, {}) as args:
        results = bound.run(slot, arguments, targets)
        args.update(written(bound, results))
    return results


def written(bound: BoundUnit, results: Sequence[tuple[int, Any]]) -> Args:
    """`bytes` of the arrays that a unit wrote; `writes`: value -> its bytes, or 'encoded' for strings and sequences."""
    writes = {
        port.name: value.nbytes if isinstance(value, np.ndarray) and not value.dtype.hasobject else "encoded"
        for port, (_, value) in zip(bound.outputs, results, strict=True)
    }
    return {"bytes": sum(size for size in writes.values() if isinstance(size, int)), "writes": writes}


def repeated(recorder: Recorder, unit: Unit, args: Args, call: Run) -> Run:
    """`call`, which runs the unit again on the same places, with the span of each time."""

    def traced(inputs: Sequence[Any]) -> Sequence[Any]:
        with unit_span(recorder, unit, dict(args)):
            return call(inputs)

    return traced
