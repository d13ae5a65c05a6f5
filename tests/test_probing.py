"""Providers of somebody else's are probed before their first use, and what was seen is remembered."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.providers.cpu.native.build import cache_folder
from outrider.scheduler import Fleet, InferenceSession, ProviderSpec, SessionOptions, dumps, errors, verdicts
from outrider.scheduler.probing import probed
from outrider.scheduler.provider_file import provider_file
from outrider.scheduler.verdicts import Verdict, counts, kept_seconds
from outrider.tools.cli import main
from tests import rogue_providers as rogue
from tests.builders import chain
from tests.leaks import worker_pids

fast = pytest.mark.fast  # the others start a dozen processes

# Each start and each claim leaves a line in the file `log`.
SOURCE = """
import ctypes, os, time
import numpy
from outrider.providers.contract import Claim, Provider

class Mine(Provider):
    def setup(self, context):
        self.options = context.options
        self.note("start")
        if self.options.get("start") == "crash":
            ctypes.string_at(0)
        if self.options.get("start") == "raise":
            raise RuntimeError("no device of mine is here")
        if self.options.get("start") == "killed":
            os.kill(os.getpid(), 9)
    def note(self, what):
        with open(self.options["log"], "a") as file:
            file.write(what + " ")
    def claim(self, graph):
        self.note("claim")
        if self.options.get("claim") == "crash":
            print("my last words", flush=True)
            os.abort()
        if self.options.get("claim") == "hang":
            time.sleep(1000)
        if self.options.get("claim") == "raise":
            raise ZeroDivisionError("claim went wrong")
        return [Claim([node]) for node in graph.nodes if node.op_type == "Relu"]
    def compile(self, unit):
        return lambda inputs: [numpy.maximum(inputs[0], 0)]
"""
CRASH = Verdict("died", "claim", "it was ended by SIGSEGV", "SIGSEGV", -11, 30, "", when=1000.0)
X = np.array([[-2, -1, 0.5, 3]], np.float32)


class Place:
    """A provider's file, its log, and a cache folder of its own."""

    def __init__(self, path: Path) -> None:
        self.cache = path / "cache"
        self.log = path / "log"
        self.file = path / "mine.py"
        self.file.write_text(SOURCE)

    def entry(self, **options: str) -> tuple[str, dict[str, str]]:
        return f"{self.file}:Mine", {"log": str(self.log), **options}

    def text(self) -> str:
        return f"{self.file}:Mine?log={self.log}"

    def spec(self, required: Any = "start", **options: str) -> ProviderSpec:
        kind, given = self.entry(**options)
        return ProviderSpec(kind, options=given, required=required)

    def noted(self) -> list[str]:
        """What the provider did since the last look."""
        try:
            words = self.log.read_text().split()
            self.log.unlink()
        except FileNotFoundError:
            words = []
        return words

    def kept(self) -> list[dict[str, Any]]:
        return [json.loads(file.read_text()) for file in sorted(self.cache.glob("probes/*.json"))]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    kernels = cache_folder()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels").symlink_to(kernels)
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return Place(tmp_path)


def refused(spec: ProviderSpec, claim_deadline: float = 60.0) -> errors.ProviderUnavailableError:
    with pytest.raises(errors.ProviderUnavailableError) as caught:
        Fleet._of([spec], SessionOptions(claim_deadline=claim_deadline), None)
    return caught.value


# In fleets ------------------------------------------------------------------------------------------------------------


@fast
def test_the_first_use_is_probed_and_the_worker_kept(place: Place) -> None:
    with InferenceSession(chain("Relu"), providers=[place.entry()]) as session:
        assert place.noted() == ["start", "claim", "claim"]  # one worker: the probe's claim, then the session's
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], np.maximum(X, 0))
        assert session.health()[place.entry()[0]]["incarnation"] == 1
    (verdict,) = place.kept()
    assert (verdict["cause"], verdict["kind"]) == ("", place.entry()[0])
    with InferenceSession(chain("Relu"), providers=[place.entry()]):
        assert place.noted() == ["start", "claim"]


@fast
@pytest.mark.parametrize(
    ("fault", "words", "name", "phase"),
    [({"claim": "crash"}, ["start", "claim"], "SIGABRT", "claim"), ({"start": "crash"}, ["start"], "SIGSEGV", "start")],
)
def test_a_crash_is_remembered_and_the_provider_not_started_again(
    place: Place, fault: dict[str, str], words: list[str], name: str, phase: str
) -> None:
    first = refused(place.spec(**fault))
    assert place.noted() == words and name in str(first.reason)
    again = refused(place.spec(**fault))
    assert place.noted() == [] and worker_pids() == []
    assert again.provider == place.entry()[0]
    for part in (name, "outrider doctor --probe", str(place.cache)):
        assert part in str(again.reason)
    if phase == "claim":
        assert "my last words" in str(again)
    (verdict,) = place.kept()
    assert (verdict["cause"], verdict["phase"], verdict["signal"]) == ("died", phase, name)


def test_one_that_is_not_required_is_skipped_with_the_reason(place: Place) -> None:
    for words in (["start", "claim"], []):
        providers = [place.spec(required=False, claim="crash"), "cpu"]
        with InferenceSession(chain("Relu"), providers=providers) as session:
            assert place.noted() == words
            np.testing.assert_array_equal(session.run(None, {"x": X})[0], np.maximum(X, 0))
            told = session.health()[place.entry()[0]]
            assert told["state"] == "absent" and "SIGABRT" in told["reason"]
            assert "SIGABRT" in str(session.placement())
            with pytest.raises(errors.ProviderUnavailableError, match="does without .*SIGABRT"):
                session.restart(place.entry()[0])


def test_other_options_and_a_changed_file_are_probed_anew(place: Place) -> None:
    refused(place.spec(claim="crash"))
    place.noted()
    with Fleet([place.spec()]):
        assert place.noted() == ["start", "claim"]
    place.file.write_text(SOURCE.replace("os.abort()", "pass"))
    with Fleet([place.spec(claim="crash")]):
        assert place.noted() == ["start", "claim"]


def test_what_may_pass_is_not_remembered(place: Place) -> None:
    for fault, reason in (({"start": "raise"}, "no device of mine is here"), ({"start": "killed"}, "SIGKILL")):
        for _ in range(2):
            assert reason in str(refused(place.spec(**fault)).reason)
            assert place.noted() == ["start"]
    with Fleet([place.spec(claim="raise")]):  # a session will tell if it raises there too
        assert place.noted() == ["start", "claim"]


def test_who_is_late_is_ended_and_asked_again_by_who_waits_longer(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dumps, "SECONDS", 60.0)  # this machine may be busy
    spec, options = place.spec(claim="hang"), SessionOptions(claim_deadline=0.5)
    with pytest.raises(errors.ProviderUnavailableError, match="did not answer what it claims within 0.5 s") as caught:
        InferenceSession(chain("Relu"), providers=[spec], options=options)
    assert f'File "{place.file}", line' in str(caught.value) and "in claim" in str(caught.value)
    assert place.noted() == ["start", "claim"]
    assert "within 0.5 s" in str(refused(spec, claim_deadline=0.5).reason)
    assert place.noted() == [] and worker_pids() == []
    assert verdicts.find(spec, {"start": 30, "claim": 0.4}) is not None
    assert verdicts.find(spec, {"start": 30, "claim": 0.6}) is None


def test_probing_can_be_turned_off(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(place.spec(claim="crash"))
    monkeypatch.setenv("OUTRIDER_PROBE", "0")
    with Fleet([place.spec(claim="crash")]):
        assert place.noted() == ["start", "claim", "start"]
    monkeypatch.setenv("OUTRIDER_PROBE", "no")
    with pytest.raises(errors.InvalidOptionError, match="OUTRIDER_PROBE"):
        Fleet([place.spec()])


def test_a_folder_that_cannot_be_written_stops_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="outrider.cache")
    monkeypatch.setenv("OUTRIDER_CACHE", str(place.file / "below a file"))
    for _ in range(2):
        with Fleet([place.spec()]):
            assert place.noted() == ["start", "claim"]
    assert "is not kept" in caplog.text


def test_a_damaged_verdict_counts_as_none(place: Place) -> None:
    with Fleet([place.spec()]):
        pass
    (file,) = place.cache.glob("probes/*.json")
    whole = file.read_text()
    for damaged in ("", whole[:-3], "[]", "{}", whole.replace('"cause": ""', '"cause": 7'), "[" * 100_000):
        file.write_text(damaged)
        assert verdicts.find(place.spec(), {}) is None
    file.write_text(whole)
    found = verdicts.find(place.spec(), {})
    assert found is not None and found.good


def test_two_coordinators_may_probe_at_once(place: Place) -> None:
    script = (
        "import sys\nfrom outrider.scheduler import Fleet\n"
        "with Fleet([(sys.argv[1], {'log': sys.argv[2]})]): print('there')"
    )
    command = [sys.executable, "-c", script, place.entry()[0], str(place.log)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [one.communicate()[0].strip() for one in both] == ["there", "there"]
    assert [verdict["cause"] for verdict in place.kept()] == [""]
    assert not list(place.cache.rglob("*.new"))


# outrider doctor --probe ----------------------------------------------------------------------------------------------


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["doctor", "--probe", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@fast
def test_the_doctor_tells_what_a_provider_is_and_claims(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = doctor(capsys, place.text(), "--json")
    told = json.loads(out)
    assert code == 0 and told["ok"] and told["failure"] is None and told["start_seconds"] > 0
    kinds = dict.fromkeys(("sequences", "maps", "optionals", "bodies"), True)
    assert told["attributes"].pop("dtypes") is None and told["attributes"].pop("shapes") == "any"
    assert {name for name, value in told["attributes"].items() if value} == set(kinds)
    assert {"python", "numpy"} <= set(told["versions"])
    claims = told["claims"]
    assert (claims["claimed"], claims["operators"], claims["error"]) == (1, {"ai.onnx::Relu": 1}, None)
    assert claims["nodes"] == 1 + sum(one["count"] for one in claims["declines"])
    assert Path(told["kept"]).is_file()
    place.noted()
    with Fleet([place.spec()]):
        assert place.noted() == ["start"]  # the verdict counts


def test_the_doctor_tells_how_a_provider_fails(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    for fault, deadline, words in (
        ("claim=crash", 30, ("FAILS", "SIGABRT while it was asked what it claims", "my last words", "not fit for use")),
        ("start=crash", 30, ("FAILS", "SIGSEGV", "in setup", "not fit for use")),
        ("start=raise", 30, ("FAILS", "no device of mine is here", "Traceback", "in setup")),
        ("claim=raise", 30, ("FAILS", "ZeroDivisionError: claim went wrong", "Traceback", "in claim")),
        ("claim=hang", 1, ("FAILS", "within 1 s", "not fit for use")),
    ):
        code, out, _ = doctor(capsys, f"{place.text()}&{fault}", "--deadline", str(deadline))
        assert code == 3
        for word in words:
            assert word in " ".join(out.split()), (fault, out)
    refused(place.spec(claim="crash"))
    place.file.write_text(SOURCE.replace("os.abort()", "pass"))
    assert doctor(capsys, f"{place.text()}&claim=crash")[0] == 0


def test_the_doctor_bears_with_whatever_a_worker_says(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "order").write_text("claim: error without a type")
    code, out, _ = doctor(capsys, f"{rogue.__file__}:Rogue?order={tmp_path / 'order'}")
    assert code == 3 and "FAILS        claim() raised None: 3" in out


def test_the_doctor_probes_in_spite_of_a_verdict(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    file = verdicts.keep(place.spec(), dataclasses.replace(CRASH, when=time.time()))
    assert "SIGSEGV" in str(refused(place.spec()).reason) and file is not None
    assert doctor(capsys, place.text())[0] == 0
    with Fleet([place.spec()]):
        pass


def test_the_doctor_asks_about_a_model(place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(chain("Relu", "Neg", "Relu").SerializeToString())
    code, out, _ = doctor(capsys, "cpu", "--model", str(path))
    assert code == 0 and "3 of 3 nodes" in out and "Neg, Relu 2" in out
    code, out, _ = doctor(capsys, place.text(), "--model", str(path))
    assert code == 0 and "2 of 3 nodes" in out and "not claimed: Neg" in out
    code, out, _ = doctor(capsys, f"{place.text()}&claim=crash", "--model", str(path), "--json")
    told = json.loads(out)  # it may do for other models
    assert code == 3 and told["failure"]["signal"] == "SIGABRT" and told["kept"] is None


@fast
def test_the_doctor_refuses_what_it_cannot_probe(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["cpuu"], ["cpu", "--deadline", "0"], ["cpu?a"], ["cpu", "--model", "none.onnx"]):
        code, out, err = doctor(capsys, *arguments)
        assert (code, out) == (2, "") and err.startswith("outrider: ")


# Verdicts -------------------------------------------------------------------------------------------------------------


@fast
@pytest.mark.parametrize(
    ("verdict", "seconds"),
    [
        (Verdict(), math.inf),
        (CRASH, 86400),
        (dataclasses.replace(CRASH, signal=None, exit_code=1), 86400),
        (dataclasses.replace(CRASH, story="what():  std::bad_alloc"), 600),
        (dataclasses.replace(CRASH, signal="SIGKILL", exit_code=-9), 0),
        (Verdict("late", "start", deadline=30), 600),
        (Verdict("raised", "start"), 0),
    ],
)
def test_how_long_a_verdict_is_kept(verdict: Verdict, seconds: float) -> None:
    assert kept_seconds(verdict) == seconds


@fast
def test_when_a_verdict_counts() -> None:
    assert [counts(CRASH, now, {"claim": 31}) for now in (999, 1000, 87399, 87400)] == [False, True, True, False]
    late = Verdict("late", "start", deadline=30, when=1000.0)
    assert [counts(late, 1001, {"start": deadline, "claim": 99}) for deadline in (1, 30, 31)] == [True, True, False]
    assert counts(Verdict(when=1000.0), 1e12, {})


@fast
def test_a_verdict_is_found_by_all_that_it_depends_on(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = place.spec()
    log = spec.options["log"]
    known = [verdicts.path_of(spec)]
    for change in (
        {"options": {"log": log, "a": 1}}, {"options": {"log": log, "a": "1"}}, {"options": {"log": log, "a": b"1"}},
        {"options": {"log": log, "a": [1]}}, {"options": {"log": log, "a": {}}}, {"env": {"A": "1"}}, {"threads": 3},
        {"kind": spec.kind + ":1"}, {"memory_limit": 1 << 30}, {"nice": 1}, {"cpus": [0]}, {"wrap": ["env"]},
    ):  # fmt: skip
        known.append(verdicts.path_of(dataclasses.replace(spec, **change)))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere/else")
    known.append(verdicts.path_of(spec))
    monkeypatch.undo()
    assert None not in known and len(set(known)) == len(known)
    monkeypatch.setenv("OUTRIDER_CACHE", str(place.cache))
    assert verdicts.path_of(dataclasses.replace(spec, name="other", required=False)) == known[0]


@fast
def test_options_and_environment_are_not_written(place: Place) -> None:
    spec = dataclasses.replace(place.spec(token="secret-1"), env={"PASSWORD": "secret-2"})
    file = verdicts.keep(spec, dataclasses.replace(CRASH, story="x" * 9000))
    assert file is not None and "secret" not in Path(file).read_text()
    assert os.stat(file).st_mode & 0o077 == 0 and os.stat(file).st_size < 6000


@fast
def test_the_folder_keeps_a_bounded_number(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "MOST", 3)
    for number in range(5):
        assert verdicts.keep(place.spec(number=str(number)), Verdict(when=1.0))
    assert len(place.kept()) == 3


@fast
def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.scheduler.cache import cache_folder

    monkeypatch.setenv("OUTRIDER_CACHE", "/a/b")
    assert cache_folder() == "/a/b"
    monkeypatch.delenv("OUTRIDER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert cache_folder() == "/c/outrider"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder() == "/home/me/.cache/outrider"


# Where a provider's file is -------------------------------------------------------------------------------------------


@fast
def test_a_module_is_found_without_importing_it_or_its_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "probed_space" / "probed_package"
    package.mkdir(parents=True)
    bomb = "raise SystemExit('imported')"
    (package / "__init__.py").write_text(bomb)
    (package / "inner.py").write_text(bomb)
    (tmp_path / "probed_alone.py").write_text(bomb)
    monkeypatch.syspath_prepend(str(tmp_path))
    inside = "probed_space.probed_package"
    assert provider_file(f"{inside}.inner:P") == str(package / "inner.py")
    assert provider_file(f"{inside}:P:2") == str(package / "__init__.py")
    assert provider_file("probed_alone:P") == str(tmp_path / "probed_alone.py")
    assert provider_file("outrider.providers.null:NullProvider") is not None
    for nothing in ("probed_alone.inner:P", f"{inside}.none:P", "probed_nowhere:P", "probed_space:P", "sys:P", "cpu"):
        assert provider_file(nothing) is None
    assert not [name for name in sys.modules if name.startswith("probed_")]
    assert provider_file(f"{os.path.join(tmp_path, 'x.py')}:P") == str(tmp_path / "x.py")


@fast
def test_providers_of_this_package_and_debugged_ones_are_not_probed() -> None:
    assert [probed(ProviderSpec(kind)) for kind in ("cpu", "null", "cpu:1", "a.b:C", "a.b:C:1")] == [0, 0, 0, 1, 1]
    assert not probed(ProviderSpec("a.b:C", debug=True))
