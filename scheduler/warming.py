"""`warmup`: runs on made inputs, in every slot, so that programs are bound before the first real run; and what the runs
took, for strategies that weigh costs."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from outrider.providers.wire.dtypes import is_tensor, numpy_dtype
from outrider.providers.wire.graph import Value
from outrider.scheduler.checked import invalid_option
from outrider.scheduler.nodearg import split_type
from outrider.scheduler.options import SessionOptions
from outrider.scheduler.runner import Runner
from outrider.scheduler.steady import Signature
from outrider.scheduler.watching import Watch

TIMED = 5  # runs of each feed, of which the shortest counts
LEARNINGS = 3  # times that a plan is made anew from what was measured

Checked = tuple[Mapping[str, Any], Sequence[str], Signature | None]  # feed, outputs, signature
PerPartition = Sequence[Mapping[str, Any]]


def made_feeds(inputs: Sequence[Value], overridable: Collection[str], shapes: Any) -> list[dict[str, Any]]:
    """A feed of zeros (empty strings, empty sequences and maps, None) for each dict of shapes; not checked yet.

    Inputs of static shape, those that are no tensors, and `overridable` ones may be left out. Raises
    InvalidOptionError for shapes that are none.
    """
    expected = "a dict from input name to a shape of whole numbers, or a list of such dicts"
    one_or_more = [shapes] if isinstance(shapes, Mapping) else shapes
    if not isinstance(one_or_more, (list, tuple)) or not all(isinstance(one, Mapping) for one in one_or_more):
        raise invalid_option("shapes", shapes, expected)
    by_name = {value.name: value for value in inputs}
    feeds = []
    for one in one_or_more:
        feed: dict[str, Any] = {}
        for name, shape in one.items():
            try:
                dims = tuple(operator.index(dim) for dim in shape)
            except TypeError:
                dims = (-1,)
            declared = by_name.get(name)
            if any(dim < 0 for dim in dims) or (declared is not None and not is_tensor(declared.dtype)):
                raise invalid_option(f"shapes[{name!r}]", shape, expected + "; only tensors have one")
            feed[name] = _zeros("float32" if declared is None else declared.dtype, dims)
        for value in inputs:
            if value.name in feed or value.name in overridable:
                continue
            if not is_tensor(value.dtype):
                feed[value.name] = {"sequence": [], "map": {}}.get(split_type(value.dtype)[0])
            elif value.shape is not None and all(isinstance(dim, int) for dim in value.shape):
                feed[value.name] = _zeros(value.dtype, tuple(dim for dim in value.shape if isinstance(dim, int)))
        feeds.append(feed)
    return feeds


def largest_sizes(inputs: Sequence[Value], feeds: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Symbolic dimension of the inputs -> its largest size among checked feeds."""
    found: dict[str, int] = {}
    for feed in feeds:
        for value in inputs:
            given = feed.get(value.name)
            if isinstance(given, np.ndarray) and value.shape is not None:
                for dim, size in zip(value.shape, given.shape, strict=True):
                    if isinstance(dim, str):
                        found[dim] = max(size, found.get(dim, 0))
    return found


def _zeros(dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.full(shape, "", dtype=object) if dtype == "string" else np.zeros(shape, numpy_dtype(dtype))


def run_everywhere(
    runner: Runner, feeds: Iterable[Checked], defaults: Mapping[str, Any], options: SessionOptions
) -> None:
    """Run each feed in every slot, those of all replicas at once. The caller has taken all slots.

    `options`: its partition deadline holds. Raises what a run raises.
    """
    for feed, wanted, signature in feeds:
        begun = []
        for slot in runner.slots.items:
            watch = None if options.partition_deadline is None else Watch(None, options.partition_deadline)
            begun.append((slot, runner.begin(slot, feed, defaults, signature, watch=watch)))
        for slot, run in begun:
            runner.finish(slot, run, wanted, signature)


def timed_partitions(
    runner: Runner, feeds: Sequence[Checked], defaults: Mapping[str, Any], counters: Callable[[], PerPartition]
) -> list[tuple[list[int], float]]:
    """Nodes (positions) of each partition of the first replica, and the seconds that it takes in a run.

    Each feed runs TIMED times, one run after the other, and the shortest time counts; feeds count alike. `counters`
    gives `stats()["per_partition"]`. The caller has taken all slots.
    """
    replica = runner.replicas[0]
    plan = replica.blueprint.plan
    slot = replica.slots[0]
    seconds = [0.0] * len(plan.partitions)
    for feed, wanted, signature in feeds:
        shortest = [math.inf] * len(plan.partitions)
        before = counters()
        for _ in range(TIMED):
            runner.finish(slot, runner.begin(slot, feed, defaults, signature), wanted, signature)
            after = counters()
            for number, (early, late) in enumerate(zip(before, after, strict=True)):
                if late["runs"] > early["runs"]:
                    shortest[number] = min(shortest[number], late["seconds"] - early["seconds"])
            before = after
        seconds = [sum(pair) for pair in zip(seconds, shortest, strict=True)]
    nodes = [[node for unit in one.units for node in plan.units[unit].nodes] for one in plan.partitions]
    timed = zip(nodes, seconds, strict=True)
    return [(some, total / len(feeds)) for some, total in timed if total < math.inf]
