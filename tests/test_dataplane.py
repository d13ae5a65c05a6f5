"""Corners of the data plane and of supervision, each once the place of a fault."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import pathlib
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto

from outrider.scheduler import Fleet, InferenceSession, SessionOptions, errors
from outrider.scheduler.replica import Replica
from outrider.scheduler.runner import Runner
from outrider.scheduler.slots import Slots
from outrider.scheduler.steady import SteadyRun
from outrider.shm.board import BoardWriter
from outrider.shm.leases import PoolWriter
from outrider.shm.places import Places
from outrider.shm.segment import PAGE, Segment, create_segment
from tests.builders import chain, model, node, tensor
from tests.gates import end, until

pytestmark = pytest.mark.fast

AWKWARD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "awkward_providers.py")
X = np.array([[1, 2, 3, 4]], np.float32)
LARGE = np.zeros(1 << 16, np.float32)  # 256 KiB: leased, not copied
ENOUGH = 60.0  # seconds; what is waited for here takes milliseconds


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet(["cpu", "cpu:1"]) as shared:
        yield shared


def copies_of_a_run(session: InferenceSession, x: np.ndarray) -> int:
    before = session.stats()["copies"]
    session.run(None, {"x": x})
    return session.stats()["copies"] - before


# Blocks of the output pool -------------------------------------------------------------------------------------------
def test_a_block_that_came_back_smaller_is_not_free_for_what_was_there() -> None:
    fd = create_segment("pool")
    pool = Segment(fd, writable=True)
    os.close(fd)
    words = memoryview(bytearray(8 * 4)).cast("Q")
    writer = PoolWriter(pool, words, 0, 4, limit=4 * PAGE, memory=1)
    block, offset = writer.take(4 * PAGE) or (-1, -1)
    words[block] += 1
    assert writer.is_free(block, offset, 4 * PAGE)
    assert writer.take(PAGE) == (block, offset)  # the large one is dropped for it, number and place are the same
    words[block] += 1
    assert writer.is_free(block, offset, PAGE)
    assert not writer.is_free(block, offset, 4 * PAGE)


def test_runs_that_fail_half_way_lose_no_block() -> None:
    split = model(
        [node("Split", "x", "y z", num_outputs=2, axis=0)],
        [tensor("x", ["N"])],
        [tensor("y", None), tensor("z", None)],
    )
    options = SessionOptions(output_memory=1 << 20)
    with InferenceSession(split, providers=[f"{AWKWARD}:FailsLate"], options=options) as session:
        bad = LARGE.copy()
        bad[0] = 1
        for _ in range(5):
            with pytest.raises(errors.ProviderContractError):
                session.run(None, {"x": bad})
        assert copies_of_a_run(session, LARGE) == 3  # the input, and each output where it is returned


def test_a_full_pool_is_used_again_when_results_are_dropped(fleet: Fleet) -> None:
    options = SessionOptions(fleet=fleet, output_memory=1 << 20)
    with InferenceSession(chain("Neg", shape=["N"]), options=options) as session:
        held = [session.run(None, {"x": LARGE}) for _ in range(8)]
        assert copies_of_a_run(session, LARGE) == 2
        held.clear()
        assert copies_of_a_run(session, LARGE) == 1


# Interrupted callers -------------------------------------------------------------------------------------------------
def _interrupted(patch: pytest.MonkeyPatch, kind: type, method: str, call: int) -> None:
    """Raise KeyboardInterrupt in the main thread's call of that number."""
    original, count = getattr(kind, method), [0]

    def wrapped(self: Any, *args: Any, **named: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            count[0] += 1
            if count[0] == call:
                raise KeyboardInterrupt
        return original(self, *args, **named)

    patch.setattr(kind, method, wrapped)


@pytest.mark.parametrize(
    ("kind", "method", "call", "steady"),
    [
        (Runner, "_wait", 1, False),
        *[(BoardWriter, "publish", call, False) for call in (1, 2, 3)],
        (SteadyRun, "start", 1, True),
        (SteadyRun, "ended", 1, True),
    ],
)
def test_after_an_interrupt_the_next_run_is_right_and_no_block_is_lost(
    fleet: Fleet, kind: type, method: str, call: int, steady: bool
) -> None:
    both = model([node("Add", "x z", "y")], [tensor("x", ["N"]), tensor("z", ["N"])], [tensor("y", None)])
    options = SessionOptions(fleet=fleet, output_memory=1 << 19, max_in_flight=1)
    with InferenceSession(both, options=options) as session:
        for _ in range(2):
            session.run(None, {"x": LARGE, "z": LARGE})
        for _ in range(4):
            with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
                _interrupted(patch, kind, method, call)
                session.run(None if steady else ["y"], {"x": LARGE, "z": LARGE})
        before = session.stats()["copies"]
        (y,) = session.run(None, {"x": LARGE + 1, "z": LARGE + 2})
        assert (y == 3).all()
        assert session.stats()["copies"] - before == 2


def test_an_interrupted_take_all_takes_nothing() -> None:
    slots = Slots([1, 2])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        _interrupted(patch, Slots, "_serve", 1)
        slots.take_all()
    slots.take_all()
    slots.give_all()


# Ends that meet ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("deaths", [1, 2])
def test_a_death_between_load_and_first_run_is_not_forgotten(monkeypatch: pytest.MonkeyPatch, deaths: int) -> None:
    """Of the worker that a session began with, and of its successor."""
    left = [deaths]

    def killed_before(method: Any, of: Any) -> Any:
        def wrapped(self: Replica, *args: Any) -> None:
            if left[0]:
                left[0] -= 1
                one = of(args)
                os.kill(one.pid, signal.SIGKILL)
                assert until(lambda: one.life.state == "dead")
            method(self, *args)

        return wrapped

    install = killed_before(Replica.install, lambda args: args[1].sides[1].serving)
    monkeypatch.setattr(Replica, "install", install)
    monkeypatch.setattr(Replica, "about_to_serve", killed_before(Replica.about_to_serve, lambda args: args[1]))
    with InferenceSession(chain("Relu")) as session:
        if deaths == 2:
            with pytest.raises(errors.ProviderUnavailableError, match="died 2 times in a row") as caught:
                session.run(None, {"x": X})
            assert caught.value.provider == "cpu" and 0 < caught.value.seconds <= 1
            session.restart("cpu")
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], X)
        health = session.health()["cpu"]
        assert health == {"state": "ready", "incarnation": deaths + 1, "deaths": deaths, "quarantined": []}


def _in_thread(action: Any) -> tuple[threading.Thread, list[BaseException]]:
    seen: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except errors.OutriderError as error:
            seen.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, seen


def test_close_while_a_run_starts_a_worker_anew(tmp_path: pathlib.Path) -> None:
    flag = tmp_path / "slow"
    session = InferenceSession(chain("Relu"), providers=[(f"{AWKWARD}:Copies", {"slow_start": str(flag)})])
    flag.touch()
    worker = session._fleet.workers[0]
    end(worker.pid)
    caller, seen = _in_thread(lambda: session.run(None, {"x": X}))
    assert until(lambda: worker.incarnation == 2)
    session.close()
    caller.join(ENOUGH)
    assert not caller.is_alive()
    assert isinstance(seen[0], errors.SessionClosedError)


def test_a_fleet_that_is_closed_ends_the_runs_on_it() -> None:
    with Fleet([(f"{AWKWARD}:Copies", {"operators": ["Relu"], "seconds": 0.2}), "cpu"]) as fleet:
        session = InferenceSession(chain("Relu", "Neg", "Relu"), options=SessionOptions(fleet=fleet))
        started = threading.Event()

        def run() -> None:
            started.set()
            session.run(None, {"x": X})

        caller, seen = _in_thread(run)
        started.wait()
        fleet.close()
        caller.join(ENOUGH)
        assert not caller.is_alive()
        assert isinstance(seen[0], errors.SessionClosedError)
        with pytest.raises(errors.SessionClosedError):
            session.run(None, {"x": X})
        session.close()


def test_a_session_may_be_collected_on_the_thread_of_its_monitor() -> None:
    session = InferenceSession(chain("Relu"))
    monitor, cycle = session._fleet.monitor, [session]
    cycle.append(cycle)
    gc.disable()
    try:
        del session, cycle
        monitor.call(lambda: [gc.collect(), None][1])
        monitor.join(ENOUGH)
    finally:
        gc.enable()
    assert not monitor.is_alive()


def test_a_forked_process_ends_while_a_thread_of_its_parent_runs() -> None:
    with InferenceSession(chain("Relu"), providers=[(f"{AWKWARD}:Copies", {"seconds": 0.3})]) as session:
        caller, seen = _in_thread(lambda: session.run(None, {"x": X}))
        assert until(lambda: any(slot.pending for slot in session._runner.slots.items))
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # the end of a child that hangs
            session._resources._finalizer()  # what runs at its exit
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        caller.join(ENOUGH)
        assert seen == []
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], X)


# What providers say --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("how", "words"), [("surrogate", "udc80 text"), ("no text", "NoText without text")])
def test_a_worker_survives_whatever_its_provider_says(how: str, words: str) -> None:
    name = f"{AWKWARD}:Rude"
    with Fleet([(name, {"how": how})]) as fleet:
        for _ in range(2):
            with InferenceSession(chain("Relu"), options=SessionOptions(fleet=fleet)) as session:
                with pytest.raises(errors.KernelError, match=words):
                    session.run(None, {"x": X})
                told = session.stats()["providers"][name]
                assert (told["numpy"], told["huge"], told["5"]) == (3, str(1 << 80), r"bad \udc80 text")
        assert fleet.health()[name]["deaths"] == 0


def test_the_simplest_provider_serves_nodes_that_nobody_reads() -> None:
    raw = model([node("Relu", "x", "y"), node("Neg", "x", "unread")], [tensor("x", ["N", 4])], [tensor("y", None)])
    with InferenceSession(raw, providers=[f"{AWKWARD}:Copies"]) as session:
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], X)


# The caller's surroundings -------------------------------------------------------------------------------------------
def test_odd_surroundings_do_not_keep_workers_from_starting(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("long" * 25)  # paths of sockets end at 107 bytes
    long.mkdir()
    (tmp_path / "json.py").write_text("raise RuntimeError('a file of the user')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setattr(sys, "path", [*sys.path, b"/bytes", None, pathlib.Path("/a/path")])
    with InferenceSession(chain("Relu")) as session:
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], X)
    assert list(long.iterdir()) == []


def test_too_few_descriptors_are_a_typed_error() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    few = next(limit for limit in range(hard) if limit - sum(one < limit for one in used) == 8)
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        with pytest.raises(errors.ProviderUnavailableError, match="file descriptors"):
            Fleet(["cpu"])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_many_sessions_at_once_in_one_process(fleet: Fleet) -> None:
    with contextlib.ExitStack() as sessions:
        options = SessionOptions(fleet=fleet, max_in_flight=1)
        for _ in range(50):
            session = sessions.enter_context(InferenceSession(chain("Relu"), providers=["cpu"], options=options))
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], X)


# Edges ---------------------------------------------------------------------------------------------------------------
CUT = {"a": "cpu", "b": "cpu:1", "c": "cpu"}
DTYPES = {
    TensorProto.BFLOAT16: ml_dtypes.bfloat16,
    TensorProto.FLOAT8E4M3FN: ml_dtypes.float8_e4m3fn,
    TensorProto.INT4: ml_dtypes.int4,
    TensorProto.BOOL: np.bool_,
    TensorProto.COMPLEX64: np.complex64,
    TensorProto.STRING: object,
}


@pytest.mark.parametrize("code", DTYPES)
def test_every_kind_of_element_and_shape_crosses_workers(fleet: Fleet, code: int) -> None:
    raw = model(
        [node("Identity", "x", "a", "a"), node("Identity", "a", "b", "b"), node("Identity", "b", "y", "c")],
        [tensor("x", None, code)],
        [tensor("y", None, code), tensor("a", None, code)],
    )
    one: Any = "ü" if code == TensorProto.STRING else 1
    with InferenceSession(raw, options=SessionOptions(fleet=fleet, pins=CUT)) as session:
        for shape in ((3,), (), (0, 3), (3, 0), (2, 1, 2)):
            x = np.full(shape, one, DTYPES[code])
            for result in session.run(None, {"x": x}):
                assert (result.dtype, result.shape) == (x.dtype, x.shape)
                assert (result == x).all()


@pytest.mark.parametrize(("slots", "memory"), [(1, 0), (8, 1 << 20)])
def test_many_threads_and_shapes(fleet: Fleet, slots: int, memory: int) -> None:
    """More shapes than an edge remembers, buffers that grow, results that are held meanwhile."""
    raw = model(
        [node("Neg", "x", "p", "a"), node("Neg", "p", "q", "b"), node("Abs", "q", "y", "c")],
        [tensor("x", ["N"])],
        [tensor("y", None)],
    )
    options = SessionOptions(fleet=fleet, pins=CUT, max_in_flight=slots, output_memory=memory)
    wrong: list[BaseException] = []

    def run(seed: int) -> None:
        rng = np.random.default_rng(seed)
        held: list[tuple[np.ndarray, np.ndarray]] = []
        try:
            for i in range(30):
                x = np.arange(int(rng.choice([1, 7, 20000, int(rng.integers(1, 50000))])), dtype=np.float32) + seed + i
                held = [*held[-5:], (x, session.run(None, {"x": x})[0])]
                for before, result in held:
                    np.testing.assert_array_equal(result, before)
        except BaseException as error:
            wrong.append(error)

    with InferenceSession(raw, options=options) as session:
        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_places_of_slots_that_grow_side_by_side_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = create_segment("places")
    segment = Segment(fd, writable=True)
    os.close(fd)
    slots = 4
    places = Places(segment, BoardWriter(segment, 1, slots, 1), 1, slots)
    allocate, inside, together = places._ranges.allocate, [0], [0]

    def lingering(nbytes: int) -> int:
        inside[0] += 1
        together[0] = max(together[0], inside[0])
        time.sleep(0.002)
        inside[0] -= 1
        return allocate(nbytes)

    monkeypatch.setattr(places._ranges, "allocate", lingering)

    def grow(slot: int) -> None:
        for step in range(5):
            places.tensor(0, slot, 2, np.dtype(np.uint8), (1 + 1000 * step,), "value")

    threads = [threading.Thread(target=grow, args=(slot,)) for slot in range(slots)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == [1]
    ranges = sorted((buffer.offset, buffer.room) for buffer in places._buffers.values())
    assert all(start + size <= after for (start, size), (after, _) in itertools.pairwise(ranges))
