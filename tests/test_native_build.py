"""How the compiled library comes about: once for all who want it, whole or not at all, and for this CPU only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from outrider.providers.contract import Graph
from outrider.providers.cpu import CpuProvider
from outrider.providers.cpu.native import NativeError, build, load
from tests.program_harness import Bound, graph_of, model, ready, unit_of

pytestmark = pytest.mark.fast

# A compiler: notes each library that it links, and waits while the file `hold` is there.
_COMPILER = """#!/bin/sh
case "$*" in
*-shared*) echo linked >> "{folder}/links" ;;
esac
while [ -e "{folder}/hold" ]; do : > "{folder}/held"; sleep 0.01; done
while [ $# -gt 0 ]; do
    [ "$1" = -o ] && echo made > "$2"
    shift
done
"""
# compile_cached() in a process that needs nothing else of Outrider.
_ALONE = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("build", {str(Path(build.__file__))!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.compile_cached())
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the compiler is and notes what it does; the cache is in it."""
    compiler = tmp_path / "compiler"
    compiler.write_text(_COMPILER.format(folder=tmp_path))
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-S", "-c", _ALONE], stdout=subprocess.PIPE, text=True)


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def test_one_compiles_and_the_others_wait(folder: Path) -> None:
    (folder / "hold").touch()
    processes = [_start() for _ in range(3)]
    _wait_for(folder / "held")
    (folder / "hold").unlink()
    paths = {process.communicate()[0].strip() for process in processes}
    assert (folder / "links").read_text() == "linked\n"
    (path,) = paths
    assert Path(path).read_text() == "made\n"
    assert Path(path).name.startswith(f"kernels-{build.target()}-")
    assert build.compile_cached() == Path(path)


def test_a_killed_compilation_leaves_nothing(folder: Path) -> None:
    (folder / "hold").touch()
    process = _start()
    _wait_for(folder / "held")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert list((folder / "cache" / "kernels").glob("compiling-*"))
    (folder / "hold").unlink()
    path = build.compile_cached()
    assert {file.name for file in path.parent.iterdir()} == {"lock", path.name}


def test_old_libraries_are_forgotten(folder: Path) -> None:
    kernels = folder / "cache" / "kernels"
    kernels.mkdir(parents=True)
    for at in range(12):
        (kernels / f"kernels-old-{at:02}.so").touch()
        os.utime(kernels / f"kernels-old-{at:02}.so", (at, at))
    path = build.compile_cached()
    assert sorted(file.name for file in kernels.glob("*.so")) == [f"kernels-old-{at:02}.so" for at in range(5, 12)] + [
        path.name
    ]


def test_what_a_library_is_made_of_names_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {build.cached()[0]}
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    paths.add(build.cached()[0])
    monkeypatch.setenv("CC", f"{folder / 'compiler'} -pipe")
    paths.add(build.cached()[0])
    monkeypatch.setattr(build, "has_avx2", lambda: not build.V3)
    paths.add(build.cached()[0])
    sources = folder / "source"
    sources.mkdir()
    (sources / "one.c").touch()
    monkeypatch.setattr(build, "SOURCE", sources)
    paths.add(build.cached()[0])
    assert len(paths) == 5


def test_a_library_for_another_cpu_is_not_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / f"kernels-{build.V3}.so").write_text("would fail if it were loaded")
    monkeypatch.setattr(build, "FOLDER", folder)
    monkeypatch.setattr(build, "has_avx2", lambda: False)
    monkeypatch.setenv("CC", str(folder / "absent"))
    with pytest.raises(NativeError, match=r"no C compiler .*absent.*are for x86-64-v3, which this CPU is not"):
        load()
    monkeypatch.setattr(build, "has_avx2", lambda: True)
    with pytest.raises(NativeError, match="cannot be loaded"):
        load()


def test_a_compiler_that_fails_without_a_word_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")
    with pytest.raises(NativeError, match="does not compile the kernels: it ends with status 1 and says nothing"):
        load()


def test_a_cache_that_cannot_be_written_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").touch()
    monkeypatch.setenv("OUTRIDER_CACHE", str(folder / "file"))
    with pytest.raises(NativeError, match=r"file/kernels.*set OUTRIDER_CACHE"):
        load()


def test_the_provider_compiles_with_its_first_model_and_not_at_its_start(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    provider = ready(CpuProvider())
    assert not (folder / "links").exists()
    with graph_of(model("agraph (float[2] x) => (float[2] y) { y = Relu(x) }")) as graph:
        for _ in range(2):  # what this compiler makes is no library
            assert _run(provider, graph, np.array([-1, 1], np.float32)) == [0, 1]
    assert (folder / "links").read_text() == "linked\n"
    told = provider.stats()["compiled"]
    assert told["families"] == []
    assert "cannot be loaded" in told["reason"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "in NumPy only" in caplog.text
    provider.close()


def _run(provider: CpuProvider, graph: Graph, x: np.ndarray) -> list[float]:
    unit = unit_of(graph)
    program = provider.compile(unit)
    try:
        return Bound(program, unit, {"x": x}).run()[0].tolist()
    finally:
        provider.unload(program)
