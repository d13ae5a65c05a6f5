"""Every reason for which a test may be skipped, and whether it holds on this machine.

A run that skips a test for another reason, or for one that does not hold, fails (`conftest.py`).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import cache

from tests.environments import interpreters


def _lacks(*programs: str) -> Callable[[], bool]:
    return lambda: any(shutil.which(program) is None for program in programs)


@cache
def _links(flag: str) -> bool:
    """True if the C compiler can make a program with this flag."""
    if shutil.which("cc") is None:
        return False
    command = ["cc", "-x", "c", flag, "-o", os.devnull, "-"]
    return subprocess.run(command, input="int main(void) { return 0; }", capture_output=True, text=True).returncode == 0


def _no_namespaces() -> bool:
    if shutil.which("unshare") is None:
        return True
    return subprocess.run(["unshare", "-pf", "--mount-proc", "true"], capture_output=True).returncode != 0


@cache
def pypi_is_unreachable() -> bool:
    """True if pip does not find a package that is on PyPI only."""
    with tempfile.TemporaryDirectory(prefix="reach-") as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        return (
            subprocess.run([*pip, "nxrt-ep-cpu==0.1.0.dev6"], stdin=subprocess.DEVNULL, capture_output=True).returncode
            != 0
        )


# What the reason matches -> whether it holds here.
REASONS: Mapping[str, Callable[[], bool]] = {
    "no C compiler|no compiled kernels here|no library of compiled kernels": _lacks("cc"),
    "the compiler has no sanitizers": lambda: not _links("-fsanitize=address,undefined"),
    "the compiler has no race detector": lambda: not _links("-fsanitize=thread"),
    "not compiled for aarch64": _lacks("aarch64-linux-gnu-gcc"),
    "there is no gdb": _lacks("gdb"),
    "taskset": _lacks("taskset"),
    "unshare": _no_namespaces,
    "there is no Python 3.10": lambda: not interpreters("3.10"),
    "there is no Python 3.13": lambda: not interpreters("3.13"),
    "PyPI cannot be reached": pypi_is_unreachable,
}


def objection(reason: str) -> str:
    """What is wrong with skipping a test for this reason; '' if nothing is."""
    found = next((holds for pattern, holds in REASONS.items() if re.search(pattern, reason)), None)
    if found is None:
        return "the reason is not listed in tests/skips.py"
    return "" if found() else "the reason does not hold on this machine"
