"""Virtual environments for workers that are to run elsewhere, built at first use and kept in the tests' cache folder.

    python = environment("numpy-only", ["numpy>=2"])
    ProviderSpec("cpu", python=python)

An environment is built beside its place and then moved there, so one that is there is whole; its name says what is in
it. Its scripts know the place where it was built and do not work: call modules by `python -m`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from tests.models import cache_folder

NUMPY_ONLY = ("numpy>=2",)


def environment(name: str, requirements: Sequence[str], base: str = sys.executable) -> Path:
    """The interpreter of a virtual environment that holds just these packages and what they need; not even pip.

    `base`: the interpreter that it is made of. Raises RuntimeError with what `venv` or `pip` said.
    """
    version = _output([base, "-c", "import sys; print(sys.version, sys.base_prefix)"])
    digest = hashlib.sha256(repr((version, sorted(requirements))).encode()).hexdigest()[:16]
    folder = cache_folder() / "environments" / f"{name}-{digest}"
    python = folder / "bin" / "python"
    if not python.exists():
        folder.parent.mkdir(exist_ok=True)
        with open(folder.parent / f"{folder.name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not python.exists():
                _build(folder, requirements, base)
    return python


def _build(folder: Path, requirements: Sequence[str], base: str) -> None:
    beside = Path(tempfile.mkdtemp(prefix=f"building-{folder.name}-", dir=folder.parent))
    try:
        _output([base, "-m", "venv", "--without-pip", str(beside)])
        if requirements:
            pip = [sys.executable, "-m", "pip", "--python", str(beside / "bin" / "python"), "install", "--quiet"]
            _output([*pip, "--disable-pip-version-check", "--only-binary=:all:", *requirements])
        os.replace(beside, folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _output(command: list[str]) -> str:
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} gave {done.returncode}:\n{done.stderr}{done.stdout}")
    return done.stdout


@cache
def interpreters(version: str) -> list[str]:
    """Every Python of this version (`'3.10'`) at hand: on the PATH, or kept by pyenv, whose stand-ins may not work."""
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{version}.*/bin/python{version}")
    found = [shutil.which(f"python{version}"), *map(str, kept)]
    return [one for one in found if one and subprocess.run([one, "-c", ""], capture_output=True).returncode == 0]


def numpy_only(version: str | None = None) -> Path:
    """The interpreter of an environment with numpy and nothing else: of this Python, or of a version at hand."""
    return environment("numpy-only", NUMPY_ONLY, interpreters(version)[0] if version else sys.executable)


def beside(folder: Path, files: Mapping[str, str], python: Path | None = None) -> Path:
    """A new environment in `folder` with the packages of another one (None: of `numpy_only()`), and these files.

    `files`: path in its site-packages -> content; those of the other environment come behind.
    """
    python = python or numpy_only()
    base = _output([str(python), "-c", "import sys; print(sys._base_executable)"]).strip()
    _output([base, "-m", "venv", "--without-pip", str(folder)])
    (packages,) = folder.glob("lib/python*/site-packages")
    (others,) = python.parent.parent.glob("lib/python*/site-packages")
    (packages / "zz_others.pth").write_text(f"{others}\n")
    for name, content in files.items():
        file = packages / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return folder / "bin" / "python"
