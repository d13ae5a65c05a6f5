"""Traces: what is in them, that they are right, and that nothing is recorded where none was asked for."""

from __future__ import annotations

import concurrent.futures
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from outrider.providers.wire import messages
from outrider.providers.wire.spans import Recorder
from outrider.scheduler import Fleet, InferenceSession, ProviderSpec, SessionOptions, errors
from outrider.scheduler.trace import SessionTrace
from tests.builders import chain, model, node, tensor
from tests.trace_reader import TraceFile

HERE = os.path.dirname(os.path.abspath(__file__))
TOUCHY = f"{HERE}/own_providers.py:Touchy"
STEPS = f"{HERE}/tracing_providers.py:TellsSteps"
X = np.linspace(-1, 1, 100, dtype=np.float32)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet(["cpu", "cpu:1", TOUCHY, STEPS]) as made:
        yield made


def three(fleet: Fleet, first: str = "cpu", **options: Any) -> InferenceSession:
    """y = exp(-relu(x)) as three partitions on two or three workers."""
    pins = {"n0": first, "n1": "cpu:1", "n2": "cpu"}
    return InferenceSession(
        chain("Relu", "Neg", "Exp", shape=["N"]), options=SessionOptions(fleet=fleet, pins=pins, **options)
    )


def right(results: list[np.ndarray], x: np.ndarray = X) -> None:
    np.testing.assert_allclose(results[0], np.exp(-np.maximum(x, 0)), rtol=1e-6)


# What is in it -------------------------------------------------------------------------------------------------------
def test_every_way_to_run_is_traced_alike(fleet: Fleet, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with three(fleet) as session:
        for _ in range(3):
            right(session.run(None, {"x": X}))
        session.start_trace()
        right(session.run(None, {"x": X}))
        right(session.run(None, {"x": X}))  # the steady state
        right(session.run(["y"], {"x": X}))  # the general way
        right(session.run_async(None, {"x": X}).result())
        right(session.run(None, {"x": X[:7]}), X[:7])  # another shape
        assert session.stop_trace(path) is None
        right(session.run(None, {"x": X}))
        told = session.stats()
    trace = TraceFile(path)
    assert trace.missing == []
    workers = {pid: name for pid, name in trace.processes.items() if pid != os.getpid()}
    assert {name.split()[0] for name in workers.values()} >= {"cpu", "cpu:1"}
    runs = trace.of("run")
    assert [one.args["run"] for one in runs] == [4, 5, 6, 7, 8]
    assert {trace.threads[one.pid, one.tid] for one in runs} == {"MainThread", "outrider-run"}
    for one in runs:
        nbytes = X[:7].nbytes if one.args["run"] == 8 else X.nbytes
        copies = {inner.name: inner.args["bytes"] for inner in trace.inside(one, "copy")}
        assert copies == {"inputs": nbytes, "results": nbytes}
        assert [inner.name for inner in trace.inside(one, "wait")] == ["workers"]
        partitions = trace.of("partition", run=one.args["run"])
        assert [inner.args["partition"] for inner in partitions] == [0, 1, 2]
        for number, partition in enumerate(partitions):
            (unit,), (step,) = trace.inside(partition, "unit"), trace.inside(partition, "step")
            assert unit.name == step.name == f"n{number}" and unit.holds(step)
            value = ["v1", "v2", "y"][number]
            assert unit.args["writes"] == {value: nbytes} and step.args["bytes"] == unit.args["bytes"] == nbytes
            assert step.args["op"] == ["ai.onnx::Relu", "ai.onnx::Neg", "ai.onnx::Exp"][number]
            assert bool(trace.inside(unit, "bind")) == (one.args["run"] == 8)
        ids = [one.args["run"], *[inner.args["run"] for inner in partitions]]
        leads = [
            (value, source.name, target.name)
            for value, source, target in trace.arrows
            if source in trace.inside(one, "copy") or any(inner.holds(source) for inner in partitions)
        ]
        assert len(set(ids)) == 1
        assert leads == [
            ("x", "inputs", "partition 0"), ("v1", "n0", "partition 1"), ("v2", "n1", "partition 2"),
            ("y", "n2", "results"),
        ]  # fmt: skip
    assert len(trace.arrows) == 4 * len(runs)
    parts = [(one["partition"], one["provider"], one["nodes"], one["runs"]) for one in told["per_partition"]]
    assert parts == [(0, "cpu", 1, 9), (1, "cpu:1", 1, 9), (2, "cpu", 1, 9)]
    assert all(one["seconds"] > 0 for one in told["per_partition"])
    operators = {name: (one["nodes"], one["runs"]) for name, one in told["per_operator"].items()}
    assert operators == {"ai.onnx::Exp": (1, 5), "ai.onnx::Neg": (1, 5), "ai.onnx::Relu": (1, 5)}
    for name, one in told["per_operator"].items():
        assert 0 < one["seconds"] <= sum(part["seconds"] for part in told["per_partition"]), name


def test_a_provider_may_tell_its_steps_and_one_that_does_not_is_seen_too(fleet: Fleet, tmp_path: Path) -> None:
    for first, steps, copies in ((STEPS, ["mask", "n0"], 1), (TOUCHY, [], 0)):
        with three(fleet, first) as session:
            session.start_trace()
            for _ in range(3):
                right(session.run(None, {"x": X}))
            session.stop_trace(tmp_path / "trace.json")
            told = session.stats()["per_operator"]
        trace = TraceFile(tmp_path / "trace.json")
        for partition in trace.of("partition", partition=0):
            assert trace.processes[partition.pid].startswith(first)
            (unit,) = trace.inside(partition, "unit")
            assert unit.args["writes"] == {"v1": X.nbytes}
            assert [step.name for step in trace.inside(unit, "step")] == steps
            copied = trace.inside(unit, "copy")
            assert [(copy.name, copy.args["bytes"]) for copy in copied] == [("v1", X.nbytes)] * copies
        assert (told["ai.onnx::Relu"]["nodes"], told["ai.onnx::Relu"]["runs"]) == (1, 3)
        values = [value for value, source, _ in trace.arrows if source.name == "n0"]
        assert values == ["v1"] * 3


def test_what_is_bound_in_place_is_seen_to_copy_nothing(fleet: Fleet, tmp_path: Path) -> None:
    with three(fleet) as session:
        fed, made = session.empty("x", X.shape), session.empty("y", X.shape)
        fed[:] = X
        binding = session.io_binding()
        binding.bind_input("x", "cpu", 0, np.float32, X.shape, fed.ctypes.data)
        binding.bind_output("y", "cpu", 0, np.float32, X.shape, made.ctypes.data)
        session.start_trace()
        for _ in range(3):
            session.run_with_iobinding(binding)
            right([made])
        session.stop_trace(tmp_path / "trace.json")
    trace = TraceFile(tmp_path / "trace.json")
    assert [one.args["bytes"] for one in trace.of("copy")] == [0] * 6
    assert len(trace.of("run")) == 3 and len(trace.of("partition")) == 9 and len(trace.arrows) == 12


def test_bodies_and_nodes_of_unknown_size_show_their_steps(fleet: Fleet, tmp_path: Path) -> None:
    def scalar(name: str, kind: int) -> Any:
        return tensor(name, [], kind)

    body = helper.make_graph(
        [node("Add", "s x", "s2", "add"), node("Identity", "c", "c2")],
        "body", [scalar("i", TensorProto.INT64), scalar("c", TensorProto.BOOL), tensor("s", ["N"])],
        [scalar("c2", TensorProto.BOOL), tensor("s2", ["N"])],
    )  # fmt: skip
    made = model(
        [node("Loop", "n - x", "sum", "loop", body=body), node("NonZero", "sum", "where", "found"),
         node("Neg", "sum", "y", "last")],
        [tensor("x", ["N"])], [tensor("y", ["N"]), tensor("where", None, TensorProto.INT64)],
        {"n": np.array(3, np.int64)},
    )  # fmt: skip
    with InferenceSession(made, providers=["cpu"], options=SessionOptions(fleet=fleet)) as session:
        before = session.run(None, {"x": X})
        session.start_trace()
        traced = session.run(None, {"x": X})
        session.stop_trace(tmp_path / "trace.json")
        operators = session.stats()["per_operator"]
    for one, other in zip(before, traced, strict=True):
        np.testing.assert_array_equal(one, other)
    trace = TraceFile(tmp_path / "trace.json")
    (loop,) = [step for step in trace.of("step") if step.name == "loop"]
    inner = [step.name for step in trace.inside(loop, "step") if step is not loop]
    assert inner == ["loop/body/add"] * 3
    assert {step.name for step in trace.of("step") if not loop.holds(step)} == {"found", "last"}
    assert (operators["ai.onnx::Add"]["nodes"], operators["ai.onnx::Add"]["runs"]) == (1, 3)


def test_runs_in_flight_overlap(tmp_path: Path) -> None:
    for number in range(2):
        for way in ("down", "up"):
            os.mkfifo(tmp_path / f"{number}{way}")
    stages = [
        ProviderSpec(f"{HERE}/tracing_providers.py:Meets:{stage}", options={"stage": stage, "folder": str(tmp_path)})
        for stage in range(3)
    ]
    made = chain("Neg", "Abs", "Exp", shape=["N"])
    with InferenceSession(made, providers=stages, options=SessionOptions(max_in_flight=3)) as session:
        session.start_trace()
        runs = [session.run_async(None, {"x": X + number}) for number in range(3)]
        for number, run in enumerate(runs):
            np.testing.assert_allclose(run.result()[0], np.exp(np.abs(-(X + number))), rtol=1e-6)
        session.stop_trace(tmp_path / "trace.json")
    trace = TraceFile(tmp_path / "trace.json")
    at = {(one.args["partition"], one.args["run"]): one for one in trace.of("partition")}
    assert len(at) == 9 and len({one.pid for one in at.values()}) == 3

    def together(*spans: Any) -> bool:
        return max(one.start for one in spans) < min(one.end for one in spans)

    assert together(at[0, 2], at[1, 1]) and together(at[1, 3], at[2, 2])
    assert together(at[0, 3], at[1, 2]) and together(at[1, 2], at[2, 1])
    for run in (1, 2, 3):
        assert at[0, run].start < at[1, run].start < at[2, run].start


# What goes wrong -----------------------------------------------------------------------------------------------------
def test_a_run_that_fails_says_so(fleet: Fleet, tmp_path: Path) -> None:
    with three(fleet, TOUCHY) as session:
        session.start_trace()
        with pytest.raises(errors.KernelError):
            session.run(None, {"x": np.full(3, -13, np.float32)})
        right(session.run(None, {"x": X}))
        session.stop_trace(tmp_path / "trace.json")
    trace = TraceFile(tmp_path / "trace.json")
    failed, well = (
        [one.args.get("error") for one in (*trace.of("run", run=run), *trace.of("partition", run=run))]
        for run in (1, 2)
    )
    assert failed == ["KernelError", "KernelError", "void", "void"]
    assert well == [None] * 4
    (unit,) = trace.inside(trace.of("partition", run=1)[0], "unit")
    assert unit.args["error"] == "ArithmeticError"


def test_a_worker_that_dies_leaves_a_note_and_its_successor_is_traced(tmp_path: Path) -> None:
    made = chain("Relu", "Neg", "Exp", shape=["N"])
    options = SessionOptions(pins={"n0": TOUCHY}, replay=False, fallback=False)
    with InferenceSession(made, providers=["cpu", TOUCHY], options=options) as session:
        session.start_trace()
        right(session.run(None, {"x": X}))
        with pytest.raises(errors.WorkerDiedError):
            session.run(None, {"x": np.full(3, -666, np.float32)})
        right(session.run(None, {"x": X}))
        session.stop_trace(tmp_path / "trace.json")
    trace = TraceFile(tmp_path / "trace.json")
    (note,) = trace.missing
    assert TOUCHY in note and "died" in note
    assert [one.args.get("error") for one in trace.of("run")] == [None, "WorkerDiedError", None]
    skipped, served = trace.of("partition", partition=0)  # the second run had failed when the successor came
    assert "start 2" in trace.processes[served.pid] and skipped.pid == served.pid
    assert [(one.args["run"], one.args.get("error")) for one in (skipped, served)] == [
        (2, "RunCancelledError"), (3, None),
    ]  # fmt: skip
    assert len(trace.of("partition", run=1)) == 1
    assert [one.name for one in trace.of("deploy")] == ["deploy"]


def test_a_worker_that_is_busy_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipes = {name: str(tmp_path / name) for name in ("begun", "gate")}
    for path in pipes.values():
        os.mkfifo(path)
    begun, gate = (os.open(path, os.O_RDWR) for path in pipes.values())
    spec = ProviderSpec(f"{HERE}/tracing_providers.py:Waits", options=pipes)
    try:
        with InferenceSession(chain("Neg", shape=["N"]), providers=[spec]) as session:
            session.start_trace()
            run = session.run_async(None, {"x": X})
            os.read(begun, 1)
            with monkeypatch.context() as patch:
                patch.setattr("outrider.scheduler.trace.ANSWER_SECONDS", 0.05)
                session.stop_trace(tmp_path / "trace.json")
                with pytest.raises(errors.TraceError):
                    session.stop_trace(tmp_path / "trace.json")
                session.start_trace()  # it is still busy
            os.write(gate, b".")
            np.testing.assert_array_equal(run.result()[0], -X)
            os.write(gate, b".")
            session.run(None, {"x": X})
            session.stop_trace(tmp_path / "later.json")
    finally:
        os.close(begun)
        os.close(gate)
    (note,) = TraceFile(tmp_path / "trace.json").missing
    assert "busy" in note
    later = TraceFile(tmp_path / "later.json")
    assert "busy" in later.missing[0] and later.of("partition", run=2)


def test_a_trace_that_ends_on_the_monitor_s_thread_waits_for_nobody(fleet: Fleet) -> None:
    """As when the garbage collector finds a session there."""
    trace, number, ended = SessionTrace(), fleet.next_session(), concurrent.futures.Future[Any]()
    trace.watch(fleet, number, fleet.workers)
    fleet.monitor.call(lambda: ended.set_result(trace.finish(None)))
    missing = ended.result()["otherData"]["missing"]
    assert len(missing) == len(fleet.workers) and all("not closed" in note for note in missing)
    for worker in fleet.workers:
        fleet.monitor.post(worker, messages.Unload(number))


def test_started_twice_or_not_at_all_is_an_error(fleet: Fleet, tmp_path: Path) -> None:
    with three(fleet) as session:
        with pytest.raises(errors.TraceError, match="start_trace"):
            session.stop_trace(tmp_path / "trace.json")
        session.start_trace()
        with pytest.raises(errors.TraceError, match="stop_trace"):
            session.start_trace()
        right(session.run(None, {"x": X}))
        for bad in (tmp_path, tmp_path / "no such folder" / "trace.json", 7):
            with pytest.raises(errors.TraceError) as caught:
                session.stop_trace(bad)
            assert caught.value.reason
        session.stop_trace(tmp_path / "trace.json")  # it went on
        assert len(TraceFile(tmp_path / "trace.json").of("run")) == 1
        session.start_trace()
        session.stop_trace(tmp_path / "trace.json")
        assert TraceFile(tmp_path / "trace.json").spans == []
        assert os.listdir(tmp_path) == ["trace.json"]
    for call in (session.start_trace, lambda: session.stop_trace(tmp_path / "trace.json")):
        with pytest.raises(errors.SessionClosedError):
            call()


def test_a_file_that_cannot_be_written_can_be_written_elsewhere(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **keywords: Any) -> str:
        raise OSError(28, "No space left on device")

    with three(fleet) as session:
        session.start_trace()
        right(session.run(None, {"x": X}))
        with monkeypatch.context() as patch:
            patch.setattr(json, "dumps", full)
            with pytest.raises(errors.TraceError, match="No space left"):
                session.stop_trace(tmp_path / "trace.json")
        assert os.listdir(tmp_path) == []
        session.stop_trace(tmp_path / "trace.json")
    assert len(TraceFile(tmp_path / "trace.json").of("partition")) == 3


# Who is traced -------------------------------------------------------------------------------------------------------
def test_nothing_is_recorded_without_a_trace(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> None:
        raise AssertionError("a span")

    monkeypatch.setattr(Recorder, "add", never)
    with three(fleet) as session:
        for _ in range(3):
            right(session.run(None, {"x": X}))
        right(session.run_async(None, {"x": X}).result())
        assert session.stats()["per_operator"] == {}
        for worker in fleet.workers:
            data = fleet.ask_for_spans(worker, session._runner.replicas[0].deployer.session, on=False).result()
            assert data.ended and data.spans == []


def test_sessions_of_one_fleet_see_their_own_spans(fleet: Fleet, tmp_path: Path) -> None:
    with three(fleet) as one, three(fleet) as other, three(fleet) as neither:
        one.start_trace()
        right(neither.run(None, {"x": X}))
        right(one.run(None, {"x": X}))
        other.start_trace()
        for session in (other, neither, one, other):
            right(session.run(None, {"x": X}))
        one.stop_trace(tmp_path / "one.json")
        right(other.run(None, {"x": X}))
        right(one.run(None, {"x": X}))
        other.stop_trace(tmp_path / "other.json")
        numbers = [session._runner.replicas[0].deployer.session for session in (one, other)]
    for name, number, runs in zip(("one", "other"), numbers, (2, 3), strict=True):
        trace = TraceFile(tmp_path / f"{name}.json")
        assert len(trace.of("run")) == runs
        assert len(trace.of("partition")) == len(trace.of("step")) == 3 * runs
        assert {span.args["session"] for span in (*trace.of("partition"), *trace.of("run"))} == {number}


def test_replicas_are_traced_as_one_session(fleet: Fleet, tmp_path: Path) -> None:
    made, options = chain("Neg", "Abs", shape=["N"]), SessionOptions(fleet=fleet, strategy="replicate")
    with InferenceSession(made, providers=["cpu", "cpu:1"], options=options) as session:
        session.start_trace()
        for run in [session.run_async(None, {"x": X}) for _ in range(6)]:
            np.testing.assert_array_equal(run.result()[0], np.abs(X))
        session.stop_trace(tmp_path / "trace.json")
        told = session.stats()
    trace = TraceFile(tmp_path / "trace.json")
    assert sorted(one.args["run"] for one in trace.of("partition")) == [1, 2, 3, 4, 5, 6]
    where = {one.args["run"]: one.args["session"] for one in trace.of("partition")}
    assert where == {one.args["run"]: one.args["session"] for one in trace.of("run")}
    assert len(trace.arrows) == 12
    assert [(one["provider"], one["nodes"]) for one in told["per_partition"]] == [("cpu", 2), ("cpu:1", 2)]
    assert sum(one["runs"] for one in told["per_partition"]) == 6
    # The two are one op.
    assert {name: one["runs"] for name, one in told["per_operator"].items()} == {"ai.onnx::Neg+Abs": 6}


def test_a_long_trace_comes_in_parts(fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    ask = Fleet.ask_for_spans

    def counted(self: Fleet, worker: Any, session: int, on: bool) -> Any:
        asked.append(worker.name)
        return ask(self, worker, session, on)

    monkeypatch.setattr(Fleet, "ask_for_spans", counted)
    long = chain(*["Neg"] * 50, shape=["N"])
    for number, one in enumerate(long.graph.node):
        one.name = f"{number} {'x' * 300}"
    options = SessionOptions(fleet=fleet, optimization="none")  # a span for each node
    with InferenceSession(long, providers=["cpu"], options=options) as session:
        session.start_trace()
        for _ in range(60):
            session.run(None, {"x": X})
        session.stop_trace(tmp_path / "trace.json")
    assert asked.count("cpu") > 2  # to begin, and more than one part
    trace = TraceFile(tmp_path / "trace.json")
    assert len(trace.of("run")) == len(trace.of("partition")) == 60
    assert len(trace.of("step")) == 60 * 50


# OUTRIDER_TRACE ------------------------------------------------------------------------------------------------------
def test_an_unchanged_program_is_traced_from_load_to_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.json"
    monkeypatch.setenv("OUTRIDER_TRACE", str(path))
    with InferenceSession(chain("Relu", shape=["N"])) as session:
        session.run(None, {"x": X})
    first = path.read_bytes()
    trace = TraceFile(path)
    kinds = {trace.processes[pid].split()[0]: {one.kind for one in trace.spans if one.pid == pid}
             for pid in trace.processes}  # fmt: skip
    assert kinds == {
        "coordinator": {"load", "start", "claim", "plan", "deploy", "run", "copy", "wait"},
        "cpu": {"claim", "load", "compile", "partition", "unit", "step", "bind"},
    }
    assert trace.of("load")[0].args["nodes"] == 1 and trace.missing == []

    # A second session takes another file; in this one the program's own trace takes over.
    with caplog.at_level(logging.WARNING), InferenceSession(chain("Neg", shape=["N"])) as session:
        session.run(None, {"x": X})
    assert "trace.json is there already" in caplog.text
    with InferenceSession(chain("Abs", shape=["N"])) as session:
        session.start_trace()
        with pytest.raises(errors.TraceError):
            session.start_trace()
        session.stop_trace(tmp_path / "own.json")
    assert path.read_bytes() == first
    assert sorted(os.listdir(tmp_path)) == ["own.json", f"trace.{os.getpid()}.json", "trace.json"]
    assert [one.name for one in TraceFile(tmp_path / f"trace.{os.getpid()}.json").of("unit")] == ["n0"]
    assert len(TraceFile(tmp_path / "own.json").of("load")) == 2  # the coordinator's and the worker's


def test_a_program_that_closes_nothing_is_traced_whole(tmp_path: Path) -> None:
    onnx.save(chain("Relu", shape=["N"]), tmp_path / "model.onnx")
    program = """
import numpy, outrider
session = outrider.InferenceSession("model.onnx")
session.run(None, {"x": numpy.ones(3, numpy.float32)})
"""
    environment = {**os.environ, "OUTRIDER_TRACE": "trace.json"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    trace = TraceFile(tmp_path / "trace.json")
    assert [one.name for one in trace.of("unit")] == ["n0"] and trace.missing == []


def test_a_session_that_cannot_be_made_is_traced_and_a_bad_path_is_told_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_TRACE", str(tmp_path / "trace.json"))
    with pytest.raises(errors.ModelLoadError):
        InferenceSession(b"nonsense")
    (load,) = TraceFile(tmp_path / "trace.json").spans
    assert (load.kind, load.args["error"]) == ("load", "ModelLoadError")
    monkeypatch.setenv("OUTRIDER_TRACE", str(tmp_path / "nowhere" / "trace.json"))
    with pytest.raises(errors.InvalidOptionError, match="OUTRIDER_TRACE"):
        InferenceSession(b"nonsense")


def test_a_trace_that_nobody_stops_is_told(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    with three(fleet) as session:
        session.start_trace()
    assert "never stopped" in caplog.text
