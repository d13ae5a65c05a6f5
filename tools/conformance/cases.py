"""All cases in the order in which they run, one result after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from outrider.tools.conformance.contract import BASIC, CONTRACTS, WHOLE, Contract, WholeContract
from outrider.tools.conformance.operators import SUITE, Case, Selection, own_cases, suite_cases
from outrider.tools.conformance.outcomes import HANG, PASS, UNSUPPORTED, Outcome
from outrider.tools.conformance.running import Rig
from outrider.tools.conformance.specimens import SPECIMENS, Specimen, built, fixed
from outrider.tools.conformance.suite import load_suite

CONTRACT = "contract"  # the first part of a case's name
MOST_HANGS = 20  # after so many nothing more is tried, so that a run ends

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """One case and what became of it. `group`: the operator or specimen that it is about, '' for the provider as a
    whole; `checks` and `remedy`: of contract cases; `seconds`: how long it took."""

    name: str
    group: str
    outcome: Outcome
    seconds: float = 0.0
    checks: str = ""
    remedy: str = ""


def results(rig: Rig, selection: Selection, quick: bool, shapes_only: bool, tell: Tell) -> Iterator[Result]:
    """Contract cases, the own operator cases, and without `quick` those of ONNX's suite.

    `shapes_only`: no values are compared, and contract cases, which compare them, are left out. `tell` hears the name
    of each case as it begins. Ends early after `MOST_HANGS` cases that hang.
    """
    hangs = 0
    for one in _all(rig, selection, quick, shapes_only, tell):
        yield one
        hangs += one.outcome.kind == HANG
        if hangs == MOST_HANGS:
            return


def _all(rig: Rig, selection: Selection, quick: bool, shapes_only: bool, tell: Tell) -> Iterator[Result]:
    if not shapes_only:
        yield from _contract_results(rig, selection, tell)
    for case in own_cases(selection):
        yield _operator_result(rig, case, shapes_only, tell)
    if not quick and selection.family(SUITE):
        for case in suite_cases(load_suite(), selection):
            yield _operator_result(rig, case, shapes_only, tell)


def _operator_result(rig: Rig, case: Case, shapes_only: bool, tell: Tell) -> Result:
    tell(case.name)
    begun = time.monotonic()
    return Result(case.name, case.group, case.run(rig, shapes_only), time.monotonic() - begun)


def _contract_results(rig: Rig, selection: Selection, tell: Tell) -> Iterator[Result]:
    """Cases of the provider as a whole are tried with the specimens that others are asked for of, or with all."""

    def asked(one: Contract | WholeContract, specimen: Specimen | None = None) -> bool:
        return selection.name(f"{CONTRACT}/{one.name}" + (f"/{specimen.name}" if specimen else ""))

    each = [specimen for specimen in SPECIMENS if any(asked(one, specimen) for one in (BASIC, *CONTRACTS))]
    if not each and not any(map(asked, WHOLE)):
        return
    taken: list[Specimen] = []
    fits = False
    for specimen in each or SPECIMENS:
        graph = built(specimen)
        if not selection.content(Case(specimen.name, graph.proto.SerializeToString(), [], 0, 0)):
            continue
        fits = True
        tried, basic = _basic(rig, specimen, tell)
        if asked(BASIC, specimen):
            yield basic
        if basic.outcome.kind == PASS:
            taken.append(tried)
    for one in CONTRACTS:
        for specimen in filter(one.suits, taken):
            if asked(one, specimen):
                yield _contract_result(rig, one, specimen, tell)
    for whole in WHOLE:
        if fits and asked(whole):
            yield _whole_result(rig, whole, taken, tell)


def _basic(rig: Rig, specimen: Specimen, tell: Tell) -> tuple[Specimen, Result]:
    """Whether it takes a specimen and answers it; one that is declined for its free dimensions is tried without."""
    basic = _contract_result(rig, BASIC, specimen, tell)
    if basic.outcome.kind == UNSUPPORTED:
        other = _contract_result(rig, BASIC, fixed(specimen), tell)
        if other.outcome.kind != UNSUPPORTED:
            reason = other.outcome.reason or f"with fixed shapes only: {basic.outcome.reason}"
            return fixed(specimen), replace(other, outcome=replace(other.outcome, reason=reason))
    return specimen, basic


def _contract_result(rig: Rig, one: Contract, specimen: Specimen, tell: Tell) -> Result:
    name = f"{CONTRACT}/{one.name}/{specimen.name}"
    tell(name)
    begun = time.monotonic()
    outcome = rig.run(lambda: one.check(rig, specimen))
    return Result(name, specimen.group, outcome, time.monotonic() - begun, one.checks, one.remedy)


def _whole_result(rig: Rig, one: WholeContract, taken: list[Specimen], tell: Tell) -> Result:
    name = f"{CONTRACT}/{one.name}"
    tell(name)
    begun = time.monotonic()
    if taken:
        outcome = rig.run(lambda: one.check(rig, taken))
    else:
        outcome = Outcome(UNSUPPORTED, "it takes no specimen that it answers rightly")
    return Result(name, "", outcome, time.monotonic() - begun, one.checks, one.remedy)
