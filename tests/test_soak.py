"""The soak: a short one of a real model, and that it finds what must not be."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import threading
from pathlib import Path

import numpy as np
import onnx
import pytest

from outrider.scheduler import errors
from outrider.tools.footprint import Footprint, children, footprint
from outrider.tools.soak import main, summary
from outrider.tools.soaking import Plan, Soak
from tests.builders import chain
from tests.models import feeds, model_path

SHORT = Plan(runs=300, kills=20, stretches=4, signals=("SIGKILL", "SIGSEGV"), patience=300)
HELD = Footprint(10 << 20, 20, 5, 3, 4, 100 << 20, 40, 12)


@pytest.mark.parametrize("replay", [True, False])
def test_random_deaths_of_a_real_model_cut_in_four(replay: bool) -> None:
    """20 deaths in 300 runs from 4 threads: only right answers, and errors that the policy allows."""
    plan = dataclasses.replace(SHORT, replay=replay, fallback=replay)
    told = Soak(str(model_path("silero-16k")), [feeds("silero-16k", seed) for seed in range(4)], plan).run()
    assert told["wrong"] == 0
    assert sum(told["kills"].values()) == plan.kills
    assert told["right"] + sum(told["errors"].values()) == told["runs"] >= plan.runs
    assert bool(told["errors"]) != replay
    assert told["faults"] == []
    assert told["partitions"] == 4 and len(told["samples"]) == plan.stretches


def soak_of(*samples: Footprint, **plan: bool) -> Soak:
    made = Soak(chain("Relu"), [], dataclasses.replace(SHORT, **plan))
    made.samples = list(samples)
    return made


@pytest.mark.fast
def test_what_is_held_must_not_grow() -> None:
    more = dataclasses.replace(HELD, descriptors=21)
    large = dataclasses.replace(HELD, pss=30 << 20)
    assert soak_of(*[HELD] * 7).faults() == []
    assert soak_of(more, *[HELD] * 6).faults() == []  # the first look is left out
    assert soak_of(*[HELD] * 5, more, more).faults() == ["descriptors grew by 1"]
    assert soak_of(*[HELD] * 5, large, large).faults() == [f"pss grew by {20 << 20}"]
    assert soak_of(*[HELD] * 6, more).faults() == []  # one in the middle of something is no growth


@pytest.mark.fast
def test_growth_is_told_for_a_thousand_kills() -> None:
    rising = [dataclasses.replace(HELD, threads=5 + number) for number in range(7)]
    slopes = soak_of(HELD, *rising).slopes()  # a thread more for each stretch, which has 5 kills
    assert slopes["threads"] == pytest.approx(200) and slopes["descriptors"] == 0
    assert soak_of(HELD).slopes()["threads"] == 0


@pytest.mark.fast
@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({}, []),
        ({"again": 0.5}, ["ProviderUnavailableError", "WorkerDiedError"]),
        ({"replay": False}, ["ProviderUnavailableError", "WorkerDiedError"]),
    ],
)
def test_errors_that_the_policy_allows(options: dict[str, bool], kinds: list[str]) -> None:
    made = soak_of(HELD, **options)
    made.errors.update(["WorkerDiedError", "KernelError"])
    assert sorted(made.plan.allowed()) == kinds
    assert ("1 x WorkerDiedError" in made.faults()) == (not kinds)
    assert "1 x KernelError" in made.faults()


def test_a_wrong_answer_is_found() -> None:
    """An answer that depends on the moment is not the undisturbed one."""
    model = chain("Neg", "Abs", "Exp", "Neg", shape=(2, 3))
    node = onnx.helper.make_node("RandomUniformLike", ["v2"], ["noise"], name="noise")
    model.graph.node[2].input[0] = "noise"
    model.graph.node.insert(2, node)
    plan = Plan(runs=20, kills=1, stretches=1, callers=2, workers=2)
    made = Soak(model, [{"x": np.ones((2, 3), np.float32)}], plan)
    told = made.run()
    assert told["wrong"] > 0 and told["faults"][0].startswith("wrong answer: run ")
    assert f"{told['wrong']} wrong" in summary(told)


def test_the_command_saves_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "chain.onnx"
    onnx.save(chain("Neg", "Abs", "Exp", "Neg"), path)
    sizes = ["--runs", "40", "--kills", "2", "--stretches", "2", "--callers", "2", "--workers", "2"]
    assert main([str(path), "--dim", "N=3", *sizes, "--no-replay", "--json", "--save", str(tmp_path)]) == 0
    told = json.loads((tmp_path / "soak.json").read_text())
    assert json.loads(capsys.readouterr().out) == told
    assert told["soak"] == "chain.onnx" and told["plan"]["replay"] is False and told["kills"] == {"SIGKILL": 2}


@pytest.mark.fast
def test_a_provider_that_would_stay_away_is_released() -> None:
    class Released:
        def __init__(self) -> None:
            self.providers: list[str] = []

        def restart(self, provider: str) -> None:
            self.providers.append(provider)

    made, session = soak_of(HELD, again=0.5), Released()
    for seconds in (None, float("inf"), 0.001):
        made._make_up(session, errors.ProviderUnavailableError("no", provider="cpu", seconds=seconds))
    made._make_up(session, errors.WorkerDiedError("dead", provider="cpu"))
    assert session.providers == ["cpu", "cpu"]


@pytest.mark.fast
@pytest.mark.parametrize("arguments", [["--signals", "SIGHUP"], ["--signals", "SIGSTOP"], ["--runs", "many"]])
def test_bad_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)


@pytest.mark.fast
def test_a_footprint_counts_what_is_held() -> None:
    before = footprint()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    kept = np.ones(4 << 20)  # 32 MiB
    fd = os.open("/dev/null", os.O_RDONLY)
    child = subprocess.Popen(["sleep", "1000"])
    try:
        after = footprint()
        assert child.pid in children()
        assert after.threads - before.threads == 1
        assert after.descriptors - before.descriptors == 1
        assert after.pss - before.pss > kept.nbytes // 2
        assert (after.workers - before.workers, after.workers_threads - before.workers_threads) == (1, 1)
    finally:
        child.kill()
        assert child.pid not in children() or child.wait()
        child.wait()
        os.close(fd)
        stop.set()
        thread.join()
    assert footprint().threads == before.threads
