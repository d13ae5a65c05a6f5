"""The wheel, as a user gets it: it brings the compiled kernels, needs no compiler, and is right without them, too."""

from __future__ import annotations

import json
import os
import platform
import shutil
import site
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.providers.cpu.native import build
from tests.environments import numpy_only
from tests.models import feeds, model_path, tolerance
from tests.oracle import assert_agree, run_ort

ROOT = Path(__file__).resolve().parent.parent
MODELS = ("ppocr-cls", "basic-pitch", "silero-16k")
LEFT_OUT = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "results", "suite")
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("cc") is None, reason="compiled kernels are not tested: no C compiler")

_RUN = """
import json, sys
import numpy as np
import outrider

told = {"file": outrider.__file__}
for model, inputs, outputs in json.loads(sys.argv[1]):
    with outrider.InferenceSession(model) as session:
        names = [one.name for one in session.get_outputs()]
        found = session.run(None, dict(np.load(inputs)))
        np.savez(outputs, **{f"y{i}": value for i, value in enumerate(found)})
        told["compiled"] = session.stats()["providers"]["cpu"]["compiled"]
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project, without what earlier builds left."""
    folder = tmp_path_factory.mktemp("source") / "outrider"
    shutil.copytree(ROOT, folder, ignore=LEFT_OUT)
    return folder


def _wheel(source: Path, to: Path, **environment: str) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(to), str(source)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = to.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The Python of an environment with nothing but the wheel; what it depends on it sees here."""
    folder = tmp_path_factory.mktemp("installed")
    wheel = _wheel(source, folder)
    venv.create(folder / "venv", with_pip=False)
    target = next((folder / "venv" / "lib").glob("python*/site-packages"))
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)],
        check=True, capture_output=True,
    )  # fmt: skip
    (target / "needed.pth").write_text("\n".join(site.getsitepackages()))
    yield folder / "venv" / "bin" / "python"


def _run(python: Path, tmp_path: Path) -> dict[str, Any]:
    """Run the models where no compiler is to be found, and compare. Returns what the process told."""
    jobs = []
    for name in MODELS:
        np.savez(tmp_path / f"{name}-in.npz", **feeds(name, 7))
        jobs.append([str(model_path(name)), str(tmp_path / f"{name}-in.npz"), str(tmp_path / f"{name}-out.npz")])
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON") and key != "CC"}
    environment |= {"PATH": str(python.parent), "OUTRIDER_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [str(python), "-c", _RUN, json.dumps(jobs)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for name, (model, _, outputs) in zip(MODELS, jobs, strict=True):
        theirs = run_ort(model, feeds(name, 7))
        ours = np.load(outputs)
        assert_agree({key: ours[f"y{i}"] for i, key in enumerate(theirs)}, theirs, tolerance(name))
    told: dict[str, Any] = json.loads(done.stdout)
    assert Path(told["file"]).is_relative_to(python.parent.parent)
    return told["compiled"]


@NEEDS_COMPILER
def test_the_wheel_brings_compiled_kernels_that_need_no_compiler(installed: Path, tmp_path: Path) -> None:
    told = _run(installed, tmp_path)
    assert told["from"] == "wheel"
    assert told["target"] == (build.V3 if build.has_avx2() else "portable")
    assert {"conv", "gemm"} <= set(told["families"])
    assert not (tmp_path / "cache" / "kernels").exists()


_ELSEWHERE = """
import json, sys
import outrider

with outrider.InferenceSession(sys.argv[1], providers=[outrider.ProviderSpec("cpu", python=sys.argv[2])]) as session:
    told = session.stats()["providers"]["cpu"]
    print(json.dumps([told["compiled"], told["versions"]]))
"""


@NEEDS_COMPILER
def test_a_worker_in_another_environment_uses_them_too(installed: Path, tmp_path: Path) -> None:
    command = [str(installed), "-c", _ELSEWHERE, str(model_path("silero-16k")), str(numpy_only())]
    environment = {**os.environ, "OUTRIDER_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    compiled, versions = json.loads(done.stdout)
    assert compiled["from"] == "wheel"
    assert set(versions) == {"python", "numpy"}


@NEEDS_COMPILER
def test_without_them_it_is_right_and_says_so(installed: Path, tmp_path: Path) -> None:
    (library,) = installed.parent.parent.rglob("kernels-*.so")
    away = library.with_suffix(".away")
    library.rename(away)
    try:
        told = _run(installed, tmp_path)
    finally:
        away.rename(library)
    assert told["families"] == []
    assert "there is no C compiler 'cc' on PATH" in told["reason"]


@NEEDS_COMPILER
def test_its_tag_says_which_machines_it_is_for(installed: Path) -> None:
    (wheel,) = installed.parents[2].glob("*.whl")
    assert wheel.stem.endswith(f"-py3-none-manylinux_2_17_{platform.machine()}")


def test_a_wheel_built_without_a_compiler_is_for_any_machine(source: Path, tmp_path: Path) -> None:
    assert _wheel(source, tmp_path, CC="no-such-compiler").stem.endswith("-py3-none-any")
