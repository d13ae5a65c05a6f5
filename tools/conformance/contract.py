"""Contract cases: what every provider must keep to, whichever operators it serves.

Most are tried on each specimen that the provider takes at least one node of; `cpu` computes the rest. A case says what
it checks and what to do about a failure. What is checked is what somebody outside can see: answers, claims, the life of
the process.
"""

from __future__ import annotations

import dataclasses
import os
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.scheduler import InferenceSession, RunOptions
from outrider.scheduler.errors import OutriderError, ProviderUnavailableError, RunTimeoutError
from outrider.tools.conformance.compare import difference
from outrider.tools.conformance.outcomes import NotForIt, classify
from outrider.tools.conformance.running import COMPANION, Rig, answers, closing_all, memory_of
from outrider.tools.conformance.specimens import (
    SIZE,
    WIDTH,
    Built,
    Constant,
    Part,
    Specimen,
    built,
    chained,
    scalar,
    widened,
)

SIZES = (1, 3, 17, 3, 2, 1, 40, 3)
WIDTHS = (7, 13)
GIVEN_UP = 7  # rows of runs that are given up
LOADINGS, WARM = 50, 10
GROWTH = 32 << 20  # bytes that a worker may have grown by after the loadings beyond the first
WIDE = 1024  # the width of those: matrices of 4 MiB

Check = Callable[[Rig, Specimen], str | None]
Whole = Callable[[Rig, Sequence[Specimen]], str | None]


@dataclass(frozen=True)
class Contract:
    """A case of each specimen. `checks`: what, in a line; `remedy`: what to do when it fails; `suits`: which ones."""

    name: str
    checks: str
    remedy: str
    check: Check
    suits: Callable[[Specimen], bool] = lambda specimen: True


@dataclass(frozen=True)
class WholeContract:
    """A case of the provider as a whole, given the specimens that it takes."""

    name: str
    checks: str
    remedy: str
    check: Whole


# Of each specimen -----------------------------------------------------------------------------------------------------


def _answers(rig: Rig, specimen: Specimen) -> str | None:
    graph = built(specimen)
    feeds = graph.feeds()
    with rig.beside(graph.proto) as session:
        return answers(session, feeds, graph.expected(feeds), graph.tolerance)


def _on(rig: Rig, graph: Built, runs: Sequence[tuple[int, int]], **options: Any) -> str | None:
    """Runs of (size, seed) on one session, each right."""
    with rig.beside(graph.proto, **options) as session:
        for size, seed in runs:
            feeds = graph.feeds(size, seed)
            found = answers(session, feeds, graph.expected(feeds), graph.tolerance)
            if found is not None:
                return f"with {size} rows: {found}" if len({size for size, _ in runs}) > 1 else found
    return None


def _repeated(rig: Rig, specimen: Specimen) -> str | None:
    """The same feed again and again, and another one in between."""
    return _on(rig, built(specimen), [(SIZE, seed) for seed in (0, 0, 0, 1, 0, 0)])


def _shapes(rig: Rig, specimen: Specimen) -> str | None:
    return _on(rig, built(specimen), [(size, seed) for seed, size in enumerate(SIZES)])


def _empty(rig: Rig, specimen: Specimen) -> str | None:
    return _on(rig, built(specimen), [(0, 0), (SIZE, 0), (0, 0)])


def _scalars(rig: Rig, specimen: Specimen) -> str | None:
    return _on(rig, built(scalar(specimen)), [(SIZE, 0), (SIZE, 1)])


def _widths(rig: Rig, specimen: Specimen) -> str | None:
    for width in WIDTHS:
        found = _on(rig, built(widened(specimen, width)), [(SIZE, 0)])
        if found is not None:
            return f"with rows of {width} elements: {found}"
    return None


def _kept(rig: Rig, specimen: Specimen) -> str | None:
    """Results, too large to be copied, of some runs are still right after others."""
    graph = built(specimen)
    with rig.beside(graph.proto) as session:
        held = []
        for size, seed in ((specimen.large, 0), (specimen.large, 1), (SIZE, 2), (SIZE, 3), (specimen.large, 4)):
            feeds = graph.feeds(size, seed)
            held.append((feeds, session.run(None, feeds)))
        for number, (feeds, got) in enumerate(held, 1):
            found = difference(graph.expected(feeds), got, *graph.tolerance)
            if found is not None:
                return f"the result of run {number} of {len(held)}, looked at after the last: {found}"
    return None


def _in_flight(rig: Rig, specimen: Specimen) -> str | None:
    """Several runs asked for at once; the worker serves them one by one, bound to the places of two slots."""
    graph = built(specimen)
    with rig.beside(graph.proto) as session:
        feeds = [graph.feeds(SIZE, seed) for seed in range(6)]
        session.warmup({name: one.shape for name, one in feeds[0].items()})  # binds both slots
        futures = [session.run_async(None, one) for one in feeds]
        for one, future in zip(feeds, futures, strict=True):
            found = difference(graph.expected(one), future.result(), *graph.tolerance)
            if found is not None:
                return found
    return None


def _special(rig: Rig, specimen: Specimen) -> str | None:
    graph = built(specimen)
    feeds = graph.feeds()
    for number, one in enumerate(feeds.values()):
        flat = one.reshape(-1)
        values = np.array(specimen.special, one.dtype)
        flat[number :: len(values) + 2][: len(values)] = values[: len(flat[number :: len(values) + 2])]
    with rig.beside(graph.proto) as session:
        return answers(session, feeds, graph.expected(feeds), graph.tolerance)


def _given_up(rig: Rig, specimen: Specimen) -> str | None:
    """Runs that are given up ever later, until one is not, and then a common one."""
    graph = built(specimen)
    with rig.beside(graph.proto, replay=True) as session:
        for seed, deadline in enumerate((1e-5, 1e-4, 1e-3, 1e-2, 1e-1)):
            try:
                session.run(None, graph.feeds(GIVEN_UP, seed), RunOptions(deadline=deadline))
                break
            except RunTimeoutError:
                continue
        feeds = graph.feeds()
        return answers(session, feeds, graph.expected(feeds), graph.tolerance)


def _levels(rig: Rig, specimen: Specimen) -> str | None:
    for level in ("none", "basic", "all"):
        found = _on(rig, built(specimen), [(SIZE, 0)], optimization=level)
        if found is not None:
            return f"at optimization {level!r}: {found}"
    return None


def _fed(rig: Rig, specimen: Specimen) -> str | None:
    """Constants that are inputs instead, and change from run to run."""
    graph = built(specimen, fed=True)
    with rig.beside(graph.proto) as session:
        for seed in (0, 1):
            feeds = built(specimen, fed=True, seed=seed).feeds()
            found = answers(session, feeds, graph.expected(feeds), graph.tolerance)
            if found is not None:
                return found
    return None


def _independent(rig: Rig, specimen: Specimen) -> str | None:
    """The same specimen twice in a graph, each with inputs and constants of its own."""
    graph = Built((Part(specimen, "a.", 1), Part(specimen, "b.", 2)))
    return _on(rig, graph, [(SIZE, 0), (SIZE, 1), (5, 2)])


def _shared(rig: Rig, specimen: Specimen) -> str | None:
    """A value that two units of the same worker read, and the caller too, or not."""
    parts = (
        Part(specimen, "a.", 1),
        Part(specimen, "b.", 2, {"x": "a.y"}),
        Part(specimen, "c.", 3, {"x": "a.y"}),
    )
    runs = [(SIZE, 0), (SIZE, 1)]
    return _on(rig, Built(parts), runs) or _on(rig, Built(parts, frozenset({"a."})), runs)


def _sessions(rig: Rig, specimen: Specimen) -> str | None:
    """Two sessions on one worker, by turns."""
    graphs = [built(specimen, seed=1), built(specimen, seed=2)]
    opened: list[InferenceSession] = []
    with closing_all(opened):
        for graph in graphs:
            opened.append(rig.beside(graph.proto))
        for turn in range(4):
            graph, session = graphs[turn % 2], opened[turn % 2]
            feeds = graph.feeds(SIZE, turn)
            found = answers(session, feeds, graph.expected(feeds), graph.tolerance)
            if found is not None:
                return found
    return None


def _impossible(rig: Rig, specimen: Specimen) -> str | None:
    """Operands that do not fit, whose shapes the model leaves open: an error, and the next run is right."""
    (second,) = specimen.more
    other = dataclasses.replace(specimen, more={second: ("M", *specimen.more[second][1:])})
    graph = built(other)
    good, bad = graph.feeds(), graph.feeds()
    bad[second] = graph.feeds(SIZE + 1)[second]
    with rig.beside(graph.proto) as session:
        try:
            got = session.run(None, bad)
        except OutriderError as error:
            outcome = classify(error)
            if outcome.kind not in ("ERROR", "MISMATCH"):
                raise
        else:
            shapes = " and ".join(str(list(one.shape)) for one in bad.values())
            return f"operands of {shapes} gave a result of {list(got[0].shape)}, and no error"
        return answers(session, good, graph.expected(good), graph.tolerance)


BASIC = Contract("answers", "it gives the right answer at all", "Decline in claim() what it does not serve.", _answers)
CONTRACTS = (
    Contract(
        "repeated", "runs do not depend on earlier runs",
        "Keep nothing of a run for the next one: no sums, no counters, no values of the first feed.", _repeated,
    ),
    Contract(
        "shapes", "one compiled unit serves every shape that the declared one allows",
        "Read shapes from the arrays of the run, or say per_signature = True.", _shapes, lambda one: one.free,
    ),
    Contract(
        "empty", "tensors without elements", "Handle a dimension of 0, or decline in claim() what may have one.",
        _empty, lambda one: one.may_be_empty,
    ),
    Contract(
        "widths", "rows whose length is no multiple of a vector's",
        "Native code must see to the elements that whole vectors leave over.", _widths, lambda one: one.widens,
    ),
    Contract(
        "scalars", "tensors of rank 0", "A scalar is an array of shape (); decline it in claim() if need be.",
        _scalars, lambda one: one.elementwise,
    ),
    Contract(
        "kept", "results stay what they were when others are computed",
        "Write only to the `out` of the present call, or of a Program to the places of its own bind(); keep neither.",
        _kept, lambda one: one.free,
    ),
    Contract(
        "in-flight", "runs that are asked for at once get their own answers",
        "Runs use several places by turns: write to the `out` of the present call, or what bind() returns to its own.",
        _in_flight,
    ),
    Contract(
        "special", "infinities, and NaN where ONNX leaves no doubt",
        "Compute with IEEE rules; compilers' fast-math options drop them.", _special, lambda one: bool(one.special),
    ),
    Contract(
        "given-up", "a run that nobody waits for does no harm to the next",
        "Leave nothing half done when context.cancelled() becomes true.", _given_up,
    ),
    Contract(
        "levels", "every optimization level gives the same",
        "Compare what unit.optimization switches on with the plain way.", _levels,
    ),
    Contract(
        "fed", "what may be a constant may be fed", "Look a value up among unit.inputs and unit.constants, or decline "
        "in claim() what is not constant.", _fed, lambda one: bool(one.constants),
    ),
    Contract(
        "independent", "units of the same operator keep their own constants and shapes",
        "Keep what belongs to a unit in what compile() returns, not in the provider.", _independent,
    ),
    Contract(
        "shared", "a unit leaves the values alone that it reads",
        "Inputs are read-only, others read them too: compute into new memory, in native code as well. With `strided`, "
        "what one unit returned must stay as it is while others run.", _shared, lambda one: one.like,
    ),
    Contract(
        "sessions", "two models on one worker do not mix", "Key what you keep by the unit, not by names of values.",
        _sessions,
    ),
    Contract(
        "impossible", "operands that do not fit are an error, and the worker goes on",
        "Check shapes before native code uses them.", _impossible,
        lambda one: one.free and one.joins and not one.constants,
    ),
)  # fmt: skip


# Of the provider as a whole -------------------------------------------------------------------------------------------


def _zoo(taken: Sequence[Specimen]) -> Built:
    """All that it takes, side by side, and in a chain what can be chained."""
    parts = [Part(one, f"p{number}.", number) for number, one in enumerate(taken)]
    return Built((*parts, *chained([one for one in taken if one.chains]).parts))


def _claims(rig: Rig, taken: Sequence[Specimen]) -> str | None:
    """Asked about one graph, others, that one again, and that one after a new start: the same claims."""
    zoo = _zoo(taken)
    first = _claimed(rig, zoo)
    for one in taken:
        _claimed(rig, built(one))
    again = _claimed(rig, zoo)
    if again != first:
        return f"asked again about the same graph, it {_told(first, again)}"
    rig.renew()
    fresh = _claimed(rig, zoo)
    if fresh != first:
        return f"asked about it first, in a new process, it {_told(first, fresh)}"
    return None


def _claimed(rig: Rig, graph: Built) -> set[str]:
    try:
        with rig.beside(graph.proto) as session:
            return set(rig.share(session))
    except NotForIt:
        return set()


def _told(before: set[str], after: set[str]) -> str:
    changes = [f"claims {', '.join(sorted(after - before)[:3])} too"] if after - before else []
    changes += [f"does not claim {', '.join(sorted(before - after)[:3])} any more"] if before - after else []
    return " and ".join(changes)


def _cuts(rig: Rig, taken: Sequence[Specimen]) -> str | None:
    """A graph cut at random between the provider and `cpu`."""
    parts = [one for one in taken if one.chains]
    if not parts:
        raise NotForIt("it takes no specimen that can be chained")
    draw = random.Random(0)
    for number in range(4):
        graph = chained([draw.choice(parts) for _ in range(6)])
        feeds = graph.feeds()
        with rig.beside(graph.proto) as session:
            mine = rig.share(session)
        pins = {name: COMPANION for name in mine if number and draw.random() < 0.5}
        if len(pins) < len(mine):
            with rig.beside(graph.proto, pins=pins) as session:
                found = answers(session, feeds, graph.expected(feeds), graph.tolerance)
            if found is not None:
                on = ", ".join(sorted(set(mine) - set(pins)))
                return f"with {on} on the provider and the rest on cpu: {found}"
    return None


def _unloaded(rig: Rig, taken: Sequence[Specimen]) -> str | None:
    """Models of some megabytes that are loaded and closed again and again."""
    specimen = next((one for one in taken if Constant((WIDTH, WIDTH)) in one.constants.values()), taken[0])
    heavy = widened(specimen, WIDE)
    size = SIZE if specimen.constants else WIDE  # of a free dimension
    before: list[int] = []
    for loading in range(LOADINGS):
        graph = built(heavy, seed=loading)
        with rig.beside(graph.proto) as session:
            session.run(None, graph.feeds(size))
        if loading == WARM - 1:
            before = _held(rig)
    memory, files, threads = (now - then for now, then in zip(_held(rig), before, strict=True))
    times = LOADINGS - WARM
    grown = [f"{memory >> 20} MiB"] if memory > GROWTH else []
    grown += [f"{more} {what}" for more, what in ((files, "open files"), (threads, "threads")) if more >= times]
    told = f"its process grew by {' and '.join(grown)} in {times} loadings and runs of {specimen.name}"
    return told if grown else None


def _held(rig: Rig) -> list[int]:
    """What the provider's process holds: bytes of memory, open files, threads."""
    rig.fleet.stats_of(rig.worker)  # answered after what was sent before: the session that was closed is forgotten
    pid = rig.worker.pid
    return [memory_of(pid), *(len(os.listdir(f"/proc/{pid}/{what}")) for what in ("fd", "task"))]


def _saved(rig: Rig, taken: Sequence[Specimen]) -> str | None:
    """Every specimen in one process, which compiles it or has it loaded, and in another, which loads it."""
    declared = rig.worker.hello
    if declared is None or not declared.declares.get("saves"):
        raise NotForIt("it has no save() and load()")
    for time in ("first", "second"):
        rig.renew()
        for specimen in taken:
            found = _answers(rig, specimen)
            if found is not None:
                return f"{specimen.name} in the {time} process: {found}"
    return None


def _killed(rig: Rig, taken: Sequence[Specimen]) -> str | None:
    """Its process is killed, and the next one gives the same answers."""
    graph = built(taken[0])
    feeds = graph.feeds()
    with rig.beside(graph.proto, replay=True) as session:
        before = session.run(None, feeds)
        os.kill(rig.worker.pid, signal.SIGKILL)
        return difference(before, session.run(None, feeds), 0, 0)


def _options(rig: Rig, taken: Sequence[Specimen]) -> str | None:
    """An option that no provider can know."""
    spec = dataclasses.replace(rig.spec, options={**rig.spec.options, "no_such_option_of_any_provider": "1"})
    try:
        with Rig(spec, rig.deadline):
            pass
    except ProviderUnavailableError:
        return None
    raise NotForIt("setup() takes options that it does not know, so a misspelt one goes unnoticed")


def _stops(rig: Rig, taken: Sequence[Specimen]) -> str | None:
    """When the fleet is closed its process ends by itself."""
    graph = built(taken[0])
    with rig.beside(graph.proto) as session:
        session.run(None, graph.feeds())
    process = rig.worker.current.process
    rig.renew()
    code = None if process is None else process.returncode
    return None if code == 0 else f"its process was to stop and ended with code {code}"


WHOLE = (
    WholeContract(
        "claims", "claims do not depend on earlier calls, and name nodes that were shown, each once",
        "claim() must look at nothing but the graph that it is given.", _claims,
    ),
    WholeContract(
        "cuts", "a graph may be cut anywhere", "A unit gets whatever lies between two cuts: compile what it is given, "
        "and return every output of the unit, in order.", _cuts,
    ),
    WholeContract(
        "unloaded", "a model that is closed leaves no memory, open files or threads behind",
        "Free in unload(compiled) what compile() made, and keep no list of units or results.", _unloaded,
    ),
    WholeContract(
        "saved", "what load() makes of a saved state is what compile() made",
        "Count up `version` when what save() writes changes, and raise in load() for what is of no use.", _saved,
    ),
    WholeContract(
        "killed", "after a crash the next process gives the same answers",
        "Leave no lock or file behind that setup() trips over; look at context.incarnation.", _killed,
    ),
    WholeContract(
        "options", "an unknown option is refused", "Raise in setup() for a name in context.options that you do not "
        "know.", _options,
    ),
    WholeContract(
        "stops", "its process ends when it is asked to", "close() must return, and native threads must not keep it.",
        _stops,
    ),
)  # fmt: skip
