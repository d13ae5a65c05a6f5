"""`outrider conformance`: how outcomes are told apart, what is expected, what is printed, and the exit code."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from outrider.scheduler import errors
from outrider.tools.cli import main
from outrider.tools.conformance.cases import Result
from outrider.tools.conformance.expectations import Expectation, expected, read_expectations, surprise, unmet
from outrider.tools.conformance.expectations import write_expectations as write
from outrider.tools.conformance.operators import Case, Selection, own_cases
from outrider.tools.conformance.outcomes import (
    CRASH,
    ERROR,
    HANG,
    KINDS,
    MISMATCH,
    PASS,
    UNSUPPORTED,
    NotForIt,
    Outcome,
    classify,
)
from outrider.tools.conformance.report import Report
from outrider.tools.conformance.specimens import SPECIMENS, Built, Part, built, chained, fixed, scalar
from outrider.tools.inputs import DataFileError

fast = pytest.mark.fast
FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "wrong_providers.py")


# Outcomes ---------------------------------------------------------------------------------------------------------


def unsupported() -> errors.UnsupportedOpError:
    group = {"domain": "ai.onnx", "op": "Conv", "provider": "p", "reason": "no kernel", "count": 1, "examples": ["c"]}
    return errors.UnsupportedOpError("no provider takes it", groups=[group])


def died(**fields: object) -> errors.WorkerDiedError:
    return errors.WorkerDiedError("it died", **{"phase": "run", "nodes": ["n"], "stack": "", "stderr": "", **fields})


def broken(reason: str, traceback: str) -> errors.ClaimBrokenError:
    return errors.ClaimBrokenError(f"cannot compile it: {reason}", reason=reason, remote_traceback=traceback)


@fast
@pytest.mark.parametrize(
    ("error", "kind", "reason", "hint"),
    [
        (None, PASS, "", ""),
        (NotForIt("it is constant"), UNSUPPORTED, "it is constant", ""),
        (unsupported(), UNSUPPORTED, "Conv: no kernel", ""),
        (errors.ModelLoadError("no IR"), UNSUPPORTED, "the model is refused: no IR", ""),
        (broken("too wide", "Traceback\noutrider.providers.contract.ClaimBrokenError: x"), UNSUPPORTED, "too wide", ""),
        (broken("ValueError: x", "Traceback\nValueError: x"), ERROR, "cannot compile it", "claims what it cannot"),
        (errors.ProviderContractError("2 outputs", node="y"), MISMATCH, "2 outputs", "as the model declares"),
        (errors.ProviderContractError("claim() returned 7"), ERROR, "claim() returned 7", ""),
        (errors.ClaimError("two claims"), ERROR, "two claims", "each in one claim"),
        (errors.KernelError("failed", cause="ValueError: x"), ERROR, "failed", "claims what it cannot run"),
        (errors.KernelError("failed", cause="destination is read-only"), ERROR, "failed", "writes to its inputs"),
        (errors.OutOfMemoryError("too large"), ERROR, "too large", ""),
        (died(signal="SIGSEGV"), CRASH, "SIGSEGV in run at n", "mapped read-only"),
        (died(exit_code=3), CRASH, "exit code 3 in run at n", ""),
        (died(signal="SIGKILL", reason="it broke the protocol"), CRASH, "SIGKILL in run at n (it broke", ""),
        (died(reason="partition 0 ran longer than its partition_deadline of 2 s"), HANG, "2 s", "the stack"),
        (errors.ProviderUnavailableError("x", reason="it did not load it within 2 s"), HANG, "within 2 s", "the stack"),
        (errors.ProviderUnavailableError("no device", reason="no device"), ERROR, "no device", ""),
        (errors.RunTimeoutError("the run took longer", deadline=2.0), HANG, "the run took longer", "the stack"),
    ],
)  # fmt: skip
def test_what_happened_decides_the_kind(error: Exception | None, kind: str, reason: str, hint: str) -> None:
    outcome = classify(error)
    assert outcome.kind == kind
    assert reason in outcome.reason and hint in outcome.hint
    assert outcome.good == (kind in (PASS, UNSUPPORTED))


@fast
def test_a_difference_is_a_mismatch_and_what_is_not_of_the_provider_is_raised() -> None:
    assert classify(difference="off by one") == Outcome(MISMATCH, "off by one")
    with pytest.raises(ZeroDivisionError):
        classify(ZeroDivisionError())


# Cases ------------------------------------------------------------------------------------------------------------


@fast
def test_specimens_differ_where_they_are_to() -> None:
    assert len({one.name for one in SPECIMENS}) == len(SPECIMENS)
    for one in SPECIMENS:
        for variant in (one, fixed(one), *([scalar(one)] if one.elementwise else [])):
            graph = built(variant)
            onnx.checker.check_model(graph.proto, full_check=True)
            first, second = graph.feeds(seed=0), graph.feeds(seed=1)
            assert any(not np.array_equal(first[name], second[name]) for name in first)
            results = zip(graph.expected(first), graph.expected(second), strict=True)
            if variant.x:  # else a stale result would pass
                assert not all(np.array_equal(*pair) for pair in results), one.name
        if one.like:
            (y,) = built(one).expected(built(one).feeds())
            assert (y.dtype, y.shape) == (built(one).feeds()["x"].dtype, built(one).feeds()["x"].shape)


@fast
def test_graphs_of_parts_are_what_they_say() -> None:
    add = next(one for one in SPECIMENS if one.name == "Add-constant")
    graph = Built((Part(add, "a.", 1), Part(add, "b.", 2, {"x": "a.y"})), frozenset({"a."}))
    feeds = graph.feeds(5)
    assert set(feeds) == {"a.x"} and feeds["a.x"].shape == (5, 8)
    (y,) = ReferenceEvaluator(graph.proto).run(None, feeds)
    np.testing.assert_allclose(y, feeds["a.x"] + add.values(1)["b"] + add.values(2)["b"], rtol=1e-6)
    assert len(chained([add] * 4).expected(chained([add] * 4).feeds())) == 4
    assert set(built(add, fed=True).feeds()) == {"x", "b"}


@fast
@pytest.mark.parametrize(
    ("selection", "names"),
    [
        (Selection(only=("own/Relu-float*",)), {"own/Relu-float16", "own/Relu-float32", "own/Relu-float64"}),
        (Selection(only=("Not-*",)), {"own/Not-bool", "own/Not-fixed-shapes", "own/Not-opset13", "own/Not-opset17"}),
        (Selection(operators=frozenset({"Erf"}), opsets=frozenset({13})), {"own/Erf-opset13"}),
        (
            Selection(operators=frozenset({"Gelu"}), dtypes=frozenset({"float16"})),
            {"own/Gelu-float16", "own/MatMul+Add+Gelu-float16"},
        ),
        (Selection(only=("onnx/*",)), set()),
    ],
)
def test_cases_are_selected(selection: Selection, names: set[str]) -> None:
    assert {case.name for case in own_cases(selection)} == names


@fast
def test_random_operators_are_known() -> None:
    (relu,) = own_cases(Selection(only=("own/Relu-float32",)))
    assert not relu.random
    node = onnx.helper.make_node("RandomUniform", [], ["y"], shape=[2])
    y = onnx.helper.make_tensor_value_info("y", 1, [2])
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", [], [y]))
    assert Case("r", model.SerializeToString(), [], 0, 0).random


# Expectations -------------------------------------------------------------------------------------------------------


def result(name: str, kind: str, reason: str = "so") -> Result:
    return Result(name, "Relu", Outcome(kind, "" if kind == PASS else reason, "look there", "line 1\nline 2"), 0.25)


FOUND = [result("own/a", PASS), result("own/b", MISMATCH), result("onnx/c", CRASH), result("onnx/d", UNSUPPORTED)]


@fast
def test_expectations_are_strict() -> None:
    entries = [Expectation("own/*", MISMATCH, "all"), Expectation("own/b", CRASH, "that one")]
    assert expected("own/b", entries) == entries[1]  # exact before patterns
    assert expected("own/a", entries) == entries[0]
    assert expected("onnx/c", entries) is None
    assert surprise(FOUND[0], None) == surprise(FOUND[3], None) == ""
    assert surprise(FOUND[1], None) == MISMATCH
    assert surprise(FOUND[1], entries[0]) == ""
    assert surprise(FOUND[1], entries[1]) == "MISMATCH, and is listed as CRASH"
    assert surprise(FOUND[0], entries[0]) == "passes, and is listed as MISMATCH"
    assert surprise(FOUND[3], Expectation("*", UNSUPPORTED, "")) == ""
    assert unmet([*entries, Expectation("x/*", ERROR, "")], [one.name for one in FOUND]) == ["x/*"]


@fast
def test_what_is_written_is_what_is_expected(tmp_path: Path) -> None:
    odd = result("own/e", ERROR, 'a "quoted" \\ reason\nof two lines \x7f ü')
    path = str(tmp_path / "known.toml")
    write(path, [*FOUND, odd], [Expectation("own/b", MISMATCH, "kept"), Expectation("onnx/c", HANG, "not kept")])
    entries = read_expectations(path)
    assert entries == (
        Expectation("own/b", MISMATCH, "kept"),
        Expectation("own/e", ERROR, odd.outcome.reason),
        Expectation("onnx/c", CRASH, "so"),
    )
    assert Report({"provider": "p"}, [*FOUND, odd], entries, whole=True).ok


@fast
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[MISMATCH", "cannot read"),
        ("[PASS]\na = 'x'", "not 'PASS'"),
        ("[WRONG]\na = 'x'", "not 'WRONG'"),
        ("MISMATCH = 1", "not 'MISMATCH'"),
        ("[MISMATCH]\na = 1", "says why, not 1"),
    ],
)
def test_what_is_no_file_of_expectations_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "known.toml"
    path.write_text(text)
    with pytest.raises(DataFileError, match=told):
        read_expectations(str(path))


# Reports ------------------------------------------------------------------------------------------------------------


@fast
def test_the_report_in_its_three_forms() -> None:
    entries = (Expectation("onnx/c", CRASH, "known"), Expectation("gone", ERROR, "long ago"))
    report = Report({"provider": "p", "versions": {}, "attributes": {}}, FOUND, entries, whole=True, seconds=1.5)
    assert not report.ok
    text = report.text()
    assert text.splitlines()[0].split() == ["MISMATCH", "own/b"]
    assert "expected, and no case is called so: gone" in text
    assert "expected CRASH       onnx/c: known" in text
    assert "PASS 1  UNSUPPORTED 1  MISMATCH 1  ERROR 0  CRASH 1  HANG 0" in text
    plain = json.loads(json.dumps(report.plain()))
    assert plain["counts"] == {"PASS": 1, "UNSUPPORTED": 1, "MISMATCH": 1, "ERROR": 0, "CRASH": 1, "HANG": 0}
    assert (plain["format"], plain["ok"], plain["unmet"]) == (1, False, ["gone"])
    assert [(one["name"], one["ok"]) for one in plain["cases"]] == [
        ("own/a", True), ("own/b", False), ("onnx/c", True), ("onnx/d", True),
    ]  # fmt: skip
    assert plain["cases"][2]["expected"] == {"kind": CRASH, "reason": "known"}
    suite = ElementTree.fromstring(report.junit())
    assert dict(suite.attrib) == {"name": "conformance of p", "tests": "4", "failures": "1", "skipped": "1"}
    assert [[child.tag for child in case] for case in suite] == [[], ["failure"], [], ["skipped"]]


@fast
@pytest.mark.parametrize(
    ("kind", "threads"),
    [
        (CRASH, ("Thread 0x1", "Current thread 0x2")),
        (CRASH, ("Thread 0x1", "Current thread 0x2", *["Thread 0x3"] * 9)),
        (HANG, ("Current thread 0x1", "Thread 0x2")),
    ],
)
def test_the_stack_that_is_shown_is_that_of_the_provider(kind: str, threads: tuple[str, ...]) -> None:
    stack = "\n".join(f"{name} (most recent call first):\n  File of {name}\n" for name in threads)
    shown = Report({"provider": "p"}, [Result("own/a", "A", Outcome(kind, detail=stack))]).text()
    assert f"| {threads[1]} (most" in shown and "0x1" not in shown


@fast
def test_a_run_that_ended_early_is_never_right() -> None:
    assert Report({"provider": "p"}, FOUND[:1]).ok
    report = Report({"provider": "p"}, FOUND[:1], ended="20 cases hung")
    assert not report.ok and "NOT FINISHED: 20 cases hung" in report.text()


# The command --------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(["conformance", *arguments])
        return code, *capsys.readouterr()

    return call


def test_a_right_provider_and_the_suite(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    junit = tmp_path / "report.xml"
    code, out, _ = run("cpu", "--only", "onnx/test_relu*", "--only", "own/Add-*", "--json", "--junit", str(junit))
    document = json.loads(out)
    assert code == 0 and document["ok"]
    assert set(document["counts"]) == set(KINDS)
    assert {one["name"] for one in document["cases"]} >= {"onnx/test_relu", "own/Add-float32", "own/Add-broadcast-both"}
    assert document["counts"]["PASS"] == len(document["cases"]) == len(ElementTree.parse(junit).getroot())
    assert document["provider"] == "cpu" and document["attributes"]["merge"] is True


def test_a_wrong_provider_and_what_is_expected_of_it(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    known = str(tmp_path / "known.toml")
    cases = ("--only", "own/[ER]*-float32")
    code, out, _ = run(f"{FILE}:Five", *cases, "--deadline", "2", "--write-expect", known)
    assert code == 1
    assert out.splitlines()[0].split() == ["HANG", "own/Exp-float32"]
    assert "ArithmeticError: Erf went wrong" in out and "2 surprises" in out
    assert "wrote 1 line to its output, the first: about to fail" in out
    code, out, _ = run(f"{FILE}:Five", *cases, "--deadline", "2", "--expect", known)
    assert code == 0 and "expected HANG" in out
    code, out, _ = run(f"{FILE}:Sound", *cases, "--expect", known)
    told = " ".join(out.split())
    assert code == 1 and "2 surprises" in told
    for kind, name in (("HANG", "Exp"), ("ERROR", "Erf")):
        assert f"own/{name}-float32 UNSUPPORTED, and is listed as {kind}" in told


def test_values_do_not_count_with_shapes_only(run: Callable[..., tuple[int, str, str]]) -> None:
    assert run("null", "--only", "own/Add-float*")[0] == 1
    assert run("null", "--only", "own/Add-float*", "--shapes-only")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("cpu", "--opsets", "13-x"), "numbers and ranges"),
        (("cpu", "--deadline", "0"), "positive number of seconds"),
        (("cpu", "--quick", "--only", "nothing"), "no case is selected"),
        (("cpu", "--quick", "--ops", "Conf"), "none that is asked for has Conf"),
        (("cpu", "--expect", "/no/such/file"), "cannot read /no/such/file"),
        (("nothing",), "there is no provider 'nothing'"),
    ],
)
def test_bad_usage_is_2(run: Callable[..., tuple[int, str, str]], arguments: tuple[str, ...], told: str) -> None:
    code, _, err = run(*arguments)
    assert code == 2 and told in " ".join(err.split())


def test_one_that_does_not_start_is_3(run: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = run(f"{FILE}:Sound?colour=red", "--quick")
    assert code == 3 and "no option is called colour" in " ".join(err.split())
