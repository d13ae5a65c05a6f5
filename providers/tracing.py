"""Spans of units, for the worker: only where a session is traced does anything here run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from time import monotonic_ns
from typing import Any

import numpy as np

from outrider.providers.binding import BoundUnit
from outrider.providers.contract import Run, Unit
from outrider.providers.wire.failures import first_names
from outrider.providers.wire.spans import Args, Recorder
from outrider.shm.board import Layout


def unit_name(unit: Unit) -> str:
    """Names of its nodes, the first three of many."""
    return first_names([node.name for node in unit.nodes])


def run_unit(
    recorder: Recorder,
    bound: BoundUnit,
    slot: int,
    arguments: Sequence[Any],
    targets: Mapping[str, Layout],
    loose: Collection[int],
) -> list[tuple[int, Any]]:
    """`bound.run(slot, arguments, targets, loose)` with its span, which tells what was written."""
    results: list[tuple[int, Any]] = []
    args: Args = {}

    def call(inputs: Sequence[Any]) -> Sequence[Any]:
        results.extend(bound.run(slot, inputs, targets, loose))
        args.update(written(bound, results))
        return results

    repeated(recorder, bound.unit, args, call)(arguments)
    return results


def written(bound: BoundUnit, results: Sequence[tuple[int, Any]]) -> Args:
    """`bytes` of the arrays that a unit wrote; `writes`: value -> its bytes, 'encoded' for strings and sequences, or
    'passed' for what has no place.
    """
    writes: dict[str, int | str] = {
        port.name: value.nbytes if isinstance(value, np.ndarray) and not value.dtype.hasobject else "encoded"
        for port, (_, value) in zip(bound.outputs, results, strict=True)
    }
    writes.update((bound.outputs[i].name, "passed") for i in bound.loose)
    return {"bytes": sum(size for size in writes.values() if isinstance(size, int)), "writes": writes}


def repeated(recorder: Recorder, unit: Unit, args: Args, call: Run) -> Run:
    """`call`, which runs the unit, with the span of each time.

    A unit of one node counts for its operator, unless its provider tells of steps.
    """
    name = unit_name(unit)
    operator = unit.nodes[0].label if len(unit.nodes) == 1 else ""

    def traced(inputs: Sequence[Any]) -> Sequence[Any]:
        steps, start = recorder.steps, monotonic_ns()
        try:
            returned = call(inputs)
        except BaseException as error:
            recorder.add("unit", name, start, monotonic_ns(), {**args, "error": type(error).__name__})
            raise
        end = monotonic_ns()
        recorder.add("unit", name, start, end, args)
        if operator and recorder.steps == steps:
            recorder.count(operator, end - start)
        return returned

    return traced
