"""From the C sources to a library file: the one that a wheel carries, else one compiled with `cc` into the cache.

The name of a library file says what it was compiled for, so none is ever loaded on a CPU that cannot run it. In the
cache the name holds a digest of the sources, the flags and the compiler too, so a file that is there is the right one.
Several processes may want it at once: one compiles and the others wait. Files are written under another name and
renamed, so they are whole.

This module needs nothing of Outrider: `setup.py` uses it as well. Workers that find their library import no more than
that takes, so what compiles imports what it needs itself.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path


def _folder() -> Path:
    """Where sources and libraries lie: beside this file, or, if that is in a zip, in the install that it came from."""
    here, loader = Path(__file__).parent, globals().get("__loader__")
    if loader is not None and not here.is_dir():
        with suppress(OSError):
            return Path(loader.get_data(str(here / "installed")).decode())
    return here


FOLDER = _folder()
SOURCE = FOLDER / "source"
FLAGS = (
    "-std=gnu11", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math",
    "-Wall", "-Wextra", "-Werror=implicit-function-declaration",
)  # fmt: skip
LIBRARIES = ("-lm", "-lpthread")
OLDEST = ("-include", str(SOURCE / "oldest.h"))  # for libraries that go to other machines
SECONDS = 300  # within which a compiler must be done with a file
V3 = "x86-64-v3"


class BuildError(Exception):
    """The library cannot be compiled here; the message says why."""


def target() -> str:
    """What libraries for this machine are compiled for: x86-64-v3 where the CPU has it, else the kind of machine."""
    return V3 if has_avx2() else platform.machine()


def target_flags(name: str) -> tuple[str, ...]:
    """What the compiler must be told to compile for a target."""
    return (f"-march={V3}",) if name == V3 else ()


def carried(name: str) -> Path:
    """Where a wheel has its library for a target."""
    return FOLDER / f"kernels-{name}.so"


@cache
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


def compiler_command() -> list[str]:
    """The C compiler: `$CC`, which may have arguments, else cc. Raises BuildError where there is none."""
    import shutil

    words = os.environ.get("CC", "cc").split() or ["cc"]
    found = shutil.which(words[0])
    if found is None:
        raise BuildError(f"there is no C compiler {words[0]!r} on PATH; install one, or set CC")
    return [found, *words[1:]]


def compile_to(path: Path, compiler: Sequence[str], flags: Sequence[str], folder: Path = SOURCE) -> None:
    """Compile the sources of a folder into `path`, file by file on all cores, atomically. Raises BuildError."""
    import tempfile
    from concurrent.futures import ThreadPoolExecutor

    units = [file for file in sources(folder) if file.suffix == ".c"]
    if not units:
        raise BuildError(f"there are no sources of the kernels in {folder}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=path.parent) as scratch:
        objects = [os.path.join(scratch, f"{unit.stem}.o") for unit in units]
        commands = [
            [*compiler, *FLAGS, *flags, "-c", "-o", made, str(unit)] for unit, made in zip(units, objects, strict=True)
        ]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            list(threads.map(_run, commands))
        library = os.path.join(scratch, path.name)
        _run([*compiler, *FLAGS, *flags, "-shared", "-o", library, *objects, *LIBRARIES])
        with open(library, "rb") as handle:
            os.fsync(handle.fileno())  # a library that a power cut left in part would end every worker
        os.replace(library, path)


_SCRATCH = "compiling-"  # how folders begin that are removed when a compilation ends


def _run(command: Sequence[str]) -> None:
    import subprocess

    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as reason:
        raise BuildError(f"{command[0]} does not compile the kernels: {reason}") from None
    if done.returncode:
        why = done.stderr[-2000:].strip() or f"it ends with status {done.returncode} and says nothing"
        raise BuildError(f"{command[0]} does not compile the kernels: {why}")


def cached() -> tuple[Path, bool]:
    """Where the library for this machine is in the cache, and whether it is there yet. Raises BuildError."""
    compiler = compiler_command()
    program = os.stat(compiler[0])
    which = (os.path.realpath(compiler[0]), program.st_size, program.st_mtime_ns, *compiler[1:])
    digest = _digest(SOURCE, repr((FLAGS, target_flags(target()), LIBRARIES, which)))
    path = cache_folder() / f"kernels-{target()}-{digest}.so"
    return path, path.exists()


@cache
def _digest(folder: Path, how: str) -> str:
    """Of the sources of a folder, and how they are compiled."""
    import hashlib

    digest = hashlib.sha256(how.encode())
    for file in sources(folder):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def compile_cached() -> Path:
    """The library for this machine in the cache, compiled if it is not there yet. Raises BuildError."""
    path, there = cached()
    if there:
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path.parent):
            if not path.exists():  # nobody else has compiled it meanwhile
                compile_to(path, compiler_command(), target_flags(target()))
                _forget_old(path.parent)
    except OSError as reason:
        raise BuildError(f"compiled kernels cannot be kept in {path.parent}: {reason}; set OUTRIDER_CACHE") from None
    return path


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Be the only one that compiles in a folder, and remove what those have left that were killed while they did."""
    import fcntl
    import shutil

    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)  # given back by the kernel, however this process ends
        for left in folder.glob(f"{_SCRATCH}*"):
            shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(handle)


def _forget_old(folder: Path, kept: int = 8) -> None:
    """Remove all but the latest libraries; who has one loaded keeps it."""
    files = sorted(folder.glob("kernels-*.so"), key=lambda file: file.stat().st_mtime_ns)
    for file in files[:-kept]:
        file.unlink(missing_ok=True)


def cache_folder() -> Path:
    """Where compiled libraries are kept, below `$OUTRIDER_CACHE` or the folder that stands for it."""
    chosen = os.environ.get("OUTRIDER_CACHE")
    if chosen is None:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        chosen = os.path.join(base, "outrider")
    return Path(chosen).absolute() / "kernels"
