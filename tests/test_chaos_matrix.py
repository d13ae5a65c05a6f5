"""The chaos matrix (`chaos_matrix.md`): each of its cells in real processes, and that it has all cells."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.providers.chaos.options import FAULTS
from outrider.scheduler import Fleet, InferenceSession, ProviderSpec, SessionOptions
from outrider.scheduler.errors import OutOfMemoryError, OutriderError, ProviderUnavailableError, WorkerDiedError
from tests.builders import model, node, tensor

TABLE = Path(__file__).with_name("chaos_matrix.md")
PHASES = {"start": "start", "claim": "claim", "load": "load", "idle": "idle", "first run": "run", "steady run": "run",
          "stop": "stop"}  # fmt: skip
POLICIES = {"neither": (False, False), "replay": (True, False), "fallback": (True, True)}
ENDS = ("sigsegv", "sigabrt", "sigkill", "exit", "malformed_message")  # faults that end the worker by themselves
HANGS = ("sigstop", "hang", "hang_gil")
NO_SENSE = "no sense: "
# Seconds, of which what they bound takes a tenth; only where something hangs in that phase.
DEADLINES: dict[str, dict[str, Any]] = {
    "start": {"start_deadline": 3},
    "claim": {"claim_deadline": 1},
    "load": {"load_deadline": 1},
    "idle": {"partition_deadline": 1},
    "first run": {"partition_deadline": 1},
    "steady run": {"partition_deadline": 1},
}
STEADY = 5  # the run that a fault of the steady state is in
LIMIT = 1 << 30  # bytes of memory for a worker that takes all it gets
# A sample for every commit.
FAST = ("start-exit-replay", "load-refuse_compile-fallback", "first-run-sigsegv-replay", "steady-run-sigkill-fallback")
ENOUGH = 60.0  # seconds; what is waited for here takes milliseconds


@dataclass(frozen=True)
class Cell:
    """One cell of the table. `expected`: what it says, or why there is nothing to say."""

    phase: str
    fault: str
    always: bool
    policy: str
    expected: str

    def __str__(self) -> str:
        return f"{self.phase}-{self.fault}{'-always' if self.always else ''}-{self.policy}".replace(" ", "-")


def read_table(text: str) -> list[Cell]:
    """The cells in the order of the page."""
    cells = []
    phase = ""
    for line in text.splitlines():
        if line.startswith("## "):
            phase = line[3:]
        elif line.startswith("| ") and not line.startswith("| fault"):
            names, *said = (part.strip() for part in line.strip("|").split("|"))
            if said[0].startswith(NO_SENSE):
                said = said[:1] * len(POLICIES)
            for name in names.split(", "):
                fault, _, always = name.partition(" ")
                cells += [
                    Cell(phase, fault, bool(always), policy, one) for policy, one in zip(POLICIES, said, strict=True)
                ]
    return cells


CELLS = read_table(TABLE.read_text())
RUN = [cell for cell in CELLS if not cell.expected.startswith(NO_SENSE)]
# A fleet whose worker does not start is not there to be shared.
SHARED = [cell for cell in RUN if cell.phase != "start"][::10]


@pytest.mark.fast
def test_no_cell_is_missing_or_there_twice() -> None:
    once = [(cell.phase, cell.fault, cell.policy) for cell in CELLS if not cell.always]
    wanted = [(phase, fault, policy) for phase in PHASES for fault in FAULTS if fault != "none" for policy in POLICIES]
    assert sorted(once) == sorted(wanted)
    often = sorted((cell.phase, cell.fault) for cell in CELLS if cell.always and cell.policy == "replay")
    each = [("first run", fault) for fault in (*ENDS, *HANGS)]
    assert often == sorted([*each, *((phase, one) for phase in ("claim", "load") for one in (ENDS[0], ENDS[-1]))])


@pytest.mark.fast
def test_what_makes_no_sense_cannot_be_ordered_and_the_rest_can() -> None:
    for cell in CELLS:
        assert (PHASES[cell.phase] in FAULTS[cell.fault]) is (cell in RUN), cell


# The model ----------------------------------------------------------------------------------------------------------


def three(prefix: str) -> Any:
    """y = -exp(-x), in three nodes."""
    nodes = [
        node("Neg", "x", "a", f"{prefix}0"), node("Exp", "a", "b", f"{prefix}1"), node("Neg", "b", "y", f"{prefix}2")
    ]  # fmt: skip
    return model(nodes, [tensor("x", ("N", 4))], [tensor("y", ("N", 4))])


OURS, OTHERS = three("n"), three("m")


def check(session: InferenceSession, number: int, rows: int = 1) -> None:
    """One run, of which each number has another input, is right."""
    x = np.linspace(-1, 1, rows * 4, dtype=np.float32).reshape(rows, 4) + np.float32(number)
    np.testing.assert_allclose(session.run(None, {"x": x})[0], -np.exp(-x.astype(np.float64)), rtol=1e-5)


class Neighbour:
    """Another session of the fleet, whose runs are all right, whatever happens to the first one."""

    def __init__(self, fleet: Fleet) -> None:
        self.session = InferenceSession(OTHERS, options=SessionOptions(fleet=fleet))
        self.failed: list[BaseException] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        number = 0
        try:
            while not self._ended.is_set():
                check(self.session, number % 10)
                number += 1
            check(self.session, 11)
        except BaseException as error:
            self.failed.append(error)

    def end(self) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(ENOUGH)
            assert not self._thread.is_alive(), "the other session hangs"
        self.session.close()


# A cell -------------------------------------------------------------------------------------------------------------


class Case:
    """Makes what a cell is about, and says what came of it in the words of the table."""

    def __init__(self, cell: Cell, record: Path, shared: bool) -> None:
        self.cell = cell
        self.record = record
        self.shared = shared
        self.neighbour: Neighbour | None = None

    def spec(self) -> ProviderSpec:
        cell = self.cell
        at: int | None = 1
        if cell.always:
            at = None
        elif cell.phase == "steady run":
            at = STEADY
        elif cell.phase == "idle" or (cell.phase == "claim" and self.shared):
            at = 2  # after the first run; after the neighbour's claims
        options = {
            "fault": cell.fault,
            "phase": PHASES[cell.phase],
            "at": at,
            "incarnations": None if cell.always else [1],
            "node": "n1",
            "claims": ["Neg" if cell.fault == "claim_not_convex" else "Exp"],
            "bytes": None if cell.fault == "memory" else 1 << 22,
            "record": str(self.record),
        }
        limit = LIMIT if cell.fault == "memory" else None
        return ProviderSpec("chaos", options=options, memory_limit=limit)

    def options(self, fleet: Fleet | None) -> SessionOptions:
        replay, fallback = POLICIES[self.cell.policy]
        limits = DEADLINES.get(self.cell.phase, {}) if self.cell.fault in HANGS else {}
        return SessionOptions(replay=replay, fallback=fallback, fleet=fleet, **limits)

    @contextlib.contextmanager
    def made(self) -> Iterator[InferenceSession]:
        """The session, and its neighbour if it has one."""
        providers = [self.spec(), "cpu"]
        with contextlib.ExitStack() as stack:
            fleet = None
            if self.shared:
                fleet = stack.enter_context(Fleet(providers))
                self.neighbour = Neighbour(fleet)
                stack.callback(self.neighbour.end)
                if self.cell.phase != "idle":  # there nothing may run before the fault
                    self.neighbour.start()
            options = self.options(fleet)
            session = InferenceSession(OURS, providers=None if fleet else providers, options=options)
            stack.callback(session.close)
            monitor = (fleet or session._fleet).monitor
            if self.cell.phase == "stop":
                monitor.patience = 0.5
            yield session

    def run(self) -> str:
        """What came of it."""
        said = "right"
        try:
            with self.made() as session:
                said = self._runs(session)
        except OutriderError as error:
            said = told(error)
        if self.neighbour is not None:
            assert not self.neighbour.failed, self.neighbour.failed
        return f"{said} / {self._counted()}"

    def _counted(self) -> int:
        """The incarnations, without one that is started behind a session which went on without the worker."""
        cell, count = self.cell, self.incarnations()
        behind = cell.phase in ("claim", "load") and cell.fault in HANGS and cell.policy == "fallback"
        return 1 if behind and count == 2 else count

    def _runs(self, session: InferenceSession) -> str:
        phase, number = self.cell.phase, 0
        for number in range({"steady run": STEADY - 1, "idle": 1}.get(phase, 0)):
            check(session, number)
        if phase == "idle":
            self._fault_in_idleness(session)
            if self.neighbour is not None:
                self.neighbour.start()
        said = self._said(session, number + 1, rows=2 if self.cell.fault == "refuse_compile" else 1)
        if not self.cell.always or phase != "first run":
            check(session, number + 2)
        else:
            after = said if self.cell.policy != "neither" else self._said(session, number + 2)
            assert after == said, "without a replay the second run dies like the first"
            end = "right" if self.cell.policy == "fallback" else "ProviderUnavailableError"
            assert self._said(session, number + 3) == end
        return said

    def _said(self, session: InferenceSession, number: int, rows: int = 1) -> str:
        """What comes of a run."""
        try:
            check(session, number, rows)
            return "right"
        except OutriderError as error:
            return told(error)

    def _fault_in_idleness(self, session: InferenceSession) -> None:
        """Wait until it has happened, and until a worker that it ended is known to be dead."""
        until = time.monotonic() + ENOUGH
        ends = self.cell.fault in ENDS
        while len(self.lines()) < 2 or (ends and session.health()["chaos"]["deaths"] == 0):
            assert time.monotonic() < until, "the fault did not happen"
            time.sleep(0.005)

    def lines(self) -> list[dict[str, Any]]:
        """What the provider noted."""
        return [json.loads(line) for line in self.record.read_text().splitlines()] if self.record.exists() else []

    def incarnations(self) -> int:
        return len({line["incarnation"] for line in self.lines()})


def told(error: OutriderError) -> str:
    """An error in the words of the table; it must name the provider."""
    words = [type(error).__name__]
    if isinstance(error, WorkerDiedError):
        words.append(str(error.signal or error.exit_code))
        if error.partition is not None:
            words.append(f"partition {error.partition}")
    elif isinstance(error, ProviderUnavailableError):
        words += re.findall(r"SIG[A-Z]+|(?<=exited with code )\d+", error.reason)
    if not isinstance(error, OutOfMemoryError) and error.fields().get("provider") != "chaos":
        words.append(f"of {error.fields().get('provider')}")
    return " ".join(words)


def _sample(cell: Cell) -> Any:
    return pytest.param(cell, marks=pytest.mark.fast) if str(cell) in FAST else cell


@pytest.mark.parametrize("cell", [_sample(cell) for cell in RUN], ids=str)
def test_cell(cell: Cell, tmp_path: Path) -> None:
    case = Case(cell, tmp_path / "record", shared=False)
    assert case.run() == cell.expected
    assert cell.fault in [line["fault"] for line in case.lines()], "the fault did not happen"


@pytest.mark.parametrize("cell", SHARED, ids=str)
def test_cell_with_two_sessions_on_one_fleet(cell: Cell, tmp_path: Path) -> None:
    """The same comes of it. There may be more incarnations: the other session needs the worker again."""
    said, _, count = Case(cell, tmp_path / "record", shared=True).run().rpartition(" / ")
    expected, _, least = cell.expected.rpartition(" / ")
    assert said == expected
    assert int(count) >= int(least)
