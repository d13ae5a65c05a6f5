"""How figures are taken: every variant in every round, so that what the machine does otherwise hits all alike.

A row is the median over the rounds of each round's median, and of its ratio to the baseline *of the same round*. On a
shared machine the ratio is worth more than the figure.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from outrider.scheduler.options import ProviderSpec

WARM_SHARE = 6  # one uncounted call for so many counted ones, at the start of each round
FEW = 20  # fewer calls than that have no 99th percentile

Sample = Callable[[int], Sequence[float]]
"""Makes so many calls and returns what each took, in one unit."""


@dataclass(frozen=True)
class Request:
    """What was asked for. `quick`: a few calls of everything, to see that it works; such figures are worth nothing.

    `models`: paths; `feeds`: the folder of their inputs, `NAME.npz` for `NAME.onnx`, else they lie beside it.
    `threads`: only with so many; `compiled`: the option of the cpu provider. `providers`: of one more session.
    """

    rounds: int = 7
    quick: bool = False
    models: Sequence[str] = ()
    feeds: str | None = None
    threads: int | None = None
    compiled: bool | str = True
    providers: Sequence[ProviderSpec] = ()

    def calls(self, wanted: int) -> int:
        """How many calls to make where `wanted` would give a steady median."""
        return max(2, wanted // 50) if self.quick else wanted


@dataclass(frozen=True)
class Budget:
    """What the design allows: `value` in the row's unit, `ratio` to its baseline; at least that with `floor`."""

    value: float | None = None
    ratio: float | None = None
    floor: bool = False

    def text(self, unit: str) -> str:
        """'<= 35 us and <= 0.4 x'."""
        sign = ">=" if self.floor else "<="
        limits = [f"{sign} {self.value:,.10g} {unit}"] if self.value is not None else []
        limits += [f"{sign} {self.ratio:g} x"] if self.ratio is not None else []
        return " and ".join(limits)

    def missed_by(self, value: float, ratio: float | None) -> float:
        """1 or less when it is met, else how many times over."""
        pairs = [(value, self.value), (ratio, self.ratio)]
        worst = 0.0
        for measured, limit in pairs:
            if measured is None or limit is None:
                continue
            if self.floor:
                worst = max(worst, limit / measured if measured else float("inf"))
            elif limit:
                worst = max(worst, measured / limit)
            elif measured:
                worst = float("inf")
        return worst


@dataclass(frozen=True)
class Row:
    """One line of a table. `value` is in `unit`, None when it was not measured, which `note` then explains.

    `low` and `high`: least and greatest round; `ratio`: to the row or thing called `to`; `budget`:
    what the design allows, `limit` the part of it on `value`; `met`: None without a budget.
    """

    what: str
    value: float | None
    unit: str
    p99: float | None = None
    low: float | None = None
    high: float | None = None
    ratio: float | None = None
    to: str = ""
    budget: str = ""
    limit: float | None = None
    met: bool | None = None
    verdict: str = ""
    note: str = ""

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def skipped(what: str, unit: str, reason: str) -> Row:
    """A row that could not be measured here."""
    return Row(what, None, unit, note=reason)


@dataclass(frozen=True)
class Round:
    """One variant in one round: median and 99th percentile of its calls; a difference has no percentile."""

    p50: float
    p99: float | None = None


def timed(call: Callable[[], object], scale: float = 1e-3) -> Sample:
    """A sample of a call in this process; `scale` turns nanoseconds into the unit (1e-3: microseconds)."""

    def sample(calls: int) -> list[float]:
        clock = time.perf_counter_ns
        taken = []
        for _ in range(calls):
            start = clock()
            call()
            taken.append((clock() - start) * scale)
        return taken

    return sample


def interleave(variants: Mapping[str, tuple[Sample, int]], rounds: int, pause: float = 0.0) -> dict[str, list[Round]]:
    """Each variant (its sample and how many calls) once a round, there and back again; `pause` seconds before each."""
    taken: dict[str, list[Round]] = {name: [] for name in variants}
    for number in range(rounds):
        for name in reversed([*variants]) if number % 2 else variants:
            sample, calls = variants[name]
            time.sleep(pause)
            sample(-(-calls // WARM_SHARE))
            taken[name].append(summary(sample(calls)))
    return taken


def summary(taken: Sequence[float]) -> Round:
    """Median, and 99th percentile unless there are too few."""
    ordered = sorted(taken)
    p99 = ordered[len(ordered) * 99 // 100] if len(ordered) >= FEW else None
    return Round(statistics.median(ordered), p99)


def row(
    what: str,
    unit: str,
    taken: Sequence[Round],
    base: Sequence[Round] | None = None,
    to: str = "",
    budget: Budget | None = None,
    note: str = "",
) -> Row:
    """The row of a variant over its rounds; `base`: the baseline's rounds, pairwise."""
    medians = [one.p50 for one in taken]
    value = statistics.median(medians)
    ratio = None
    if base is not None:
        ratio = statistics.median(one.p50 / other.p50 for one, other in zip(taken, base, strict=True))
    tails = [one.p99 for one in taken if one.p99 is not None]
    p99 = statistics.median(tails) if tails else None
    return judged(Row(what, value, unit, p99, min(medians), max(medians), ratio, to, note=note), budget)


def judged(made: Row, budget: Budget | None) -> Row:
    """The row with its budget, and whether it keeps to it."""
    if budget is None or made.value is None:
        return made
    over = budget.missed_by(made.value, made.ratio)
    verdict = "met" if over <= 1 else f"missed by {over:.2g} x"
    return replace(made, budget=budget.text(made.unit), limit=budget.value, met=over <= 1, verdict=verdict)


def differences(longer: Sequence[Round], shorter: Sequence[Round], steps: int) -> list[Round]:
    """What one of `steps` more costs, round by round."""
    return [Round((one.p50 - other.p50) / steps) for one, other in zip(longer, shorter, strict=True)]
