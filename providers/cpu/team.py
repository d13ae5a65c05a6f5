"""Python threads that do the shares of one NumPy step at once: NumPy lets others run while it works on large arrays.

Only for what runs without the compiled library, which has a pool of its own. BLAS is at one thread then: products are
shared as all else. Handing a share to a waiting thread and having it back takes 20 to 40 us, so small steps stay whole.
Which steps are shared, and how, depends on shapes and the number of threads alone.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from outrider.shm.segment import address_of

WORTH = 150_000  # nanoseconds of work from which on a step is shared
PRODUCT = 1 / 40  # nanoseconds of a multiplication and an addition in float32
_COSTS = {np.exp: 2.5, np.tanh: 3.0, np.log: 3.0, np.power: 10.0, np.divide: 0.6, np.sqrt: 0.6}  # of a float32
_COST = 0.25  # nanoseconds for four bytes of a result by any other function, or a copy

Work = Callable[[], Any]


class Team:
    """`size` threads, the calling one included. One step at a time."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._members = [_Member(f"outrider-numpy-{number}") for number in range(1, size)]

    def run(self, works: Sequence[Work]) -> None:
        """Call all works, at most `size`, at once. Raises what one of them raised, when all have ended."""
        asked = [member.ask(work) for member, work in zip(self._members, works[1:], strict=False)]
        try:
            works[0]()
        finally:
            errors = [member.wait() for member in asked]
        for error in errors:
            if error is not None:
                raise error

    def stop(self) -> None:
        """End the threads; `run` must not be called any more."""
        for member in self._members:
            member.stop()
        self._members.clear()

    def shares(self, nanoseconds: float) -> int:
        """In how many shares to do so much work."""
        return self.size if nanoseconds >= WORTH else 1

    def step(self, fn: Callable[..., Any], args: Sequence[Any]) -> Work:
        """`fn(*args)` as a step, in shares where it is a NumPy function whose work can be divided and is worth it."""
        if not args and isinstance(fn, partial) and not fn.keywords:
            return self.step(fn.func, fn.args)
        shares = _divided(fn, args, self.size)
        if shares:
            return partial(self.run, [partial(fn, *share) for share in shares])
        return partial(fn, *args) if args else fn


class _Member:
    """One thread, which waits for work without looking for it."""

    def __init__(self, name: str) -> None:
        self._go, self._done = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._done.acquire()
        self._work: Work | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def ask(self, work: Work) -> _Member:
        self._work = work
        self._go.release()
        return self

    def wait(self) -> BaseException | None:
        self._done.acquire()
        error, self._error = self._error, None
        return error

    def stop(self) -> None:
        self._work = None
        self._go.release()
        self._thread.join()

    def _serve(self) -> None:
        with np.errstate(all="ignore"):
            while True:
                self._go.acquire()
                work, self._work = self._work, None
                if work is None:
                    return
                try:
                    work()
                except BaseException as error:  # the caller raises it
                    self._error = error
                del work
                self._done.release()


# Dividing a call -----------------------------------------------------------------------------------------------------
def _divided(fn: Callable[..., Any], args: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """The arguments of each share; [] for what stays whole."""
    if fn is np.matmul and len(args) == 3:
        return _product(args, size)
    if fn is np.copyto and len(args) == 2:
        target, source = args
        return [share[::-1] for share in _elementwise([source, target], _COST, size)]
    if isinstance(fn, np.ufunc) and fn.signature is None and fn.nout == 1 and len(args) == fn.nin + 1:
        return _elementwise(args, _COSTS.get(fn, _COST), size)
    return []


def _elementwise(args: Sequence[Any], cost: float, size: int) -> list[Sequence[Any]]:
    """Shares of a call whose last argument is the result; the others broadcast to it."""
    out = args[-1]
    if not isinstance(out, np.ndarray) or cost * out.nbytes / 4 < WORTH:
        return []
    if any(isinstance(x, np.ndarray) and _shifted(x, out) for x in args[:-1]):
        return []
    axis = max((a for a in range(out.ndim) if out.shape[a] >= size), key=lambda a: abs(out.strides[a]), default=None)
    if axis is None:
        return []
    return [[_part(x, axis - out.ndim, part) for x in args] for part in parts(out.shape[axis], size)]


def _product(args: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """Shares of numpy.matmul(x, w, y): of the first axis of the batch, else of the rows or columns of the result."""
    x, w, y = args
    if not all(isinstance(one, np.ndarray) and one.ndim > 1 for one in args):
        return []
    if 2 * y.size * x.shape[-1] * PRODUCT * y.itemsize / 4 < WORTH:
        return []
    batch = [axis for axis in range(-y.ndim, -2) if y.shape[axis] >= size]
    if batch:
        return [[_part(one, batch[0], part) for one in args] for part in parts(y.shape[batch[0]], size)]
    if max(y.shape[-2:]) < size:
        return []
    if y.shape[-2] >= y.shape[-1]:
        return [[_part(x, -2, part), w, _part(y, -2, part)] for part in parts(y.shape[-2], size)]
    return [[x, _part(w, -1, part), _part(y, -1, part)] for part in parts(y.shape[-1], size)]


def parts(count: int, size: int) -> list[slice]:
    """So many items in `size` slices, the bounds between them at multiples of 16 where there are enough."""
    unit = 16 if count >= 32 * size else 1
    bounds = [count * k // size // unit * unit for k in range(size)] + [count]
    return [slice(first, last) for first, last in zip(bounds, bounds[1:], strict=False)]


def _part(x: Any, axis: int, part: slice) -> Any:
    """Part of an axis, counted from the last one, of what broadcasts; a number, or an axis of one, serves all parts."""
    if not isinstance(x, np.ndarray) or x.ndim < -axis or x.shape[axis] == 1:
        return x
    index: tuple[Any, ...] = (..., part, *(slice(None),) * (-axis - 1))
    return x[index]


def _shifted(x: np.ndarray, out: np.ndarray) -> bool:
    """True where a share would write what another one reads."""
    if not np.may_share_memory(x, out):
        return False
    return address_of(x) != address_of(out) or x.shape != out.shape or x.strides != out.strides


def product_time(rows: int, columns: int, depth: int, itemsize: int = 4) -> float:
    """Nanoseconds of a matrix product, about."""
    return 2 * math.prod((rows, columns, depth)) * PRODUCT * itemsize / 4
