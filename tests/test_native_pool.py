"""The pool under the eyes of a race detector, and in a fork."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from outrider.providers.cpu.kernels.copying import copy_call
from outrider.providers.cpu.native.build import SOURCE
from tests.native_library import libraries

STRESS = Path(__file__).with_name("pool_stress.c")


@pytest.fixture(scope="module")
def stress(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The program, built with the race detector."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("compiled kernels are not tested: no C compiler")
    program = str(tmp_path_factory.mktemp("stress") / "stress")
    done = subprocess.run(
        [compiler, "-std=gnu11", "-O1", "-g", "-w", "-fsanitize=thread", f"-I{SOURCE}", str(STRESS),
         str(SOURCE / "pool.c"), "-lpthread", "-o", program],
        capture_output=True, text=True,
    )  # fmt: skip
    if "tsan" in done.stderr:
        pytest.skip("the compiler has no race detector")
    assert done.returncode == 0, done.stderr
    return program


@pytest.mark.parametrize("spin", [0, 200_000])
@pytest.mark.parametrize("threads", [2, 3, 8])
def test_many_small_jobs_race_nowhere(stress: str, threads: int, spin: int) -> None:
    done = subprocess.run([stress, str(threads), "40", str(spin)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_fork_works_alone_and_can_end() -> None:
    found = libraries()
    if found is None:
        pytest.skip("compiled kernels are not tested: no C compiler")
    _, several = found
    x = np.arange(60000, dtype=np.float32).reshape(200, 300)
    y = np.zeros((300, 200), np.float32).T
    call = copy_call(several, y, x)
    assert call is not None
    call()  # the helpers are there
    y.fill(0)
    child = os.fork()
    if child == 0:
        call()
        right = np.array_equal(y, x)
        several.stop()
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    call()
    np.testing.assert_array_equal(y, x)
