"""Stacks come out of a process that cannot run Python any more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from outrider.shm.stackfile import DUMP_SIGNAL, KEPT_BYTES, StackFile

pytestmark = pytest.mark.fast

ARMED = """
import ctypes, os, signal, sys
from outrider.shm.stackfile import arm
def inner():
    {then}
arm(int(sys.argv[1]))
print("armed", flush=True)
inner()
"""


@pytest.fixture
def stacks():
    file = StackFile()
    yield file
    file.close()


def armed(stacks: StackFile, then: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", ARMED.format(then=then), str(stacks.fileno())],
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[stacks.fileno()],
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "armed\n"
    process.stdout.close()
    return process


@pytest.mark.parametrize(
    ("then", "number"),
    [("ctypes.string_at(0)", signal.SIGSEGV), ("ctypes.CDLL(None).abort()", signal.SIGABRT)],
)
def test_a_fatal_signal_leaves_the_stack(stacks: StackFile, then: str, number: int) -> None:
    assert armed(stacks, then).wait() == -number
    text = stacks.text()
    assert text.startswith("Fatal Python error: ")
    assert "in inner" in text


def test_a_stack_on_demand_while_native_code_holds_the_lock(stacks: StackFile) -> None:
    process = armed(stacks, "while True: ctypes.PyDLL(None).sleep(600)  # which a signal ends")
    try:
        for _ in range(2):  # cleared, it is written from the start again
            stacks.clear()
            while "in inner" not in stacks.text():
                os.kill(process.pid, DUMP_SIGNAL)
                time.sleep(0.01)
            assert stacks.text().startswith("Current thread ")
            assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_handler_of_somebody_else_leaves_no_stack(stacks: StackFile) -> None:
    then = "signal.signal(signal.SIGSEGV, signal.SIG_DFL); ctypes.string_at(0)"
    assert armed(stacks, then).wait() == -signal.SIGSEGV
    assert stacks.text() == ""


def test_only_the_end_of_a_long_text_is_read(stacks: StackFile) -> None:
    os.write(stacks.fileno(), b"x" * KEPT_BYTES + b"y" * 10)
    assert (len(stacks.text()), stacks.text()[-11:]) == (KEPT_BYTES, "x" + "y" * 10)
    assert stacks.size() == KEPT_BYTES + 10
    stacks.close()
    assert (stacks.text(), stacks.size(), stacks.fileno()) == ("", 0, -1)
