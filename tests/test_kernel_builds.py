"""The kernels' tests against other builds of the library than the one that is used here.

`portable` is what CPUs without AVX2 get; `sanitized` stops at the first access outside an array and at anything that C
leaves undefined.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.providers.cpu.native import build

TESTS = Path(__file__).resolve().parent
COMPILER = shutil.which("cc")
BASELINE = ("-march=x86-64",) if platform.machine() == "x86_64" else ()
SANITIZED = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
CROSS = "aarch64-linux-gnu-gcc"

pytestmark = pytest.mark.skipif(COMPILER is None, reason="compiled kernels are not tested: no C compiler")


def _kernel_tests(library: Path, **environment: str) -> None:
    files = sorted(str(path) for path in TESTS.glob("test_kernels_*.py"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files],
        cwd=TESTS.parent, env={**os.environ, "OUTRIDER_TEST_KERNELS": str(library), **environment},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]


def test_portable(tmp_path: Path) -> None:
    build.compile_to(tmp_path / "kernels.so", build.compiler_command(), BASELINE)
    _kernel_tests(tmp_path / "kernels.so")


def test_sanitized(tmp_path: Path) -> None:
    runtimes = [_runtime(name) for name in ("libasan.so", "libubsan.so")]
    if not all(runtimes):
        pytest.skip("the compiler has no sanitizers")
    flags = (*build.target_flags(build.target()), *SANITIZED)
    build.compile_to(tmp_path / "kernels.so", build.compiler_command(), flags)
    # Python frees little when it ends, and takes small memory out of blocks of its own.
    _kernel_tests(
        tmp_path / "kernels.so",
        LD_PRELOAD=" ".join(runtimes), ASAN_OPTIONS="detect_leaks=0", PYTHONMALLOC="malloc",
    )  # fmt: skip


def _runtime(name: str) -> str:
    """The path of a library of the compiler, '' where it has none."""
    assert COMPILER is not None
    found = subprocess.run([COMPILER, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    return found if os.path.isabs(found) else ""


@pytest.mark.skipif(shutil.which(CROSS) is None, reason=f"not compiled for aarch64: no {CROSS}")
def test_compiles_for_aarch64_without_a_warning(tmp_path: Path) -> None:
    build.compile_to(tmp_path / "kernels.so", [CROSS], ("-Werror",))
    assert (tmp_path / "kernels.so").read_bytes()[18] == 183  # EM_AARCH64
