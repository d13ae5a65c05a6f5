"""The harness of the kernel tests finds what it is there for: kernels whose two implementations differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import kernel_harness
import numpy as np
import pytest
from kernel_harness import check

from outrider.providers.cpu.kernels.frame import KERNELS, Bind, kernel
from tests.native_library import libraries, why_not

pytestmark = pytest.mark.fast

X = np.arange(6, dtype=np.float32).reshape(2, 3)
NO_COMPILER = "there is no C compiler"


class Pretended:
    """Compiled kernels written in Python: `threads` as told, a step of the library is any callable."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.used = frozenset[str]()

    families = ("conv",)

    def forget(self) -> None:
        self.used = frozenset()

    def call(self, fn: Any, *args: Any) -> Any:
        self.used = frozenset(self.families)
        return lambda: fn(*args)


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernel_harness, "libraries", lambda: (Pretended(1), Pretended(3)))
    yield
    KERNELS.pop(("test.domain", "Twice"), None)


def twice(compiled: Any, declared: str = "conv") -> None:
    """Register an operator that doubles; `compiled(x, y, threads)` is what its compiled implementation does."""

    @kernel("Twice", domain="test.domain", compiled=declared or ())
    def bind(b: Bind, p: None) -> None:
        x, library = b.array(0), b.compiled("conv")
        y = b.out(0, x.shape, x.dtype)
        if library is None:
            b.step(np.multiply, x, 2, y)
        else:
            b.step(library.call(compiled, x, y, library.threads))


def test_a_right_kernel_passes() -> None:
    twice(lambda x, y, threads: np.multiply(x, 2, y))
    check("Twice", [X], domain="test.domain", oracle=[X * 2])


WRONG = {
    "wrong values": (lambda x, y, threads: np.multiply(x, 3, y), "compiled"),
    "other bits on several threads": (lambda x, y, threads: np.multiply(x, 2 + 1e-7 * threads, y), "other bits"),
    "other bits in another order": (
        lambda x, y, threads: np.multiply(x, 2 if x.flags.c_contiguous else 2 + 5e-7, y),
        "Fortran order.* has other bits",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_compiled_kernel_fails(fault: str) -> None:
    compiled, words = WRONG[fault]
    twice(compiled)
    with pytest.raises(AssertionError, match=words):
        check("Twice", [X], domain="test.domain", oracle=[X * 2])


def test_a_family_that_is_not_declared_fails() -> None:
    twice(lambda x, y, threads: np.multiply(x, 2, y), declared="")
    with pytest.raises(AssertionError, match=r"Twice uses frozenset\(\{'conv'\}\)"):
        check("Twice", [X], domain="test.domain", oracle=[X * 2])


def test_families_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="no families speed"):
        kernel("Twice", domain="test.domain", compiled="speed")(lambda b, p: None)


def test_compiled_kernels_are_under_test() -> None:
    if libraries() is None:
        reason = why_not()
        assert NO_COMPILER in reason, reason
        pytest.skip(f"compiled kernels are not tested: {reason}")
