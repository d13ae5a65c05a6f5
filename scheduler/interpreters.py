"""Interpreters of other environments: `ProviderSpec(python=...)`.

A worker there has that environment's packages and none of ours: it needs numpy, and its Outrider comes along in a zip
(`carried.py`). Each interpreter is asked once what it is, before anything is started with it.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic

from outrider.providers.contract import ProviderUnavailableError
from outrider.scheduler.carried import prepare
from outrider.scheduler.options import ProviderSpec

log = logging.getLogger("outrider.fleet")

OLDEST = (3, 10)
COMPILE_SECONDS = 60.0
MOST_SAID = 1 << 20  # bytes of an answer
_MARK = "outrider-interpreter "  # before the answer: what the environment runs at every start may print, too
# For any Python. Without the current folder, where a numpy.py is not NumPy.
_QUESTION = f"""
import sys
sys.path[:] = [entry for entry in sys.path if entry]
import json
try:
    from importlib.util import MAGIC_NUMBER, find_spec
    numpy, magic = find_spec("numpy") is not None, MAGIC_NUMBER.hex()
except ImportError:
    numpy, magic = False, ""
print({_MARK!r} + json.dumps([list(sys.version_info[:3]), numpy, magic]))
"""
# PR_SET_PDEATHSIG, SIGKILL: kept through exec. Who started it may be gone before that.
_DIES_WITH_US = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, ctypes.c_ulong(9), 0, 0, 0); "
    "os.getppid() == int(sys.argv[1]) and os.execvp(sys.argv[2], sys.argv[2:])"
)


def dying_with_us(command: list[str]) -> list[str]:
    """A command line that runs another one, which ends when this process or the thread that starts it does."""
    return [sys.executable, "-I", "-S", "-c", _DIES_WITH_US, str(os.getpid()), *command]


def interpreter(python: str | os.PathLike[str]) -> str:
    """The interpreter that `ProviderSpec.python` names: a file, or that of a virtual environment's folder."""
    path = os.fspath(python)
    return os.path.join(path, "bin", "python") if os.path.isdir(path) else path


def files_of(python: str | os.PathLike[str]) -> list[str]:
    """The interpreter, and what changes when its virtual environment gets other packages."""
    path = interpreter(python)
    folder = os.path.dirname(os.path.dirname(path))
    told = os.path.join(folder, "pyvenv.cfg")
    if not os.path.isfile(told):
        return [path]
    return [path, told, *sorted(glob.glob(os.path.join(glob.escape(folder), "lib", "python*", "site-packages")))]


def surroundings(python: str | os.PathLike[str], ours: Mapping[str, str]) -> dict[str, str]:
    """The environment variables for an interpreter: ours, but as if its virtual environment had been activated.

    What leads Python to our packages is left out.
    """
    env = {key: value for key, value in ours.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    active = env.pop("VIRTUAL_ENV", None)
    env.pop("VIRTUAL_ENV_PROMPT", None)
    path = env.get("PATH", os.defpath).split(os.pathsep)
    if active is not None:
        path = [entry for entry in path if entry != os.path.join(active, "bin")]
    programs = os.path.dirname(interpreter(python))
    folder = os.path.dirname(programs)
    if os.path.isfile(os.path.join(folder, "pyvenv.cfg")):
        env["VIRTUAL_ENV"] = folder
        path.insert(0, programs)
    env["PATH"] = os.pathsep.join(path)
    return env


@dataclass(frozen=True)
class Found:
    """What an interpreter said of itself; `numpy`: whether it has it; `magic`: the magic number of its bytecode."""

    version: tuple[int, ...]
    numpy: bool
    magic: str


_known: dict[tuple[object, ...], Found] = {}


def check(spec: ProviderSpec, seconds: float) -> ProviderUnavailableError | None:
    """Why a worker cannot run with `spec.python`; None if it can, or if the spec names none.

    An interpreter that has not been asked yet has so many seconds to answer.
    """
    if spec.python is None:
        return None
    given = os.fspath(spec.python)
    path = interpreter(given)
    reason = _fault(given, path, spec, seconds)
    if reason is None:
        return None
    name = spec.display
    return ProviderUnavailableError(f"provider {name} is not available: {reason}", provider=name, reason=reason)


def _fault(given: str, path: str, spec: ProviderSpec, seconds: float) -> str | None:
    if not os.path.isfile(path):
        if os.path.isdir(given):
            return f"python={given!r} is a folder without bin/python; name a virtual environment or an interpreter"
        return f"there is no interpreter python={given!r}; name a file, or the folder of a virtual environment"
    if not os.access(path, os.X_OK):
        return f"python={given!r} may not be executed"
    env = {**surroundings(given, os.environ), **spec.env}
    found = _asked(path, env, seconds)
    if isinstance(found, str):
        return f"python={given!r} is no Python: {found}"
    version = ".".join(map(str, found.version))
    if found.version < OLDEST:
        return f"python={given!r} is Python {version}; a worker needs {'.'.join(map(str, OLDEST))} or newer"
    if not found.numpy:
        return f"python={given!r} (Python {version}) has no numpy, all that a worker needs; install it there"
    try:
        prepare(path, found.magic, lambda words, fds: _run([path, *words], env, COMPILE_SECONDS, fds))
    except (OSError, subprocess.TimeoutExpired) as error:  # then workers compile for themselves
        log.info("Outrider is not compiled for %s: %s", path, str(error))
    return None


def _asked(path: str, env: dict[str, str], seconds: float) -> Found | str:
    """What the interpreter says, or why it says nothing. A good answer holds while its file and its paths stay."""
    stat = os.stat(path)
    key = (path, stat.st_mtime_ns, stat.st_size, env.get("PYTHONPATH"), env.get("PYTHONHOME"))
    if key in _known:
        return _known[key]
    try:
        code, out, error_out = _run([path, "-c", _QUESTION], env, seconds)
    except subprocess.TimeoutExpired:
        return f"it did not say which within {seconds:g} s"
    except OSError as error:
        return str(error)
    said = [line[len(_MARK) :] for line in out.splitlines() if line.startswith(_MARK)]
    if code or not said:
        left = (error_out or out).strip().splitlines()[-1:]
        return ": ".join([f"asked for its version, it ended with status {code}", *left])
    try:
        version, numpy, magic = json.loads(said[-1])
        found = Found(tuple(map(int, version)), bool(numpy), str(magic))
    except (ValueError, TypeError):
        return f"asked for its version, it said {said[-1]!r:.200}"
    if numpy:
        _known[key] = found
    return found


def _run(command: list[str], env: dict[str, str], seconds: float, fds: Sequence[int] = ()) -> tuple[int, str, str]:
    """Exit code and what was written. It ends with us, and when it is late, with all that it started.

    `fds`: descriptors that it inherits. Raises OSError, also for more than `MOST_SAID`; subprocess.TimeoutExpired.
    """
    with subprocess.Popen(
        dying_with_us(command), pass_fds=fds, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=env, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            out, error_out = _read(process, monotonic() + seconds, seconds)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, out, error_out


def _read(process: subprocess.Popen[bytes], until: float, seconds: float) -> tuple[str, str]:
    """What it writes until it ends. Unlike `communicate`, not without bound."""
    said = {pipe.fileno(): bytearray() for pipe in (process.stdout, process.stderr) if pipe is not None}
    with selectors.DefaultSelector() as selector:
        for fd in said:
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, until - monotonic()))
            if not ready:
                raise subprocess.TimeoutExpired(process.args, seconds)
            for key, _ in ready:
                more = os.read(key.fd, 1 << 16)
                said[key.fd] += more
                if not more:
                    selector.unregister(key.fd)
            if sum(map(len, said.values())) > MOST_SAID:
                raise OSError(f"it wrote more than {MOST_SAID} bytes")
    process.wait(max(0.0, until - monotonic()))
    out, error_out = (text.decode(errors="replace") for text in said.values())
    return out, error_out
