"""The chaos provider: computes as another provider does, and misbehaves when it is told to.

It is for tests of what a program does when a provider crashes, hangs, lies or leaks, those of Outrider and yours:

    providers=[("chaos", {"fault": "sigsegv", "at": 3, "claims": ["Relu"]}), "cpu"]

computes all nodes rightly, Relu in a worker of chaos, and that worker reads a null pointer when its first Relu runs for
the third time. What can be ordered, and when it happens, is in `options.py`; docs/chaos.md has the table of faults.
Without a fault it is the `cpu` provider, or whichever its option `provider` names, one unit per claim.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from outrider.providers.adapters import as_program
from outrider.providers.chaos.faults import commit
from outrider.providers.chaos.idle import IdleThread
from outrider.providers.chaos.inside import Inside, Published
from outrider.providers.chaos.options import Options, parse_options
from outrider.providers.contract import (
    Claim,
    ClaimBrokenError,
    Context,
    Decline,
    Graph,
    Node,
    Place,
    Program,
    Provider,
    Run,
    RunInto,
    Unit,
)
from outrider.providers.loading import load_provider
from outrider.providers.wire.dtypes import numpy_dtype

__all__ = ["ChaosProgram", "ChaosProvider"]

_ALIGN = 64
_WRONG = ("wrong_count", "wrong_dtype", "wrong_shape")
_REFERENCES = ("stale_reference", "wild_reference")


class ChaosProvider(Provider):
    """See the page above. Not one of its faults happens unless it is ordered."""

    def __init__(self) -> None:
        self.options = Options()
        self._inner: Provider
        self._inside: Inside
        self._incarnation = 1
        self._claims = 0
        self._loads = 0
        self._pauses = 0
        self._faulty: frozenset[str] = frozenset()  # names of the nodes of the first unit, if no node was ordered
        self._leaked: list[bytearray] = []
        self._idle: IdleThread | None = None
        self.faults = 0

    def setup(self, context: Context) -> None:
        """Raises ProviderUnavailableError for what it cannot be told, and what the provider that computes raises."""
        self.options = options = parse_options(context.options)
        self._incarnation = context.incarnation
        self._inside = Inside()
        self._note("start")
        self.misbehave("start", 1)
        self._inner = inner = load_provider(options.provider)
        inner.setup(dataclasses.replace(context, options=dict(options.provider_options or {})))
        self.merge, self.per_signature = options.merge, inner.per_signature
        self.capabilities, self.wants_model = inner.capabilities, inner.wants_model
        self.writes_out, self.strided, self.writable = inner.writes_out, inner.strided, inner.writable
        if options.phase == "idle" and options.fault != "none" and self.due("idle", options.at or 1):
            self._idle = IdleThread(options.after, lambda: self.misbehave("idle", options.at or 1))
            self._idle.start()

    def claim(self, graph: Graph) -> list[Claim | Decline]:
        """What the provider that computes claims, as far as the option `claims` lets it."""
        self._claims += 1
        self.misbehave("claim", self._claims)
        answers = [self._narrowed(answer) for answer in self._inner.claim(graph)]
        if self.due("claim", self._claims):
            return _spoilt(self.options.fault, graph, answers)
        return answers

    def _narrowed(self, answer: Claim | Decline) -> Claim | Decline:
        wanted = self.options.claims
        if wanted is None or isinstance(answer, Decline) or all(_named(wanted, node) for node in answer.nodes):
            return answer
        return Decline(answer.nodes[0], f"chaos was told to claim only {', '.join(wanted)}")

    def compile(self, unit: Unit) -> Run | RunInto | Program:
        """The program of the provider that computes; that of the faulty unit, and any if it is to fail when idle, in a
        ChaosProgram. Raises ClaimBrokenError for the fault `refuse_compile`.
        """
        self.works()
        faulty = self._is_faulty(unit)
        if faulty:
            self._loads += 1
            self.misbehave("load", self._loads)
            if self.options.fault == "refuse_compile" and self.due("load", self._loads):
                raise refusal(unit)
        compiled = self._inner.compile(unit)
        self.rests(ran=False)
        if (faulty and self.options.phase == "run") or self._idle is not None:
            return ChaosProgram(self, unit, compiled)
        return compiled

    def _is_faulty(self, unit: Unit) -> bool:
        if self.options.node is not None:
            return any(_named((self.options.node,), node) for node in unit.nodes)
        names = frozenset(node.name for node in unit.nodes)
        self._faulty = self._faulty or names
        return names == self._faulty

    def unload(self, compiled: Run | RunInto | Program) -> None:
        """Passed on to the provider that computes."""
        self._inner.unload(compiled.compiled if isinstance(compiled, ChaosProgram) else compiled)

    def stats(self) -> Mapping[str, Any]:
        """Those of the provider that computes, and `faults`: how many happened in this incarnation."""
        return {**self._inner.stats(), "faults": self.faults}

    def close(self) -> None:
        """The last occasion to misbehave."""
        if self._idle is not None:
            self._idle.end()
        self.misbehave("stop", 1)
        self._inner.close()

    # When ----------------------------------------------------------------------------------------------------------
    def due(self, phase: str, time: int) -> bool:
        """Whether the fault is to happen now: in this phase, for the n-th time that it could."""
        options = self.options
        if options.phase != phase or (options.at is not None and options.at != time):
            return False
        return options.incarnations is None or self._incarnation in options.incarnations

    def misbehave(self, phase: str, time: int) -> None:
        """Commit the fault if it is due and one for any place. See `faults.commit` for what it raises."""
        if self.options.fault != "none" and self.due(phase, time):
            self.faults += 1
            self._note(phase, self.options.fault)
            commit(self.options, self._inside, self._leaked)

    def _note(self, phase: str, fault: str = "none") -> None:
        if self.options.record is None:
            return
        line = json.dumps({"incarnation": self._incarnation, "pid": os.getpid(), "phase": phase, "fault": fault})
        fd = os.open(self.options.record, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            os.write(fd, f"{line}\n".encode())
        finally:
            os.close(fd)

    def works(self) -> None:
        """It is asked for something that it may fail in idleness after."""
        if self._idle is not None:
            self._idle.works()

    def rests(self, ran: bool) -> None:
        """It has done that; `ran`: it was a run."""
        if self._idle is not None:
            self._pauses += ran
            if self._pauses >= (self.options.at or 1) - 1:
                self._idle.rests()


class ChaosProgram(Program):
    """A program of the provider that computes, and a fault in its n-th run."""

    def __init__(self, provider: ChaosProvider, unit: Unit, compiled: Run | RunInto | Program) -> None:
        self.provider = provider
        self.unit = unit
        self.compiled = compiled
        self._program = as_program(compiled, provider.writes_out, unit)
        self.runs = 0

    def bind(self, inputs: Sequence[Any], place: Place) -> Run:
        """See `Program.bind`. For results that are wrong in form it asks for no place and returns them as values."""
        fault, provider = self.provider.options.fault, self.provider
        if fault == "refuse_compile" and provider.due("run", self.runs + 1):
            self.runs += 1
            provider.misbehave("run", self.runs)
            raise refusal(self.unit)
        own: dict[int, np.ndarray] = {}
        run = self._program.bind(inputs, _kept(own) if fault in _WRONG else place)
        published = Published() if fault in _REFERENCES else None

        def call(values: Sequence[Any]) -> Sequence[Any]:
            provider.works()
            self.runs += 1
            due, late = provider.due("run", self.runs), provider.options.late
            if due and not late and fault != "refuse_compile":
                provider.misbehave("run", self.runs)
            returned = [own.get(i, value) for i, value in enumerate(run(values))]
            if due and late and fault != "refuse_compile":
                provider.misbehave("run", self.runs)
            if due and fault in _WRONG:
                returned = _wrong(fault, returned)
            if due and published is not None:
                published.spoil(fault)
            provider.rests(ran=True)
            return returned

        return call


def refusal(unit: Unit) -> ClaimBrokenError:
    """What the fault `refuse_compile` raises."""
    reason = "chaos was told to refuse it"
    names = [node.name for node in unit.nodes]
    message = f"{', '.join(names)} was claimed and cannot be compiled: {reason}"
    return ClaimBrokenError(message, nodes=names, reason=reason)


def _named(wanted: Sequence[str], node: Node) -> bool:
    return node.name in wanted or node.op_type in wanted


def _kept(own: dict[int, np.ndarray]) -> Place:
    """Places of the program's own, by output."""

    def place(i: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        kind = numpy_dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        room = np.empty(count + _ALIGN, np.uint8)
        start = -room.ctypes.data % _ALIGN
        own[i] = room[start : start + count].view(kind).reshape(shape)
        return own[i]

    return place


def _wrong(fault: str, right: list[Any]) -> list[Any]:
    """Outputs that break the contract: one too many, the first of another dtype, or with a dimension too many."""
    if fault == "wrong_count":
        return [*right, right[0]]
    first = np.asarray(right[0])
    if fault == "wrong_shape":
        return [first[None], *right[1:]]
    return [first.astype("float32" if first.dtype == "float64" else "float64"), *right[1:]]


def _spoilt(fault: str, graph: Graph, answers: list[Claim | Decline]) -> list[Claim | Decline]:
    """Answers that break the contract. Unspoilt where there is too little to spoil: no claim, or one only."""
    claims = [answer for answer in answers if isinstance(answer, Claim)]
    if not claims:
        return answers
    if fault == "claim_overlap":
        return [*answers, Claim(claims[0].nodes)]
    if fault == "claim_unknown":
        return [*answers, Claim([dataclasses.replace(graph.nodes[0])])]  # equal, and yet none of those shown
    if fault == "claim_not_convex" and len(claims) > 1:
        declines = [answer for answer in answers if isinstance(answer, Decline)]
        return [*declines, Claim([*claims[0].nodes, *claims[-1].nodes])]
    return answers
