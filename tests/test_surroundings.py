"""Where a user's process may run: what it was given, and what it lacks. The session works, or says what is missing."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from outrider.scheduler import Fleet, errors

HERE = Path(__file__).resolve().parent
# Runs a model over two workers, one of which dies in between; writes 'right' to a file, or what is wrong.
SCRIPT = f"""
import os, signal, sys
sys.path.insert(0, {str(HERE.parent)!r})
import numpy as np
import outrider
from tests.builders import chain

def main():
    x = np.full((1, 4), 2, np.float32)
    providers = [{str(HERE / "own_providers.py")!r} + ":MyProvider", "cpu"]
    with outrider.InferenceSession(chain("Relu", "Neg"), providers=providers) as session:
        if any("anon" in os.readlink(f"/proc/self/fd/{{fd}}") for fd in range(3)):
            return "a descriptor of ours is a standard stream"
        for kill in (False, True):
            if kill:
                os.kill(session._fleet.workers[0].pid, signal.SIGKILL)
            for _ in range(3):
                if session.run(None, {{"x": x}})[0][0, 0] != -2:
                    return "wrong"
    return "right"

if __name__ == "__main__":
    try:
        told = main()
    except outrider.scheduler.errors.OutriderError as error:
        told = f"{{type(error).__name__}}: {{error}}"
    with open(sys.argv[1], "w") as file:
        file.write(told)
"""

# A shell command around "$@", the script's own.
COMMANDS = {
    "as process 1 of a container": 'exec unshare -pf --mount-proc "$@"',
    "on one core": 'exec taskset -c 0 "$@"',
    "without standard streams": 'exec "$@" <&- >&- 2>&-',
    "isolated and optimized": 'python="$1"; shift; exec "$python" -I -OO "$@"',
    "warnings are errors": 'python="$1"; shift; PYTHONWARNINGS=error exec "$python" -X dev "$@"',
    "no environment": 'exec env -i "$@"',
    "nothing can be written": 'TMPDIR=/proc HOME=/proc XDG_CACHE_HOME=/proc OUTRIDER_CACHE=/proc/none exec "$@"',
    "few descriptors and processes": 'ulimit -n 80; ulimit -u 500; exec "$@"',
    "a folder that was removed": 'mkdir gone; cd gone; rmdir ../gone; exec "$@"',
    "signals ignored": 'trap "" INT TERM HUP CHLD PIPE; exec "$@"',
}
NEEDS = {"as process 1 of a container": "unshare", "on one core": "taskset"}


def run(folder: Path, command: str) -> tuple[int, str, str]:
    """Exit code, what the script told, and what was printed."""
    script, told = folder / "script.py", folder / "told"
    script.write_text(SCRIPT)
    ended = subprocess.run(
        ["sh", "-c", command, "sh", sys.executable, str(script), str(told)],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return ended.returncode, told.read_text() if told.exists() else "", ended.stdout + ended.stderr


def _allowed(what: str) -> str:
    """Why this machine cannot do this; '' if it can."""
    needed = NEEDS.get(what)
    if needed is None:
        return ""
    if shutil.which(needed) is None:
        return f"there is no {needed}"
    if needed == "unshare":
        return subprocess.run(["unshare", "-pf", "--mount-proc", "true"], capture_output=True, text=True).stderr.strip()
    return ""


@pytest.mark.parametrize("what", COMMANDS)
def test_a_session_works(what: str, tmp_path: Path) -> None:
    reason = _allowed(what)
    if reason:
        pytest.skip(reason)
    code, told, printed = run(tmp_path, COMMANDS[what])
    assert (code, told) == (0, "right"), printed
    assert what != "warnings are errors" or "Warning" not in printed


def test_or_says_which_limit_to_raise(tmp_path: Path) -> None:
    code, told, printed = run(tmp_path, 'ulimit -n 30; exec "$@"')
    assert code == 0, printed
    assert told.startswith("ProviderUnavailableError") and "ulimit -n" in told, told


def test_or_says_that_a_folder_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", "/proc")
        with pytest.raises(errors.ProviderUnavailableError, match="TMPDIR"):
            Fleet(["cpu"])
