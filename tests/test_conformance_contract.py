"""Each contract case has a provider that it finds wrong, and finds nothing wrong with one that is right."""

from __future__ import annotations

import os

import pytest

from outrider.scheduler.specs import parse_provider
from outrider.tools.conformance.cases import Result, results
from outrider.tools.conformance.contract import CONTRACTS, WHOLE
from outrider.tools.conformance.operators import Selection
from outrider.tools.conformance.outcomes import CRASH, ERROR, HANG, KINDS, MISMATCH, PASS, UNSUPPORTED
from outrider.tools.conformance.running import Rig
from outrider.tools.conformance.specimens import SPECIMENS
from tests.environments import numpy_only

FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "wrong_providers.py")
EACH = [f"contract/{one.name}/{{}}" for one in CONTRACTS]
ALL = [f"contract/{one.name}" for one in WHOLE]


def tried(name: str, *only: str, deadline: float = 60.0) -> list[Result]:
    """What comes of these cases, without those of ONNX's suite."""
    with Rig(parse_provider(name if name == "cpu" else f"{FILE}:{name}"), deadline) as rig:
        return list(results(rig, Selection(only), quick=True, shapes_only=False, tell=lambda name: None))


def wrong(found: list[Result]) -> dict[str, str]:
    return {one.name.split("/")[1]: one.outcome.kind for one in found if not one.outcome.good}


def on(specimen: str) -> list[str]:
    """All contract cases of a specimen, and the quick ones of the provider as a whole."""
    return [one.format(specimen) for one in EACH] + ["contract/claims", "contract/cuts"]


def test_cpu_passes() -> None:
    names = [one.name for one in SPECIMENS[::6]]
    found = tried("cpu", *(f"contract/*/{name}" for name in names), *ALL)
    assert not wrong(found)
    assert {one.name.split("/")[1] for one in found} == {"answers", *(one.name for one in (*CONTRACTS, *WHOLE))}
    assert [one.name for one in found if one.outcome.kind == UNSUPPORTED] == ["contract/saved"]


def test_a_sound_one_passes_all() -> None:
    found = tried("Sound", *(f"contract/*/{name}" for name in ("Add", "Add-constant", "Neg")), *ALL)
    assert not wrong(found)
    passed = {one.name.split("/")[1] for one in found if one.outcome.kind == PASS}
    assert passed == {"answers", *(one.name for one in (*CONTRACTS, *WHOLE))} - {"saved"}


@pytest.mark.parametrize(
    ("name", "specimen", "expected"),
    [
        ("Repeats", "Neg", {"repeated": MISMATCH}),
        ("Tiles", "Neg", {"shapes": MISMATCH}),
        ("Peeks", "Neg", {"empty": ERROR}),
        ("Vectors", "Neg", {"widths": MISMATCH}),
        ("Counts", "Neg", {"scalars": ERROR}),
        ("MixesPlaces", "Relu", {"kept": MISMATCH}),
        ("MixesSlots", "Relu", {"in-flight": MISMATCH}),
        ("Finite", "Neg", {"special": MISMATCH}),
        ("Abandons", "Neg", {"given-up": MISMATCH}),
        ("Optimizes", "Neg", {"levels": MISMATCH}),
        ("Freezes", "Add-constant", {"fed": MISMATCH}),
        (
            "OneForAll",
            "Add-constant",
            {"independent": MISMATCH, "shared": MISMATCH, "sessions": MISMATCH, "cuts": MISMATCH},
        ),
        ("Tramples", "Relu", {"shared": MISMATCH, "cuts": MISMATCH}),
        ("ByName", "Add-constant", {"sessions": MISMATCH}),
        ("Truncates", "Add", {"impossible": MISMATCH}),
        ("Claimed", "Neg", {"claims": MISMATCH}),
        ("Overlaps", "Neg", dict.fromkeys(("independent", "shared", "claims", "cuts"), ERROR)),
        ("Cached", "Neg", {"cuts": MISMATCH}),
        ("Buffered", "Neg", {"shared": MISMATCH}),
    ],
)
def test_what_is_wrong_is_found_and_nothing_else(name: str, specimen: str, expected: dict[str, str]) -> None:
    found = tried(name, *on(specimen))
    assert wrong(found) == expected
    assert all(one.remedy for one in found)


@pytest.mark.parametrize(
    ("name", "wrong_in", "others"),
    [
        ("Hoards", ("unloaded", MISMATCH), ("cuts",)),
        ("Opens", ("unloaded", MISMATCH), ("stops",)),
        ("Locks", ("killed", ERROR), ("claims", "stops")),
        ("Stays", ("stops", MISMATCH), ("killed",)),
    ],
)
def test_what_is_wrong_with_its_process_is_found(name: str, wrong_in: tuple[str, str], others: tuple[str, ...]) -> None:
    cases = [f"contract/{case}" for case in (wrong_in[0], *others)]
    found = tried(name, "contract/answers/MatMul", *cases)
    assert len(found) == 1 + len(cases)
    assert wrong(found) == dict([wrong_in])


def test_a_wrong_saved_state_is_found() -> None:
    found = tried("Loads", "contract/answers/Add-constant", "contract/saved")
    assert [one.outcome.kind for one in found] == [PASS, MISMATCH]
    assert "Add-constant in the first process" in found[1].outcome.reason  # which had it compiled before


def test_one_that_needs_fixed_shapes_is_tried_with_them() -> None:
    found = tried("Fixed", *(one.format("Add") for one in EACH), "contract/answers/Add")
    assert not wrong(found)
    assert found[0].outcome.reason.startswith("with fixed shapes only: ")
    assert {one.name.split("/")[1] for one in found if one.outcome.kind == PASS} == {
        "answers", "repeated", "in-flight", "special", "given-up", "levels", "independent", "sessions", "scalars",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "phase", "kind", "told"),
    [
        ("sigsegv", "claim", CRASH, "SIGSEGV in claim"),
        ("hang", "claim", HANG, "did not answer what it claims within 1 s"),
        ("sigabrt", "load", CRASH, "SIGABRT in load at Relu.0"),
        ("hang_gil", "load", HANG, "did not load its part of the model within 1 s"),
        ("refuse_compile", "load", UNSUPPORTED, "cannot be compiled: chaos was told to refuse it"),
        ("claim_overlap", "claim", ERROR, "two claims on node 'Relu.0'"),
    ],
)
def test_it_is_told_where_it_happened(fault: str, phase: str, kind: str, told: str) -> None:
    spec = f"chaos?fault={fault}&phase={phase}&incarnations=[1]"
    with Rig(parse_provider(spec), 1.0 if kind == HANG else 60.0) as rig:
        (found,) = results(rig, Selection(("own/Relu-float32",)), quick=True, shapes_only=False, tell=lambda name: None)
    assert found.outcome.kind == kind
    assert told in found.outcome.reason


def test_float64_is_not_float32() -> None:
    found = {one.name: one.outcome.kind for one in tried("Rounds", "own/Add-float*", "own/MatMul-float*")}
    assert {name for name, kind in found.items() if kind != PASS} == {"own/Add-float64", "own/MatMul-float64"}


def test_it_may_live_in_an_environment_that_has_numpy_only() -> None:
    found = tried(f"Sound?python={numpy_only()}", "contract/*/Add", "own/Add-*", "contract/killed")
    assert not wrong(found)
    assert len([one for one in found if one.outcome.kind == PASS]) > 20


def test_one_that_takes_any_option_is_told_so() -> None:
    (found,) = tried("Easygoing", "contract/options")
    assert found.outcome.kind == UNSUPPORTED
    assert "misspelt" in found.outcome.reason


def test_each_kind_of_outcome_is_told_with_its_story() -> None:
    names = ("Relu", "Cast", "Sqrt", "Tanh", "Erf", "Floor", "Neg", "Abs", "Exp")
    found = {one.group: one.outcome for one in tried("Five", *(f"own/{op}-float32" for op in names), deadline=3.0)}
    assert {op: one.kind for op, one in found.items()} == {
        "Relu": PASS, "Cast": UNSUPPORTED, "Sqrt": MISMATCH, "Tanh": MISMATCH, "Erf": ERROR, "Floor": ERROR,
        "Neg": ERROR, "Abs": CRASH, "Exp": HANG,
    }  # fmt: skip
    assert {one.kind for one in found.values()} == set(KINDS)
    assert found["Cast"].reason == "Cast: no kernel for Cast"
    assert "24 of 24 elements beyond tolerance" in found["Sqrt"].reason
    assert "dtype float32" in found["Tanh"].reason
    assert "Erf went wrong" in found["Erf"].reason and "went wrong" in found["Erf"].detail
    assert "cannot compile it" in found["Floor"].reason and "claims what it cannot compile" in found["Floor"].hint
    assert "writes to its inputs" in found["Neg"].hint
    assert found["Abs"].reason.startswith("SIGSEGV in run at Abs") and "string_at" in found["Abs"].detail
    assert "partition_deadline of 3 s" in found["Exp"].reason and "wrong_providers.py" in found["Exp"].detail
