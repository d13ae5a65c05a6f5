"""A soak: threads run a model that is cut among workers, while these are killed at random.

A kill comes some completed runs after the one before (`runs / kills` on average), at a random moment of a run: a worker
that dies again before anything was completed meets the back-off, which is what `again` is for. What is held is looked
at between stretches of runs, while nothing is killed.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import math
import os
import random
import signal
import statistics
import sys
import threading
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outrider.scheduler import InferenceSession, ProviderSpec, SessionOptions, errors
from outrider.tools.bench.command import machine
from outrider.tools.footprint import Footprint, children, footprint, runs

SIGNALS = ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGSTOP")
# Bytes over the whole soak, and descriptors: a worker holds one or two more when it has seen others die than when it is
# new. Of all else that is counted, nothing may grow.
GROWTH = {"pss": 8 << 20, "workers_pss": 32 << 20, "workers_descriptors": 8}
GAP = (0.4, 1.6)  # completed runs between two kills, in shares of runs / kills

Feed = Mapping[str, Any]


@dataclass(frozen=True)
class Plan:
    """What is to happen.

    `callers`: threads that run; `workers`: cpu workers, and parts that the model is cut into; `again`: share of kills
    that are followed by one of the worker that is started next; `stretches`: after each, what is held is looked at;
    `patience`: seconds without a completed run that count as a hang. The others are options of the session.
    """

    runs: int = 20_000
    kills: int = 1_000
    callers: int = 4
    workers: int = 4
    signals: tuple[str, ...] = ("SIGKILL",)
    again: float = 0.0
    stretches: int = 20
    seed: int = 0
    patience: float = 120.0
    replay: bool = True
    fallback: bool = True
    spares: int = 0
    partition_deadline: float | None = None

    def allowed(self) -> frozenset[str]:
        """Kinds of errors that runs may raise: none if all deaths are single ones and partitions are replayed."""
        if self.replay and not self.again:
            return frozenset()
        return frozenset({"WorkerDiedError", "ProviderUnavailableError"})


class Soak:
    """One soak of `model` (as `InferenceSession` takes it) on `feeds`. `run` does it and returns what came of it."""

    def __init__(self, model: Any, feeds: Sequence[Feed], plan: Plan) -> None:
        self.model, self.feeds, self.plan = model, feeds, plan
        self.expected: list[list[bytes]] = []
        self.errors: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.seconds = array("d")  # that each run took; what this holds itself must not look like a leak
        self.kills: Counter[str] = Counter()
        self.samples: list[Footprint] = []
        self._random = random.Random(plan.seed)
        self._changed = threading.Condition()  # of what follows
        self._answered = 0  # runs that ended without an error
        self._ended = 0
        self._quiet = False  # no runs: the killer rests
        self._kills_due = 0
        self._over = threading.Event()

    def run(self) -> dict[str, Any]:
        """Raises the errors of opening a session; exits the process with 4 and all stacks if nothing moves."""
        plan = self.plan
        specs = [ProviderSpec(f"cpu:{i}" if i else "cpu", threads=1) for i in range(plan.workers)]
        with InferenceSession(self.model, providers=specs[:1]) as session:
            nodes = [node["name"] for node in session.placement().to_dict()["nodes"]]
        share = -(-len(nodes) // plan.workers)
        pins = {node: specs[i // share].display for i, node in enumerate(nodes)}
        options = SessionOptions(
            pins=pins,
            max_in_flight=plan.callers,
            replay=plan.replay,
            fallback=plan.fallback,
            spares=plan.spares,
            partition_deadline=plan.partition_deadline,
        )
        with InferenceSession(self.model, providers=specs, options=options) as session:
            self.expected = [self._answer(session, feed) for feed in self.feeds]
            start = time.monotonic()
            threading.Thread(target=self._watch, args=(session,), name="soak-watch", daemon=True).start()
            for number in range(plan.stretches):
                self._stretch(session, number)
                self._look(session)
            took = time.monotonic() - start
            self._over.set()
            health, partitions = session.health(), len(session.placement().to_dict()["partitions"])
        return self._told(took, partitions, health)

    # What happens ---------------------------------------------------------------------------------------------------
    def _stretch(self, session: InferenceSession, number: int) -> None:
        """The runs of one stretch, at least, and its kills."""
        plan = self.plan
        each = -(-plan.runs // (plan.stretches * plan.callers))
        self._quiet = False
        self._kills_due = plan.kills * (number + 1) // plan.stretches
        killer = threading.Thread(target=self._kill, name="soak-killer", daemon=True)
        callers = [
            threading.Thread(target=self._call, args=(session, each, index), name=f"soak-{index}", daemon=True)
            for index in range(plan.callers)
        ]
        for thread in (*callers, killer):
            thread.start()
        for thread in callers:
            thread.join()
        with self._changed:
            self._quiet = True
            self._changed.notify_all()
        killer.join()

    def _call(self, session: InferenceSession, count: int, index: int) -> None:
        """So many runs, one after the other, and more until all kills are done."""
        for number in itertools.count():
            if number >= count and self.kills.total() >= self._kills_due:
                return
            which = (index + number) % len(self.feeds)
            kind = ""
            start = time.perf_counter()
            try:
                right = self._answer(session, self.feeds[which]) == self.expected[which]
            except errors.OutriderError as error:
                right, kind = False, type(error).__name__
                self._make_up(session, error)
            except Exception as error:  # told, and never allowed
                right, kind = False, repr(error)
            with self._changed:
                self.seconds.append(time.perf_counter() - start)
                self._ended += 1
                if kind:
                    self.errors[kind] += 1
                else:
                    self._answered += 1
                if not (kind or right):
                    self.wrong.append(f"run {number} of thread {index} on input {which}")
                self._changed.notify_all()

    def _make_up(self, session: InferenceSession, error: errors.OutriderError) -> None:
        """Wait a little for a provider that may not be started yet; release one that would not come back by itself."""
        if isinstance(error, errors.ProviderUnavailableError):
            if error.seconds is None or math.isinf(error.seconds):
                session.restart(error.provider)
            else:
                time.sleep(min(1.0, error.seconds))

    def _kill(self) -> None:
        """Kill until there were as many kills as are due, or the runs have ended."""
        plan = self.plan
        gap = plan.runs / plan.kills
        while self.kills.total() < self._kills_due:
            if not self._wait_for(self._answered + gap * self._random.uniform(*GAP)):
                return
            time.sleep(self._random.uniform(0, statistics.median(self.seconds[-50:] or (0.0,))))
            victims = children()
            if victims and self._signal(self._random.choice(victims)) and self._random.random() < plan.again:
                self._kill_next(set(victims))

    def _wait_for(self, answers: float) -> bool:
        """Wait for so many answers in all; False if the runs have ended before."""
        with self._changed:
            self._changed.wait_for(lambda: self._quiet or self._answered >= answers)
            return not self._quiet

    def _kill_next(self, known: set[int]) -> None:
        """Kill the worker that is started in the place of one that was killed, while it starts or loads."""
        new: list[int] = []
        while not new and not self._quiet:
            time.sleep(0.01)
            new = [pid for pid in children() if pid not in known]
        time.sleep(self._random.uniform(0, 0.5))
        if new and not self._quiet:
            self._signal(new[0], " again")

    def _signal(self, pid: int, when: str = "") -> bool:
        name = self._random.choice(self.plan.signals)
        if not runs(pid):
            return False
        os.kill(pid, getattr(signal, name))
        self.kills[name + when] += 1
        return True

    def _look(self, session: InferenceSession) -> None:
        """When every worker is there again and has run: what is held."""
        while True:
            try:
                for feed in self.feeds:
                    self._answer(session, feed)
                    self._ended += 1
                if len(children()) == self.plan.workers * (1 + self.plan.spares):
                    break
            except (errors.WorkerDiedError, errors.ProviderUnavailableError) as error:
                self._make_up(session, error)
            time.sleep(0.1)
        gc.collect()
        self.samples.append(footprint())

    def _watch(self, session: InferenceSession) -> None:
        """End the process, with all stacks, when no run has ended for too long."""
        seen = -1
        while not self._over.wait(self.plan.patience):
            if self._ended == seen:
                print(f"no run has ended for {self.plan.patience:g} s; {session.health()}", file=sys.stderr)
                faulthandler.dump_traceback(sys.stderr)
                os._exit(4)
            seen = self._ended

    def _answer(self, session: InferenceSession, feed: Feed) -> list[bytes]:
        return [output.tobytes() for output in session.run(None, dict(feed))]

    # What came of it ------------------------------------------------------------------------------------------------
    def growth(self) -> dict[str, float]:
        """How much more was held in the last third of the looks than in the first one, by name, as medians.

        The very first look is left out: caches fill.
        """
        looks = self.samples[1:] or self.samples
        third = max(1, len(looks) // 3)
        return {
            name: statistics.median_low(getattr(one, name) for one in looks[-third:])
            - statistics.median_low(getattr(one, name) for one in looks[:third])
            for name in Footprint.names()
        }

    def slopes(self) -> dict[str, float]:
        """The same as a line through all looks but the first: how much more for 1,000 kills."""
        looks = self.samples[1:] or self.samples
        each = self.plan.kills / self.plan.stretches / 1000
        at = [each * number for number in range(len(looks))]
        if len(looks) < 2:
            return dict.fromkeys(Footprint.names(), 0.0)
        return {
            name: statistics.linear_regression(at, [getattr(one, name) for one in looks]).slope
            for name in Footprint.names()
        }

    def faults(self) -> list[str]:
        """What must not be; empty after a good soak."""
        plan, growth = self.plan, self.growth()
        found = [f"wrong answer: {one}" for one in self.wrong[:10]]
        found += [f"{count} x {kind}" for kind, count in self.errors.items() if kind not in plan.allowed()]
        found += [f"{name} grew by {by:.0f}" for name, by in growth.items() if by > GROWTH.get(name, 0)]
        return found

    def _told(self, took: float, partitions: int, health: Mapping[str, Any]) -> dict[str, Any]:
        ordered = sorted(self.seconds)
        return {
            "machine": machine(),
            "plan": asdict(self.plan),
            "partitions": partitions,
            "seconds": round(took, 1),
            "runs": self._answered + self.errors.total(),
            "right": self._answered - len(self.wrong),
            "wrong": len(self.wrong),
            "errors": dict(self.errors),
            "allowed_errors": sorted(self.plan.allowed()),
            "kills": dict(self.kills),
            "deaths": {name: one["deaths"] for name, one in health.items()},
            "run_ms": {
                "p50": round(ordered[len(ordered) // 2] * 1e3, 2),
                "p99": round(ordered[len(ordered) * 99 // 100] * 1e3, 2),
                "most": round(ordered[-1] * 1e3, 2),
            },
            "growth": self.growth(),
            "growth_per_1000_kills": {name: round(by, 1) for name, by in self.slopes().items()},
            "samples": [one.plain() for one in self.samples],
            "faults": self.faults(),
        }
