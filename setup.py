"""The part of the build that pyproject.toml cannot say: wheels carry the compiled kernels.

With a C compiler the wheel is for this kind of machine and the oldest C library that the kernels run on, and for any
Python 3. Without one, or where the kernels do not compile, it is a pure one, whose cpu provider compiles at first use
if it can, and says so if it cannot.
"""

from __future__ import annotations

import importlib.util
import logging
import platform
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = Path("providers", "cpu", "native")
OLDEST = (2, 17)  # the oldest C library of the manylinux tags
_log = logging.getLogger(__name__)


def _build_module() -> ModuleType:
    """`build.py` by itself: the package around it needs NumPy."""
    spec = importlib.util.spec_from_file_location("native_build", Path(__file__).parent / NATIVE / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class WithKernels(Distribution):
    """`kernels`: the compiled library, once it has been built; then this is a package for one kind of machine."""

    kernels: Path | None = None

    def has_ext_modules(self) -> bool:
        return self.kernels is not None


class BuildWithKernels(build_py):
    """Compiles the kernels into the build folder. An editable install compiles at first use."""

    distribution: WithKernels

    def run(self) -> None:
        native = Path(self.build_lib, "outrider", NATIVE).absolute()
        if not self.editable_mode:
            shutil.rmtree(native, ignore_errors=True)  # sources of an earlier build would be compiled, too
        super().run()
        if not self.editable_mode:
            self.distribution.kernels = self._compile(native)

    def _compile(self, native: Path) -> Path | None:
        build = _build_module()
        # A wheel is for other machines than this one, too.
        target = build.V3 if platform.machine() == "x86_64" else build.target()
        path = native / build.carried(target).name
        try:
            build.compile_to(path, build.compiler_command(), (*build.target_flags(target), *build.OLDEST))
        except build.BuildError as reason:
            _log.warning("the wheel carries no compiled kernels: %s", reason)
            return None
        return path


class WheelWithKernels(bdist_wheel):
    """Tagged by what is in it."""

    distribution: WithKernels

    def run(self) -> None:
        self.run_command("build")
        self.root_is_pure = self.distribution.kernels is None
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        kernels = self.distribution.kernels
        if kernels is None:
            return ("py3", "none", "any")
        major, minor = max(_needed(kernels), OLDEST)
        return ("py3", "none", f"manylinux_{major}_{minor}_{platform.machine()}")


def _needed(library: Path) -> tuple[int, int]:
    """The version of the C library whose symbols a library needs."""
    symbols = subprocess.run(["readelf", "--version-info", str(library)], capture_output=True, text=True, check=True)
    return max((int(major), int(minor)) for major, minor in re.findall(r"GLIBC_(\d+)\.(\d+)", symbols.stdout))


setup(distclass=WithKernels, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelWithKernels})
