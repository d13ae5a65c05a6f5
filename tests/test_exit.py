"""The end of the user's process: its exit code and output are its own, workers are gone, and nobody waits for long.

Each script runs in an interpreter of its own, which prints 'ready' once its session has run; the fate of its workers is
read from the outside.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.leaks import settled_leaks, snapshot, worker_pids

HERE = Path(__file__).resolve().parent
ENOUGH = 60.0  # seconds; what is waited for here takes one or two
PATIENCE = 20.0
# What a script begins with: a `session` that has run, whose next run hangs once it is armed.
START = f"""
import atexit, os, signal, sys, threading, time
sys.path.insert(0, {str(HERE.parent)!r})
import numpy as np
import outrider
from tests.builders import chain
mark = sys.argv[1]
x = np.ones((1, 4), np.float32)
stuck = ({str(HERE / "stuck_providers.py")!r} + ":Stuck", {{"where": "run", "mark": mark, "armed": mark + ".armed"}})
def made(**given):
    return outrider.InferenceSession(chain("Relu"), providers=[stuck], **given)
session = made()
assert session.run(None, {{"x": x}})[0][0, 0] == 1
def arm():
    open(mark + ".armed", "w").close()
def reached():
    while not os.path.exists(mark):
        time.sleep(0.01)
def in_thread(call, daemon=True):
    thread = threading.Thread(target=call, daemon=daemon)
    thread.start()
    return thread
def forever():
    while True:
        session.run(None, {{"x": x}})
def until_closed():
    try: forever()
    except outrider.scheduler.errors.SessionClosedError: pass
def ready():
    print("ready", flush=True)
"""


class Script:
    """A script in a process of its own, in a process group of its own."""

    def __init__(self, text: str, folder: Path, *flags: str) -> None:
        file = folder / "script.py"
        file.write_text(START + text)
        self.process = subprocess.Popen(
            [sys.executable, *flags, str(file), str(folder / "mark")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )

    def ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line != "ready\n":
            self.process.kill()
            pytest.fail(f"not ready: {line!r} {self.process.communicate()[1]}")

    def end(self) -> tuple[int, str, str]:
        """Exit code, and what it printed since it was ready."""
        try:
            told = self.process.communicate(timeout=ENOUGH)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # with PYTHONFAULTHANDLER set it shows where it hangs
            self.process.kill()
            pytest.fail(f"hangs; it printed {self.process.communicate()}")
        return self.process.returncode, *told


@pytest.fixture(autouse=True)
def no_worker_survives() -> Iterator[None]:
    before = snapshot()
    yield
    assert settled_leaks(before, PATIENCE) == []


QUIET: dict[str, tuple[str, int]] = {
    "idle": ("ready()", 0),
    "os._exit in a run": ("arm(); in_thread(forever); reached(); ready(); os._exit(9)", 9),
    "daemon threads in a run that hangs": ("arm(); [in_thread(forever) for _ in range(4)]; reached(); ready()", 0),
    "a thread is joined": ("in_thread(lambda: [session.run(None, {'x': x}) for _ in range(99)], False); ready()", 0),
    "run_async in flight": (
        "arm(); f = [session.run_async(None, {'x': x}, lambda *_: print('called')) for _ in range(5)]; "
        "reached(); ready()",
        0,
    ),
    "run_async and who waits for it": (
        "f = session.run_async(None, {'x': x}); t = in_thread(lambda: f.result(), False); ready(); sys.exit(3)", 3,
    ),
    "a dead worker": ("os.kill(session._fleet.workers[0].pid, 9); ready()", 0),
    "a worker that is stopped": ("os.kill(session._fleet.workers[0].pid, signal.SIGSTOP); ready()", 0),
    "a daemon thread that makes a session": ("in_thread(lambda: [made(), made()]); time.sleep(.1); ready()", 0),
    "a daemon thread that closes": (
        "arm(); in_thread(until_closed); reached(); in_thread(session.close); time.sleep(.1); ready()", 0,
    ),
    "many sessions that hang": (
        "more = [made() for _ in range(3)]; arm(); [in_thread(lambda s=s: s.run(None, {'x': x})) for s in more]; "
        "reached(); time.sleep(.1); ready()",
        0,
    ),
    "a fleet that hangs": (
        "fleet = outrider.Fleet([stuck]); session.close(); "
        "session = outrider.InferenceSession(chain('Relu'), options=outrider.SessionOptions(fleet=fleet)); "
        "arm(); in_thread(forever); reached(); ready()",
        0,
    ),
    "used and closed at exit": (
        "arm_ = atexit.register(lambda: (session.run(None, {'x': x}), session.close(), session.close())); ready()", 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", QUIET)
def test_the_exit_is_the_scripts_own(case: str, tmp_path: Path) -> None:
    text, code = QUIET[case]
    script = Script(text, tmp_path)
    script.ready()
    assert script.end() == (code, "", "")


def test_busy_workers_get_a_moment_at_exit_all_together(tmp_path: Path) -> None:
    """Half a second, not five for each; measured in the process itself, beside its other work."""
    text = (
        "more = [made() for _ in range(2)]; arm(); [in_thread(lambda s=s: s.run(None, {'x': x})) for s in more]; "
        "reached(); time.sleep(.1); ready(); "
        "import outrider.scheduler.closing as closing; begun = time.monotonic(); closing._leave_all(); "
        "print(time.monotonic() - begun)"
    )
    script = Script(text, tmp_path)
    script.ready()
    code, out, err = script.end()
    assert (code, err) == (0, "")
    assert 0.5 <= float(out) < 5


def test_a_provider_may_close_in_its_own_time_at_exit(tmp_path: Path) -> None:
    text = (
        "session.close(); stuck[1].update(where='close', seconds=1.5, then=mark + '.closed'); session = made(); "
        "arm(); ready()"
    )
    script = Script(text, tmp_path)
    script.ready()
    assert script.end() == (0, "", "")
    assert (tmp_path / "mark.closed").exists()


def test_after_the_exit_has_begun_a_session_is_closed_and_close_does_nothing(tmp_path: Path) -> None:
    """A function registered with `atexit` before the import of outrider runs after all sessions were closed."""
    text = (
        "import outrider.scheduler.closing as closing; atexit.unregister(closing._leave_all)\n"
        "def late():\n"
        "    try: session.run(None, {'x': x})\n"
        "    except outrider.scheduler.errors.SessionClosedError as error: print(error, session)\n"
        "    session.close()\n"
        "    with session: pass\n"
        "atexit.register(late); atexit.register(closing._leave_all)\n"
        "arm(); in_thread(forever); reached(); ready()"
    )
    script = Script(text, tmp_path)
    script.ready()
    code, out, err = script.end()
    assert (code, err) == (0, "")
    assert out.startswith("the session was closed") and "(closed)" in out


def test_an_exception_ends_as_ever(tmp_path: Path) -> None:
    script = Script("arm(); in_thread(forever); reached(); ready(); 1 / 0", tmp_path)
    script.ready()
    code, out, err = script.end()
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == "ZeroDivisionError: division by zero" and err.count("Traceback") == 1


@pytest.mark.parametrize(("name", "busy"), [("SIGTERM", False), ("SIGTERM", True), ("SIGSEGV", True)])
def test_a_signal_that_ends_the_process_ends_its_workers(name: str, busy: bool, tmp_path: Path) -> None:
    script = Script("ready(); time.sleep(600)" if not busy else "arm(); ready(); forever()", tmp_path)
    script.ready()
    workers = worker_pids()
    assert len(workers) == 1
    if busy:
        while not (tmp_path / "mark").exists():
            time.sleep(0.01)
    watched = [os.pidfd_open(pid) for pid in workers]
    script.process.send_signal(getattr(signal, name))
    for fd in watched:
        assert select.select([fd], [], [], PATIENCE)[0]
        os.close(fd)
    assert script.end()[0] == -getattr(signal, name)


INTERRUPTED: dict[str, str] = {
    "in a run that hangs": "arm(); ready(); session.run(None, {'x': x})",
    "in a run that hangs, in a with": "with session:\n    arm(); ready(); session.run(None, {'x': x})",
    "in the constructor": "ready(); print(made())",
    "in a constructor that hangs": "arm(); stuck[1]['where'] = 'compile'; ready(); made()",
    "in warmup": "arm(); ready(); session.warmup({'x': (1, 4)})",
    "in close": "arm(); in_thread(until_closed); reached(); ready(); session.close()",
    "waiting for a Future": "arm(); f = session.run_async(None, {'x': x}); ready(); f.result()",
    "in asyncio": (
        "import asyncio\n"
        "async def main():\n"
        "    arm(); ready(); await session.run_async(None, {'x': x})\n"
        "asyncio.run(main())"
    ),
}


@pytest.mark.parametrize("case", INTERRUPTED)
def test_ctrl_c_reaches_the_whole_group_and_ends_the_script(case: str, tmp_path: Path) -> None:
    script = Script(INTERRUPTED[case], tmp_path)
    script.ready()
    time.sleep(0.2)  # whatever moment that is; the workers have sessions of their own
    os.killpg(script.process.pid, signal.SIGINT)
    code, out, err = script.end()
    assert code == -signal.SIGINT, err
    assert out == "" and err.splitlines()[-1] == "KeyboardInterrupt", err
    # asyncio tells of the cancellation that it made of the signal.
    assert err.count("Traceback") == (2 if case == "in asyncio" else 1), err


def test_ctrl_c_in_a_run_leaves_a_usable_session(tmp_path: Path) -> None:
    text = (
        "count = 0\n"
        "ready()\n"
        "while count < 3:\n"
        "    try: forever()\n"
        "    except KeyboardInterrupt:\n"
        "        count += 1\n"
        "        assert session.run(None, {'x': 2 * x})[0][0, 0] == 2\n"
        "        ready()\n"
        "session.close()"
    )
    script = Script(text, tmp_path)
    for _ in range(3):
        script.ready()
        time.sleep(0.05)
        os.killpg(script.process.pid, signal.SIGINT)
    assert script.end() == (0, "ready\n", "")
