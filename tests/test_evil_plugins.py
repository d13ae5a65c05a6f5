"""Plugin libraries that do harm when ONNX Runtime registers them: a typed error in bounded time; the session goes on.

`evil_plugin.c` says what each fault does. No deadline here but `start_deadline` is tight enough to be met by accident.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.providers.cpu.native.build import cache_folder
from outrider.scheduler import Fleet, InferenceSession, ProviderSpec, SessionOptions, errors
from outrider.scheduler.probing import probed
from outrider.scheduler.verdicts import path_of
from outrider.tools.cli import main
from tests.builders import chain
from tests.leaks import worker_pids

SOURCE = Path(__file__).with_name("evil_plugin.c")
X = np.array([[-2, -1, 0.5, 3]], np.float32)
START_DEADLINE = 10.0  # seconds: for all workers of the sessions that wait for a library that hangs

# What a session says of the provider, a pattern for each fault.
CRASHES = {
    "segfault": "it was ended by SIGSEGV",
    "loading": "it was ended by SIGSEGV",
    "abort": "it was ended by SIGABRT",
    "exit": "it exited with code 7",
    "quit": "it exited with code 0",
}
REFUSALS = {
    "throw": "Caught an unknown exception",
    "refuse": "no device of this vendor is here",
    "empty": "offers no device",
    "nothing": "undefined symbol: CreateEpFactories",
}

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


def build(folder: Path, fault: str) -> Path:
    """Compile the library with this fault."""
    library = folder / f"{fault}.so"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f"-DFAULT={fault.upper()}"]
    runtime = ["-l:libstdc++.so.6"] if fault == "throw" else []
    subprocess.run(["cc", *flags, "-o", str(library), str(SOURCE), *runtime], check=True)
    return library


def spec(library: Path, required: Any = "start", **more: Any) -> ProviderSpec:
    return ProviderSpec("ort", options={"library": str(library)}, required=required, **more)


def reason_in(session: InferenceSession, name: str = "ort") -> str:
    """Why the provider is absent; all else works."""
    np.testing.assert_array_equal(session.run(None, {"x": X})[0], np.maximum(X, 0))
    health = session.health()
    assert health[name]["state"] == "absent" and health["cpu"]["state"] == "ready"
    assert {one["provider"] for one in session.placement().to_dict()["nodes"]} == {"cpu"}
    assert str(health[name]["reason"]) in str(session.placement())
    return str(health[name]["reason"])


def refused(one: ProviderSpec) -> errors.ProviderUnavailableError:
    with pytest.raises(errors.ProviderUnavailableError) as caught:
        InferenceSession(chain("Relu"), providers=[one, "cpu"])
    assert worker_pids() == []
    assert caught.value.provider == (one.name or "ort")
    return caught.value


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder without what was learnt of a library before, but for compiled kernels."""
    folder = tmp_path / "cache"
    kernels = cache_folder()
    folder.mkdir()
    (folder / "kernels").symlink_to(kernels)
    monkeypatch.setenv("OUTRIDER_CACHE", str(folder))
    yield folder


@pytest.mark.parametrize("fault", CRASHES)
def test_a_library_that_ends_the_process(fault: str, tmp_path: Path) -> None:
    library = build(tmp_path, fault)
    with InferenceSession(chain("Relu"), providers=[spec(library, required=False), "cpu"]) as session:
        told = reason_in(session)
    assert CRASHES[fault] in told and f"it loads {library}" in told
    error = refused(spec(library))  # by the verdict of the first start: nothing is started
    assert CRASHES[fault] in str(error.reason) and str(library) in str(error.reason)
    if "SIG" in CRASHES[fault]:
        assert "in _plugged" in str(error)  # the Python stack: where it was
    # Mended, it is started again.
    library.write_bytes(build(tmp_path, "refuse").read_bytes())
    assert "no device of this vendor is here" in str(refused(spec(library)).reason)


def test_a_library_that_is_killed_is_not_held_guilty(tmp_path: Path) -> None:
    library = build(tmp_path, "kill")
    for _ in range(2):
        error = refused(spec(library))
        assert "it was ended by SIGKILL" in str(error.reason) and "is not started again" not in str(error.reason)


def test_custom_operators_that_end_the_process(tmp_path: Path) -> None:
    library = build(tmp_path, "operators")
    wished = ProviderSpec("ort", options={"custom_ops": [str(library)]}, required=False)
    with InferenceSession(chain("Relu"), providers=[wished, "cpu"]) as session:
        told = reason_in(session)
    assert "it was ended by SIGSEGV" in told and f"it loads {library}" in told
    assert "is not started again" in str(refused(ProviderSpec("ort", options={"custom_ops": [str(library)]})).reason)


def test_libraries_that_hang(tmp_path: Path) -> None:
    """One waits in the kernel, the other computes, and holds the interpreter's lock."""
    libraries = [build(tmp_path, fault) for fault in ("hang", "spin")]
    wished = [spec(library, required=False, name=library.stem) for library in libraries]
    options = SessionOptions(start_deadline=START_DEADLINE)
    with InferenceSession(chain("Relu"), providers=[*wished, "cpu"], options=options) as session:
        for library in libraries:
            told = reason_in(session, library.stem)
            assert f"it did not start within {START_DEADLINE:g} s" in told and f"it loads {library}" in told
    for library in libraries:
        with pytest.raises(errors.ProviderUnavailableError, match="did not start within") as caught:
            Fleet._of([spec(library)], options, None)
        assert str(library) in str(caught.value.reason)
        assert "in _plugged" in str(caught.value)  # the Python stack: where it was


@pytest.mark.parametrize("fault", REFUSALS)
def test_a_library_that_cannot_be_registered(fault: str, tmp_path: Path, cache: Path) -> None:
    library = build(tmp_path, fault)
    with InferenceSession(chain("Relu"), providers=[spec(library, required=False), "cpu"]) as session:
        told = reason_in(session)
    assert REFUSALS[fault] in told and str(library) in told
    assert not list(cache.glob("probes/*"))  # it said why: that is asked again next time


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    text = tmp_path / "text.so"
    text.write_text("no library\n")
    for library, reason in {text: "text.so", tmp_path: "no file", tmp_path / "absent.so": "absent.so"}.items():
        assert reason in str(refused(spec(library)).reason)


def test_doctor_probes_it_and_tells_how_it_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library = build(tmp_path, "abort")
    assert main(["doctor", "--probe", f"ort?library={library}"]) == 3
    told = capsys.readouterr().out
    assert "SIGABRT" in told and str(library) in told


def test_what_is_probed(tmp_path: Path) -> None:
    """onnxruntime's own CPU provider is not; whoever else's code `ort` loads is, and its files tell the verdict."""
    library, operators = tmp_path / "a.so", tmp_path / "b.so"
    library.write_bytes(b"a")
    operators.write_bytes(b"b")
    for kind in ("ort", "ort:1", "ort:CPUExecutionProvider", "cpu", "null"):
        assert not probed(ProviderSpec(kind)), kind
    paths = set()
    for kind, options in (
        ("ort:OtherExecutionProvider", {}),
        ("ort", {"library": str(library)}),
        ("ort", {"custom_ops": [str(operators)]}),
        ("ort", {"custom_ops": f"{operators}, {library}"}),
    ):
        one = ProviderSpec(kind, options=options)
        assert probed(one) and not probed(ProviderSpec(kind, options=options, debug=True))
        before = path_of(one)
        assert before is not None
        paths.add(before)
        operators.write_bytes(operators.read_bytes() + b"b")
        assert (path_of(one) != before) == (str(operators) in str(options))
    assert len(paths) == 4
