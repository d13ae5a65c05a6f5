"""The chaos provider: it computes rightly, refuses what it does not know, and each fault is what its name says."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import resource
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.providers.chaos import ChaosProvider
from outrider.providers.chaos.faults import OrderedError, commit
from outrider.providers.chaos.inside import Inside
from outrider.providers.chaos.options import FAULTS, PHASES, parse_options
from outrider.providers.contract import Claim, ClaimBrokenError, Context, Decline, Node, ProviderUnavailableError, Unit
from outrider.scheduler import InferenceSession, SessionOptions, errors
from tests.builders import chain
from tests.program_harness import Bound, graph_of, unit_of

X = np.array([[-2, -1, 0.5, 3]], np.float32)
ENOUGH = 60.0  # seconds; what is waited for here takes milliseconds


def made(incarnation: int = 1, **options: Any) -> ChaosProvider:
    provider = ChaosProvider()
    provider.setup(Context(options, 0, 1, logging.getLogger("outrider"), incarnation=incarnation))
    return provider


# Options ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"falt": "exit"}, "did you mean 'fault'"),
        ({"fault": "segv"}, "did you mean 'sigsegv'.* none, sigsegv, sigabrt"),
        ({"fault": "exit", "phase": "begin"}, "its phases are start, claim, load, idle, run, stop"),
        ({"fault": "claim_overlap", "phase": "run"}, "claim_overlap cannot happen in phase 'run', only in claim"),
        ({"fault": 7}, "fault is 7"),
        ({"fault": "exit", "at": 0}, "at is 0; write a whole number from 1"),
        ({"fault": "exit", "incarnations": 1}, "a list of whole numbers"),
        ({"fault": "slow", "seconds": -1}, "a positive number of seconds"),
        ({"fault": "memory", "bytes": True}, "a positive number of bytes"),
        ({"fault": "exit", "code": 256}, "0 to 255"),
        ({"claims": "Relu"}, "a list of names"),
        ({"merge": 1}, "True or False"),
    ],
)
def test_what_it_cannot_do_is_refused_with_what_it_can(options: Mapping[str, Any], told: str) -> None:
    with pytest.raises(ProviderUnavailableError, match=told):
        parse_options(options)


def test_every_fault_has_phases_and_the_first_is_the_default() -> None:
    for fault, phases in FAULTS.items():
        assert set(phases) <= set(PHASES)
        assert parse_options({"fault": fault}).phase == phases[0]


def test_a_bad_option_reaches_the_caller() -> None:
    with pytest.raises(errors.ProviderUnavailableError, match="did you mean 'sigsegv'"):
        InferenceSession(chain("Relu"), providers=[("chaos", {"fault": "sigseg"})])


# Faults for any place, each in a process of its own -----------------------------------------------------------------


class Child:
    """A fork of this process that commits a fault at once; `side()` runs in a thread of it meanwhile."""

    def __init__(self, side: Callable[[int], None] | None = None, **options: Any) -> None:
        self.reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                faulthandler.disable()  # pytest's, which would print the stack of a crash that is wanted
                if side is not None:
                    threading.Thread(target=side, args=(writer,), daemon=True).start()
                commit(parse_options(options), Inside(), [])
                os._exit(0)
            except BaseException as error:
                os.write(writer, f"{type(error).__name__}: {error}".encode())
            finally:
                os._exit(77)
        os.close(writer)

    def says(self, seconds: float = ENOUGH) -> bytes | None:
        """What it writes next, b'' at its end, or None if it says nothing for so long."""
        ready, _, _ = select.select([self.reader], [], [], seconds)
        return os.read(self.reader, 1 << 16) if ready else None

    def ends(self, options: int = 0) -> int:
        os.close(self.reader)
        return os.waitpid(self.pid, options)[1]


@pytest.mark.parametrize(
    ("fault", "number"),
    [("sigsegv", signal.SIGSEGV), ("sigabrt", signal.SIGABRT), ("sigkill", signal.SIGKILL)],
)
def test_a_crash_ends_the_process_by_its_signal(fault: str, number: int) -> None:
    status = Child(fault=fault).ends()
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == number


def test_exit_ends_the_process_with_its_code() -> None:
    assert os.waitstatus_to_exitcode(Child(fault="exit", code=41).ends()) == 41


def test_sigstop_stops_the_process_until_it_is_continued() -> None:
    child = Child(fault="sigstop")
    assert os.WIFSTOPPED(os.waitpid(child.pid, os.WUNTRACED)[1])
    os.kill(child.pid, signal.SIGCONT)
    assert child.ends() == 0


def _ticks(writer: int) -> None:
    """After a while, so that the fault has begun: a byte."""
    time.sleep(0.2)
    os.write(writer, b".")


def test_a_hang_leaves_other_threads_alone_and_one_with_the_lock_does_not() -> None:
    free, locked = Child(_ticks, fault="hang"), Child(_ticks, fault="hang_gil")
    assert free.says() == b"."
    assert locked.says(0.4) is None
    for child in (free, locked):
        os.kill(child.pid, signal.SIGKILL)
        assert os.WTERMSIG(child.ends()) == signal.SIGKILL


def test_memory_grows_to_its_bytes_or_to_the_limit() -> None:
    leaked: list[bytearray] = []
    commit(parse_options({"fault": "memory", "bytes": 20 << 20}), Inside(), leaked)
    assert sum(map(len, leaked)) == 20 << 20

    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with open("/proc/self/status") as status:
                used = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
            resource.setrlimit(resource.RLIMIT_DATA, (used + (64 << 20), used + (64 << 20)))
            commit(parse_options({"fault": "memory"}), Inside(), [])
        except MemoryError:
            os.write(write, b"MemoryError")
        finally:
            os._exit(0)
    os.close(write)
    assert os.read(read, 100) == b"MemoryError"
    os.close(read)
    os.waitpid(pid, 0)


def test_the_others_raise_wait_or_write(tmp_path: Path) -> None:
    with pytest.raises(OrderedError, match="phase 'stop'"):
        commit(parse_options({"fault": "exception", "phase": "stop"}), Inside(), [])
    begun = time.monotonic()
    commit(parse_options({"fault": "slow", "seconds": 0.02}), Inside(), [])
    assert time.monotonic() - begun >= 0.02
    kept = os.dup(2)
    try:
        with open(tmp_path / "flood", "wb") as file:
            os.dup2(file.fileno(), 2)
            commit(parse_options({"fault": "stderr_flood", "bytes": 100_000}), Inside(), [])
    finally:
        os.dup2(kept, 2)
        os.close(kept)
    assert os.path.getsize(tmp_path / "flood") == 100_000


# In the contract ----------------------------------------------------------------------------------------------------


def results(provider: ChaosProvider, runs: int) -> list[list[np.ndarray]]:
    """What a unit of one Relu gives in so many runs."""
    with graph_of(chain("Relu")) as graph:
        unit = unit_of(graph)
        places: list[np.ndarray] = []

        def place(i: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
            places.append(np.empty(shape, dtype))
            return places[-1]

        run = provider.compile(unit).bind([X], place)
        return [[places[0].copy() if one is None else one for one in run([X])] for _ in range(runs)]


@pytest.mark.parametrize(
    ("fault", "spoilt"),
    [
        ("wrong_count", lambda right: [right, right]),
        ("wrong_dtype", lambda right: [right.astype(np.float64)]),
        ("wrong_shape", lambda right: [right[None]]),
    ],
)
def test_results_are_wrong_in_the_run_asked_for(fault: str, spoilt: Callable[[np.ndarray], list[np.ndarray]]) -> None:
    right = np.maximum(X, 0)
    for run, got in enumerate(results(made(fault=fault, at=2), 3), 1):
        expected = spoilt(right) if run == 2 else [right]
        assert [(one.dtype, one.shape) for one in got] == [(one.dtype, one.shape) for one in expected]
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("options", "failed"),
    [
        ({"at": 2}, [2]),
        ({"at": None}, [1, 2, 3]),
        ({"at": 4}, []),
        ({"incarnations": [1, 3]}, []),
        ({"incarnations": [2]}, [1]),
        ({"node": "Relu", "at": 3}, [3]),
        ({"node": "n0", "at": 3}, [3]),
        ({"node": "Abs"}, []),
        ({"phase": "load", "at": 2}, []),
    ],
)
def test_when(options: Mapping[str, Any], failed: list[int]) -> None:
    provider = made(2, fault="exception", **options)
    seen = []
    with graph_of(chain("Relu")) as graph:
        unit = unit_of(graph)
        bound = Bound(provider.compile(unit), unit, {"x": X})
        for run in (1, 2, 3):
            try:
                np.testing.assert_array_equal(bound.run()[0], np.maximum(X, 0))
            except OrderedError:
                seen.append(run)
    assert seen == failed
    assert provider.stats()["faults"] == len(failed)


def test_a_late_fault_finds_the_results_written() -> None:
    with graph_of(chain("Relu")) as graph:
        unit, room = unit_of(graph), np.zeros_like(X)
        for late in (False, True):
            room[...] = -1
            run = made(fault="exception", late=late).compile(unit).bind([X], lambda i, dtype, shape: room)
            with pytest.raises(OrderedError):
                run([X])
            assert np.array_equal(room, np.maximum(X, 0)) is late


def test_the_first_unit_is_the_faulty_one_unless_another_is_named() -> None:
    with graph_of(chain("Relu", "Abs")) as graph:
        units = [[node] for node in graph.nodes]
        for options, failing in [({}, ["n0"]), ({"node": "n1"}, ["n1"]), ({"node": "Abs"}, ["n1"])]:
            provider = made(fault="refuse_compile", at=None, **options)
            refused = []
            for nodes in [*units, *units]:  # a second session, or a second generation
                try:
                    provider.compile(_unit(nodes))
                except ClaimBrokenError as error:
                    refused += error.nodes
            assert refused == failing * 2


def _unit(nodes: list[Node]) -> Unit:
    (node,) = nodes
    return Unit(nodes=(node,), inputs=node.inputs, outputs=node.outputs, constants={})


def test_claims_are_those_of_the_other_provider_narrowed_or_spoilt() -> None:
    with graph_of(chain("Relu", "Abs", "Relu")) as graph:

        def claimed(**options: Any) -> list[list[str]]:
            answers = made(**options).claim(graph)
            return [[node.name for node in one.nodes] for one in answers if isinstance(one, Claim)]

        assert claimed() == [["n0"], ["n1"], ["n2"]]
        assert claimed(claims=["Relu"]) == [["n0"], ["n2"]]
        assert claimed(claims=["n1"]) == [["n1"]]
        assert claimed(claims=["Relu"], fault="claim_overlap") == [["n0"], ["n2"], ["n0"]]
        assert claimed(claims=["Relu"], fault="claim_not_convex") == [["n0", "n2"]]
        (reason,) = {one.reason for one in made(claims=["Abs"]).claim(graph) if isinstance(one, Decline)}
        assert reason == "chaos was told to claim only Abs"
        *_, foreign = made(fault="claim_unknown").claim(graph)
        assert all(node is not foreign.nodes[0] for node in graph.nodes)


def test_another_provider_may_compute() -> None:
    provider = made(provider="null", merge=True)
    assert provider.merge
    with graph_of(chain("Relu")) as graph:
        assert len(provider.claim(graph)) == 1
    with pytest.raises(ProviderUnavailableError, match="the cpu provider has no option"):
        made(provider_options={"reshap": True})


def test_the_record_tells_of_incarnations_and_faults(tmp_path: Path) -> None:
    path = tmp_path / "record"
    with pytest.raises(OrderedError):
        made(3, fault="exception", phase="start", record=str(path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    common = {"incarnation": 3, "pid": os.getpid(), "phase": "start"}
    assert lines == [{**common, "fault": "none"}, {**common, "fault": "exception"}]


def test_idleness_ends_with_the_fault() -> None:
    happened = threading.Event()

    class Told(ChaosProvider):
        def misbehave(self, phase: str, time: int) -> None:
            if phase == "idle":
                happened.set()

    for at, runs in ((1, 0), (2, 1)):
        happened.clear()
        provider = Told()
        options = {"fault": "exit", "phase": "idle", "at": at, "after": 0.01}
        provider.setup(Context(options, 0, 1, logging.getLogger("outrider")))
        results(provider, runs)
        assert happened.wait(ENOUGH)
        provider.close()


def test_nothing_happens_in_idleness_before_its_time() -> None:
    provider = made(fault="exit", phase="idle", at=2, after=0.001)
    results(provider, 0)
    time.sleep(0.05)
    provider.close()


# In a worker --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "kind", "told"),
    [
        ("stale_reference", (errors.ProviderContractError, errors.LayoutError), "header"),
        ("malformed_message", errors.WorkerDiedError, "SIGKILL"),
    ],
)
def test_what_reaches_into_the_worker(fault: str, kind: Any, told: str) -> None:
    """These show above all that `inside.py` still finds what it looks for."""
    options = SessionOptions(replay=False, fallback=False)
    chaos = ("chaos", {"fault": fault, "at": 4, "claims": ["Relu"], "incarnations": [1]})
    with InferenceSession(chain("Neg", "Relu", "Neg"), providers=[chaos, "cpu"], options=options) as session:
        expected = -np.maximum(-X, 0)
        for _ in range(3):
            np.testing.assert_array_equal(session.run(None, {"x": X})[0], expected)
        with pytest.raises(kind, match=told):
            session.run(None, {"x": X})
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], expected)
