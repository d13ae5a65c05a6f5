"""Copies of the compiled library, from and to memory of any form."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.providers.cpu.kernels.copying import copy_call, joined
from tests.native_library import libraries

pytestmark = pytest.mark.skipif(libraries() is None, reason="there are no compiled kernels here")

DTYPES = (np.int8, np.float16, np.float32, np.float64)


def _numbered(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    return (np.arange(math.prod(shape)) % 251 - 100).astype(dtype).reshape(shape)


def _copied(y: np.ndarray, x: np.ndarray) -> None:
    for library in libraries() or ():
        y.fill(7)
        call = copy_call(library, y, x)
        assert call is not None
        call()
        np.testing.assert_array_equal(y, x)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_any_memory_to_any_memory(data: st.DataObject) -> None:
    """Transposed, sliced with any step, broadcast; what lies beside the destination stays as it was."""
    rank = data.draw(st.integers(0, 5))
    shape = tuple(data.draw(st.integers(1, 19 if rank < 4 else 5)) for _ in range(rank))
    dtype = data.draw(st.sampled_from(DTYPES))

    def laid(fresh: bool) -> tuple[np.ndarray, np.ndarray]:
        """(all of the memory, an array of `shape` in it)."""
        order = data.draw(st.permutations(range(rank)))
        steps = [data.draw(st.sampled_from((1, 1, 1, 2) if fresh else (1, 1, -1, 2, -3))) for _ in range(rank)]
        memory = _numbered(tuple(shape[axis] * abs(steps[axis]) for axis in order), dtype)
        back = sorted(range(rank), key=lambda axis: order[axis])
        array = memory.transpose(back)[tuple(slice(None, None, step) for step in steps) + (...,)]
        return memory, array[tuple(slice(n) for n in shape) + (...,)]

    _, x = laid(False)
    if rank and data.draw(st.booleans()):
        axis = data.draw(st.integers(0, rank - 1))
        x = np.broadcast_to(np.take(x, [0], axis), shape)
    memory, y = laid(True)
    outside = np.ones(memory.shape, bool)
    np.lib.stride_tricks.as_strided(outside, y.shape, [s // y.itemsize for s in y.strides])[...] = False
    before = memory.copy()
    _copied(y, x)
    np.testing.assert_array_equal(memory[outside], before[outside])


@pytest.mark.fast
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 3, 40, 41), (2, 17, 8, 8), (1, 64, 5, 3), (2, 8, 1, 100), (1, 1, 9, 9)])
def test_images_to_channels_last_and_back(shape: tuple[int, ...], dtype: type) -> None:
    x = _numbered(shape, dtype)
    last = np.empty((shape[0], *shape[2:], shape[1]), dtype).transpose(0, 3, 1, 2)
    _copied(last, x)
    _copied(np.empty_like(x, order="C"), last)


@pytest.mark.fast
def test_long_rows_are_shared() -> None:
    x = _numbered((300_000,), np.float32)
    _copied(np.empty_like(x), x)
    _copied(np.empty_like(x), np.concatenate([x, x])[::2])


@pytest.mark.fast
def test_axes_that_lie_alike_are_one() -> None:
    x = np.zeros((2, 3, 4, 5), np.float32)
    assert joined(np.empty_like(x), x) == [(4, 4, 120)]
    assert joined(np.empty((2, 4, 5, 3), np.float32).transpose(0, 3, 1, 2), x) == [
        (240, 240, 2),
        (12, 4, 20),
        (4, 80, 3),
    ]


@pytest.mark.fast
def test_what_is_not_taken() -> None:
    found = libraries()
    assert found is not None
    library = found[0]
    assert copy_call(library, np.empty(3, np.complex128), np.ones(3, np.complex128)) is None
    assert copy_call(library, np.empty(0, np.float32), np.empty(0, np.float32)) is None
    wide = np.zeros((3,) * 10, np.int8)[tuple(slice(2) for _ in range(10))]
    assert copy_call(library, np.empty((2,) * 10, np.int8), wide) is None
