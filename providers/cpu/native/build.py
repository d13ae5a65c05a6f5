"""From the C sources to a library file: the one that a wheel carries, else one compiled with `cc` into the cache.

The name of a compiled file holds a digest of the sources, the command and the compiler's version, so a file that is
there is the right one; it is written under another name and renamed, so it is whole.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("source")
CARRIED = Path(__file__).with_name("kernels.so")  # in wheels only
FLAGS = (
    "-std=gnu11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math",
    "-Wall", "-Wextra", "-Werror=implicit-function-declaration",
)  # fmt: skip
LIBRARIES = ("-lm", "-lpthread")
SECONDS = 300  # within which a compiler must be done


class BuildError(Exception):
    """The library cannot be compiled here; the message says why."""


def target_flags() -> tuple[str, ...]:
    """What this machine can run: x86-64-v3 where the CPU has it, else what the compiler takes for its default."""
    return ("-march=x86-64-v3",) if has_avx2() else ()


def has_avx2() -> bool:
    """True on a CPU of level x86-64-v3."""
    if platform.machine() != "x86_64":
        return False
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return False
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    return {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "abm"} <= flags


def sources(folder: Path = SOURCE) -> list[Path]:
    """All C files and headers of a folder, sorted."""
    return sorted((*folder.glob("*.c"), *folder.glob("*.h")))


def compile_to(path: Path, compiler: str, flags: tuple[str, ...], folder: Path = SOURCE) -> None:
    """Compile the sources of a folder into `path`, atomically. Raises BuildError."""
    units = [str(file) for file in sources(folder) if file.suffix == ".c"]
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="compiling-", dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        command = [compiler, *FLAGS, *flags, "-o", str(made), *units, *LIBRARIES]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as reason:
            raise BuildError(f"{compiler} does not compile the kernels: {reason}") from None
        if done.returncode:
            raise BuildError(f"{compiler} does not compile the kernels: {done.stderr[-2000:]}")
        os.replace(made, path)


def cached() -> Path:
    """The library file in the cache, compiled if it is not there yet. Raises BuildError."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise BuildError(f"there is no C compiler {os.environ.get('CC', 'cc')!r} on PATH")
    flags = target_flags()
    digest = hashlib.sha256()
    for file in sources():
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    digest.update(repr((FLAGS, flags, LIBRARIES, _version(compiler))).encode())
    path = cache_folder() / f"kernels-{digest.hexdigest()[:24]}.so"
    if not path.exists():
        compile_to(path, compiler, flags)
    return path


def _version(compiler: str) -> str:
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as reason:
        raise BuildError(f"{compiler} does not run: {reason}") from None
    return done.stdout


def cache_folder() -> Path:
    """Where compiled libraries are kept, below `$OUTRIDER_CACHE` or the folder that stands for it."""
    chosen = os.environ.get("OUTRIDER_CACHE")
    if chosen is None:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        chosen = os.path.join(base, "outrider")
    return Path(chosen).absolute() / "kernels"
