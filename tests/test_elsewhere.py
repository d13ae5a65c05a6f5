"""Workers in other environments, which have numpy and nothing of ours: real virtual environments, real processes."""

from __future__ import annotations

import errno
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from outrider import __version__
from outrider.providers.wire.messages import PROTOCOL
from outrider.scheduler import (
    Fleet,
    InferenceSession,
    ProviderSpec,
    SessionOptions,
    carried,
    errors,
    interpreters,
    verdicts,
)
from outrider.shm import channel
from tests import rogue_providers as rogue
from tests.builders import chain, model, node, tensor
from tests.environments import beside, environment, numpy_only
from tests.environments import interpreters as pythons
from tests.trace_reader import TraceFile

HERE = os.path.dirname(os.path.abspath(__file__))
FILE = f"{HERE}/elsewhere_providers.py"
ENOUGH = 60.0  # seconds; what is waited for here takes milliseconds
X = np.array([[-2, -1, 0.5, 3]], np.float32)


@pytest.fixture(scope="module")
def python() -> Path:
    return numpy_only()


def told(tmp_path: Path, kind: str = f"{FILE}:Surrounded", **settings: Any) -> dict[str, Any]:
    """What a worker says of its surroundings, after a run."""
    file = tmp_path / "told.json"
    spec = ProviderSpec(kind, options={"to": str(file)}, **settings)
    with InferenceSession(chain("Neg"), providers=[spec]) as session:
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], -X)
    return json.loads(file.read_text())


def refusal(providers: list[Any], **options: Any) -> str:
    with pytest.raises(errors.ProviderUnavailableError) as caught:
        InferenceSession(chain("Neg"), providers=providers, options=SessionOptions(**options))
    assert caught.value.reason in str(caught.value)
    return str(caught.value)


# What works there -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "version",
    [
        pytest.param(one, marks=pytest.mark.skipif(not pythons(one), reason=reason))
        for one, reason in {"3.10": "there is no Python 3.10", "3.13": "there is no Python 3.13"}.items()
    ],
)
def test_every_python_from_3_10_runs_ours_and_theirs_beside_each_other(version: str) -> None:
    """Without pyzmq, msgpack, ml_dtypes and onnx, with the compiled kernels, and beside workers of this environment."""
    there = numpy_only(version)
    mine = f"{HERE}/own_providers.py:MyProvider"
    providers = [ProviderSpec(mine, python=there), ProviderSpec("cpu", name="far", python=there), "cpu"]
    pins = {"n1": "far", "n2": "cpu"}
    made = chain("Relu", "Exp", "Neg", "Relu", "Abs", "Softmax", "Identity")
    with InferenceSession(made, providers=providers, options=SessionOptions(pins={**pins, "n5": "far"})) as session:
        for rows in (1, 3, 30_000, 1):
            x = np.linspace(-2, 2, rows * 4, dtype=np.float32).reshape(rows, 4)
            np.testing.assert_allclose(session.run(None, {"x": x})[0], np.full((rows, 4), 0.25, np.float32))
        versions = session._fleet.versions()
        assert versions[mine]["python"].startswith(f"{version}.") and versions["far"] == versions[mine]
        assert set(versions["far"]) == {"python", "numpy"} and "pyzmq" in versions["cpu"]
        stats = session.stats()["providers"]
        assert stats["far"]["compiled"].get("target") == stats["cpu"]["compiled"].get("target")
        assert stats["far"]["reference_nodes"] == 0


def test_messages_of_any_size_cross(python: Path) -> None:
    """Claims, Load and Claims' answer of a graph of 3,000 nodes are far over what a packet holds."""
    made = chain(*["Neg", "Relu", "Abs"] * 1000)
    with InferenceSession(made, providers=[ProviderSpec("cpu", python=python)]) as session:
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], np.zeros_like(X))


def test_a_message_for_which_no_descriptor_is_left_costs_its_worker_and_no_other(
    python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, data: bytes) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with Fleet([ProviderSpec("cpu", "far", python=python), "cpu"]) as fleet:
        monkeypatch.setattr(channel, "sealed", refuse)
        with pytest.raises(errors.WorkerDiedError, match="could not be reached .*Too many open files"):
            InferenceSession(chain(*["Neg"] * 1000), options=SessionOptions(fleet=fleet, fallback=False))
        monkeypatch.undo()
        with InferenceSession(chain("Neg"), options=SessionOptions(fleet=fleet)) as session:
            np.testing.assert_array_equal(session.run(None, {"x": X})[0], -X)
        assert fleet.health()["cpu"]["deaths"] == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2"])
def test_types_that_numpy_lacks_are_raw_integers_there(python: Path, dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype))
    number = {"bfloat16": 16, "float8_e5m2": 19}[dtype]
    made = model([node("Neg", "x", "y")], [tensor("x", ["N"], number)], [tensor("y", ["N"], number)])
    x = np.array([1, -2, 0.5], kind)
    with InferenceSession(made, providers=[ProviderSpec(f"{FILE}:SignBits", python=python)]) as session:
        (y,) = session.run(None, {"x": x})
    assert y.dtype == kind
    np.testing.assert_array_equal(y.astype(np.float32), -x.astype(np.float32))


@pytest.mark.skipif(not pythons("3.10"), reason="there is no Python 3.10")
def test_an_old_numpy_will_do_but_for_cpu() -> None:
    there = environment("numpy-1", ["numpy==1.26.4"], pythons("3.10")[0])
    with InferenceSession(
        chain("Relu"), providers=[ProviderSpec(f"{HERE}/own_providers.py:MyProvider", python=there)]
    ) as s:
        np.testing.assert_array_equal(s.run(None, {"x": X})[0], np.maximum(X, 0))
    words = refusal([ProviderSpec("cpu", python=there)])
    assert f"it needs NumPy 2 or newer, and this is 1.26.4 of {there.parent.parent}" in words


def test_zeromq_is_used_where_it_is() -> None:
    with_zmq = environment("zeromq", ["numpy>=2", "pyzmq>=26"])
    with InferenceSession(chain("Neg"), providers=[ProviderSpec("cpu", python=with_zmq)]) as session:
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], -X)
        assert set(session._fleet.versions()["cpu"]) == {"python", "numpy", "pyzmq"}
        assert session._fleet.workers[0].current.pair is None


# What is around it ----------------------------------------------------------------------------------------------------
def test_nothing_of_ours_leaks_into_another_environment(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rubbish = tmp_path / "rubbish"
    (rubbish / "outrider").mkdir(parents=True)
    for name in ("numpy", "zmq", "msgpack", "outrider/__init__", "sitecustomize"):
        (rubbish / f"{name}.py").write_text(f"raise RuntimeError('{name} of PYTHONPATH')")
    monkeypatch.setenv("PYTHONPATH", str(rubbish))
    monkeypatch.setenv("PYTHONHOME", str(rubbish))
    monkeypatch.setenv("VIRTUAL_ENV", "/other")
    monkeypatch.setenv("PATH", f"/other/bin:{os.environ['PATH']}")
    monkeypatch.chdir(rubbish)
    monkeypatch.syspath_prepend(str(rubbish))
    folder = python.parent.parent
    for given in (folder, python):
        found = told(tmp_path, python=given)
        assert found["prefix"] == str(folder)
        assert found["numpy"].startswith(str(folder))
        zipped = found["path"][1]
        assert zipped.startswith("/proc/self/fd/") and found["path"][0] == HERE
        standard = [sys.base_prefix, str(folder)]
        assert all(any(entry.startswith(one) for one in standard) for entry in found["path"][2:])
        assert not any(entry in found["path"][2:] for entry in sys.path if "site-packages" in entry)
        assert [file.startswith(zipped) for file in (found["outrider"][0], found["outrider"][2])] == [True, True]
        assert found["has"] == {"msgpack": False, "zmq": False, "onnx": False, "ml_dtypes": False}
        first, *others = found["env"].pop("PATH").split(os.pathsep)
        assert first == str(folder / "bin") and "/other/bin" not in others
        assert found["env"] == {"PYTHONPATH": None, "PYTHONHOME": None, "VIRTUAL_ENV": str(folder)}


def test_a_class_of_a_package_is_looked_for_there_only(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "far_away.py").write_text(Path(FILE).read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    kind = "far_away:Surrounded"
    words = refusal([ProviderSpec(kind, python=python, options={"to": "/dev/null"})])
    assert "no module 'far_away' on the worker's sys.path" in words
    assert told(tmp_path, kind, python=python, env={"PYTHONPATH": str(tmp_path)})["env"]["PYTHONPATH"] == str(tmp_path)
    installed = beside(tmp_path / "venv", {"far_away.py": Path(FILE).read_text()})
    assert told(tmp_path, kind, python=installed)["prefix"] == str(tmp_path / "venv")


OLD = "__version__ = '0.0.1'\n"
AT_ONCE = "import outrider.providers\n"  # a line of a .pth file: what is run before anything else
FINDER = """
import importlib.util, sys
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "outrider":
            return importlib.util.spec_from_file_location(name, __file__.replace("finder.py", "outrider/__init__.py"))
sys.meta_path.insert(0, Finder)
"""


def test_our_outrider_comes_before_one_that_is_installed_there(tmp_path: Path) -> None:
    old = {"outrider/__init__.py": OLD, "outrider/providers/__init__.py": "", "outrider/providers/boot.py": "1/0"}
    for files in (old, {**old, "a_line.pth": AT_ONCE}):
        folder = tmp_path / str(len(files))
        found = told(tmp_path, python=beside(folder, files))
        assert found["outrider"][1] == __version__ and found["outrider"][0].startswith("/proc/self/fd/")


def test_an_outrider_that_comes_first_there_is_refused_with_both_versions(tmp_path: Path) -> None:
    files = {"outrider/__init__.py": OLD, "finder.py": FINDER, "a_line.pth": "import finder\n"}
    words = refusal([ProviderSpec("cpu", python=beside(tmp_path / "venv", files))])
    assert f"(version 0.0.1) comes before Outrider {__version__}, whose session this is" in words


def test_another_protocol_is_refused_with_both_versions(python: Path, tmp_path: Path) -> None:
    order = tmp_path / "order"
    order.write_text("start: another protocol")
    words = refusal([ProviderSpec(f"{rogue.__file__}:Rogue", python=python, options={"order": str(order)})])
    assert f"the other side speaks protocol 99, this side {PROTOCOL}" in words


def test_an_msgpack_that_is_too_old_is_not_used(tmp_path: Path) -> None:
    there = beside(tmp_path / "venv", {"msgpack.py": "version = (0, 5, 6)\n"})
    assert told(tmp_path, python=there)["has"]["msgpack"]


def test_bytecode_is_kept_and_nothing_depends_on_it(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache" / "carried"
    kept: list[bytes] = []
    for _ in range(3):  # made, damaged and made anew, read
        monkeypatch.setenv("OUTRIDER_CACHE", str(folder.parent))
        monkeypatch.setattr(carried, "_compiled", {})
        assert told(tmp_path, python=python)["code"] == "outrider/providers/contract.py"
        (file,) = folder.iterdir()
        kept.append(file.read_bytes())
        if len(kept) == 1:
            file.write_bytes(kept[0][:-1000])
    assert kept[1] == kept[2] and len(kept[0]) == len(kept[1])
    monkeypatch.setenv("OUTRIDER_CACHE", "/dev/null/nowhere")
    monkeypatch.setattr(carried, "_compiled", {})
    assert told(tmp_path, python=python)["code"].startswith("/proc/self/fd/")


# What cannot be -------------------------------------------------------------------------------------------------------
def script(folder: Path, text: str) -> Path:
    path = folder / f"python-{len(os.listdir(folder))}"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_an_interpreter_that_will_not_do_is_refused_before_anything_starts(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("")
    answer = 'outrider-interpreter [[3, 9, 18], true, "610d0d0a"]'
    for given, words in [
        (tmp_path / "nowhere", "there is no interpreter"),
        (tmp_path, "a folder without bin/python"),
        (plain, "may not be executed"),
        (script(tmp_path, "echo; exit 3"), "no Python: asked for its version, it ended with status 3"),
        (script(tmp_path, "echo no snake >&2"), "no Python: .* status 0: no snake"),
        (script(tmp_path, "exec yes"), "no Python: it wrote more than 1048576 bytes"),
        (script(tmp_path, f"echo hello\necho '{answer}'"), "is Python 3.9.18; a worker needs 3.10 or newer"),
        (script(tmp_path, "echo 'outrider-interpreter [3, 9]'"), r"no Python: .* it said '\[3, 9\]'"),
        (environment("empty", []), r"\(Python .*\) has no numpy"),
    ]:
        spec = ProviderSpec("cpu", python=given)
        with pytest.raises(errors.ProviderUnavailableError, match=words) as caught:
            Fleet([spec])
        assert caught.value.provider == "cpu" and str(given) in str(caught.value)
    optional = ProviderSpec("cpu", name="far", python=tmp_path, required=False)
    with InferenceSession(chain("Neg"), providers=[optional, "cpu"]) as session:
        assert session.health()["far"]["state"] == "absent" and "bin/python" in session.health()["far"]["reason"]
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], -X)


def test_what_is_missing_there_is_told_with_the_place(python: Path) -> None:
    prefix = python if python.is_dir() else python.parent.parent
    words = refusal([ProviderSpec("ort", python=python)])
    assert f"onnxruntime is not installed in {prefix}; pip install onnxruntime there" in words


@pytest.mark.parametrize("how", ["sleep 600", "sleep 600 & wait"])
def test_an_interpreter_that_never_answers_is_ended(tmp_path: Path, how: str) -> None:
    """And all that it started: the module's check for processes that are left."""
    spec = ProviderSpec("cpu", python=script(tmp_path, how))
    assert "did not say which within 0.2 s" in refusal([spec], start_deadline=0.2)


@pytest.mark.parametrize("given", ["", "  ", 3, "a\0b", b"/usr/bin/python3"])
def test_what_is_no_path_is_refused(given: Any) -> None:
    with pytest.raises(errors.InvalidOptionError, match="python"):
        ProviderSpec("cpu", python=given)


def test_paths_are_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert ProviderSpec("cpu", python="~/venv").python == str(tmp_path / "venv")
    assert ProviderSpec("cpu", python=Path("venv/bin/python")).python == str(tmp_path / "venv/bin/python")


def test_a_verdict_is_of_one_environment_as_it_is(tmp_path: Path) -> None:
    one, two = (beside(tmp_path / name, {}) for name in ("one", "two"))

    def paths() -> list[str | None]:
        return [verdicts.path_of(ProviderSpec(f"{FILE}:Fails", python=given)) for given in (None, one, two)]

    before = paths()
    assert len(set(before)) == 3 and None not in before
    assert verdicts.path_of(ProviderSpec(f"{FILE}:Fails", python=tmp_path / "one")) == before[1]
    (packages,) = (tmp_path / "one").glob("lib/python*/site-packages")
    (packages / "new_package").mkdir()
    after = paths()
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True]
    assert interpreters.files_of(sys.executable)[0] == sys.executable


# What goes wrong there ------------------------------------------------------------------------------------------------
def test_errors_deaths_output_and_stacks_come_from_there(python: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    there = ProviderSpec(f"{FILE}:Fails", name="far", python=python)
    options = SessionOptions(fallback=False, replay=False)
    with InferenceSession(chain("Abs", "Neg"), providers=[there, "cpu"], options=options) as session:
        with pytest.raises(errors.KernelError, match="one is too many") as raised:
            session.run(None, {"x": np.full_like(X, 1)})
        assert "in in_the_kernel" in raised.value.remote_traceback and raised.value.node == "n1"
        with pytest.raises(errors.WorkerDiedError) as died:
            session.run(None, {"x": np.full_like(X, signal.SIGSEGV)})
        assert died.value.signal == "SIGSEGV" and "in in_the_kernel" in died.value.stack
        np.testing.assert_array_equal(session.run(None, {"x": X * 0})[0], X * 0)
        assert session.health()["far"]["incarnation"] == 2
        deadline = time.monotonic() + ENOUGH
        while "asked for 11" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def chaos(python: Path, **options: Any) -> ProviderSpec:
    return ProviderSpec("chaos", python=python, options={"claims": ["n1"], "incarnations": [1], **options})


def test_a_partition_is_replayed_there_and_a_spare_takes_over(python: Path) -> None:
    for spares in (0, 1):
        providers = [chaos(python, fault="sigkill", at=3, late=bool(spares)), "cpu"]
        with InferenceSession(
            chain("Neg", "Exp", "Relu"), providers=providers, options=SessionOptions(spares=spares)
        ) as session:
            for number in range(6):
                x = np.full((2, 4), number, np.float32)
                np.testing.assert_allclose(session.run(None, {"x": x})[0], np.exp(-x), rtol=1e-5)
            assert session.health()["chaos"]["deaths"] == 1
            session.restart("chaos")
            np.testing.assert_allclose(session.run(None, {"x": X})[0], np.exp(-X), rtol=1e-5)


def test_a_kernel_that_hangs_there_is_ended_at_its_deadline_with_its_stack(python: Path) -> None:
    providers = [chaos(python, fault="hang", at=2), "cpu"]
    options = SessionOptions(partition_deadline=0.5, replay=False, fallback=False)
    with InferenceSession(chain("Neg", "Exp"), providers=providers, options=options) as session:
        session.run(None, {"x": X})
        with pytest.raises(errors.WorkerDiedError, match="0.5 s") as caught:
            session.run(None, {"x": X})
        assert "outrider/providers/chaos/" in caught.value.stack
        np.testing.assert_allclose(session.run(None, {"x": X})[0], np.exp(-X), rtol=1e-5)


def test_a_trace_has_the_spans_of_a_worker_there(python: Path, tmp_path: Path) -> None:
    far = ProviderSpec("cpu", name="far", python=python)
    with InferenceSession(chain("Neg", "Exp"), providers=[far]) as session:
        session.start_trace()
        session.run(None, {"x": X})
        session.stop_trace(tmp_path / "trace.json")
    trace = TraceFile(tmp_path / "trace.json")
    assert any("far" in name for name in trace.processes.values())


COORDINATOR = """
import sys, time
sys.path.insert(0, {root!r})
import outrider
from tests.builders import chain
session = outrider.InferenceSession(chain("Relu"), providers=[outrider.ProviderSpec("cpu", python={python!r})])
print(session._fleet.workers[0].pid, flush=True)
time.sleep(600)
"""


def test_a_killed_coordinator_leaves_nothing_there(python: Path) -> None:
    """Of files: the test's own check, as the temporary folder is this run's."""
    code = COORDINATOR.format(root=os.path.dirname(HERE), python=str(python))
    coordinator = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert coordinator.stdout is not None
    pid = int(coordinator.stdout.readline())
    watched = os.pidfd_open(pid)
    coordinator.kill()
    coordinator.wait()
    coordinator.stdout.close()
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    assert poll.poll(ENOUGH * 1000)
    os.close(watched)
