"""Who may write where: read from the kernel's own list of mappings while a session runs."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

from outrider.scheduler import InferenceSession, SessionOptions, errors
from tests.builders import chain
from tests.leaks import worker_pids

OWN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "own_providers.py")
NEITHER = SessionOptions(replay=False, fallback=False)
LARGE = np.arange(1 << 18, dtype=np.float32).reshape(-1, 4) - 1000  # its result is leased, not copied


def mappings(pid: int | str) -> dict[str, set[str]]:
    """Memfd -> the ways in which a process has it mapped: {'r', 'rw'}."""
    found: dict[str, set[str]] = {}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if match := re.search(r"/memfd:(\S+)", line):
            found.setdefault(match[1], set()).add(line.split()[1].rstrip("ps").replace("-", ""))
    return found


def test_each_segment_has_one_writer_and_results_two() -> None:
    options = SessionOptions(pins={"n1": "cpu:1"})
    with InferenceSession(chain("Neg", "Abs", "Neg"), providers=["cpu", "cpu:1"], options=options) as session:
        np.testing.assert_array_equal(session.run(None, {"x": LARGE})[0], -np.abs(LARGE))
        workers = [worker.pid for worker in session._fleet.workers]
        assert sorted(workers) == worker_pids()
        ours, *theirs = [mappings(pid) for pid in ("self", *workers)]
        number = session._runner.replicas[0].deployer.session
    coordinator, first, second = (f"outrider-{number}-{board}" for board in (0, 1, 2))
    first_results, second_results = f"{first}-results", f"{second}-results"
    assert {name: ours[name] for name in (coordinator, first, second, first_results, second_results)} == {
        coordinator: {"rw"}, first: {"r"}, second: {"r"}, first_results: {"rw"}, second_results: {"rw"},
    }  # fmt: skip
    # Where a model input may lie is mapped by those who read model inputs: here, the first.
    assert ours["outrider-progress"] == {"r"}
    expected = [
        {coordinator: "r", first: "rw", second: "r", first_results: "rw", second_results: "r", "outrider-user": "r"},
        {coordinator: "r", first: "r", second: "rw", second_results: "rw"},
    ]
    for mine, allowed in zip(theirs, expected, strict=True):
        assert mine.pop("outrider-progress") == {"rw"}  # its own
        shown = {name: ways for name, ways in mine.items() if name in ours}
        assert set(shown) - set(allowed) <= {name for name in shown if "weights" in name}
        for name, way in allowed.items():
            # A worker reads its own segment, too, where an earlier partition of it has written.
            assert shown[name] <= ({"r", "rw"} if name in (first, second) and way == "rw" else {way}), (name, shown)
            assert way in shown[name], (name, shown)


@pytest.mark.parametrize("operators", [("Relu", "Neg"), ("Identity", "Relu", "Neg")], ids=["caller's", "a peer's"])
def test_a_wild_write_ends_the_writer_and_spoils_nothing(operators: tuple[str, ...]) -> None:
    """The input of the provider lies in the coordinator's segment, or in that of another worker."""
    x = np.array([[-99, 1, -2, 3]], np.float32)
    with InferenceSession(chain(*operators), providers=[f"{OWN}:Trespasser", "cpu"], options=NEITHER) as session:
        with pytest.raises(errors.WorkerDiedError) as caught:
            session.run(None, {"x": x})
        assert (caught.value.signal, caught.value.provider) == ("SIGSEGV", f"{OWN}:Trespasser")
        assert session.health()["cpu"]["deaths"] == 0
        np.testing.assert_array_equal(session.run(None, {"x": x + 99})[0], -np.maximum(x + 99, 0))


def test_a_wild_write_into_the_callers_own_array_ends_the_writer() -> None:
    """Where it lies makes no difference: in user memory, or in the output pool of another worker."""
    x = np.arange(1 << 16, dtype=np.float32).reshape(-1, 4) - 99
    with InferenceSession(chain("Relu", "Neg"), providers=[f"{OWN}:Trespasser", "cpu"], options=NEITHER) as session:
        shared = session.empty("x", x.shape)
        shared[...] = x + 99
        result = session.run(None, {"x": shared})[0]  # in the pool of cpu
        for array in (shared, result):
            array[...] = x
            with pytest.raises(errors.WorkerDiedError, match="SIGSEGV"):
                session.run(None, {"x": array})
            np.testing.assert_array_equal(array, x)
            session.run(None, {"x": x + 99})
