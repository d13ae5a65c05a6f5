"""User memory: arrays of the caller's in shared memory, and how their ranges come back."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.shm import memory
from outrider.shm.errors import OutOfMemoryError
from outrider.shm.segment import ALIGN, PAGE, Segment, address_of, create_segment
from outrider.shm.user import KEPT_BYTES, UserMemory, process_memory
from tests.test_shm_leases import DERIVED

pytestmark = pytest.mark.fast


def made(nbytes: int = 1 << 30, start: int = 0, end: int | None = None) -> UserMemory:
    fd = create_segment("user", nbytes)
    try:
        return UserMemory(Segment(fd, writable=True), start, end)
    finally:
        os.close(fd)


def test_an_array_is_writable_contiguous_aligned_and_seen_by_a_reader() -> None:
    user = process_memory()
    array = user.empty("float32", (3, 5), "x")
    assert (array.shape, array.dtype) == ((3, 5), np.float32)
    assert array.flags.writeable and array.flags.c_contiguous
    assert address_of(array) % ALIGN == 0
    reader = Segment(user.descriptor, writable=False)
    array[...] = 7
    offset = user.segment.offset_of(array)
    assert offset is not None
    np.testing.assert_array_equal(reader.array(offset, "float32", (3, 5)), array)


@pytest.mark.parametrize("shape", [(), (0,), (4, 0, 2), (1,)])
def test_small_shapes(shape: tuple[int, ...]) -> None:
    user = made()
    arrays = [user.empty("int64", shape, "x") for _ in range(3)]
    assert len({address_of(array) for array in arrays}) == 3
    assert all(array.shape == shape for array in arrays)


def test_what_lies_in_it() -> None:
    user = made()
    array = user.empty("float32", (4, 4), "x")
    at = user.segment.offset_of(array)
    assert at is not None
    assert user.segment.offset_of(array[1:]) == at + 16
    assert user.segment.offset_of(array[:, 1]) is None  # strided
    assert user.segment.offset_of(array.T) is None
    assert user.segment.offset_of(np.ones(3)) is None
    assert made().segment.offset_of(array) is None


@pytest.mark.parametrize("name", DERIVED)
def test_whatever_shares_an_array_keeps_its_range(name: str) -> None:
    user = made()
    array = user.empty("float32", (32, 64), "x")
    array[...] = np.arange(2048).reshape(32, 64)
    derived = DERIVED[name](array)
    del array
    gc.collect()
    assert user.in_use() == 2048 * 4
    other = user.empty("float32", (32, 64), "x")
    del derived
    gc.collect()
    assert user.in_use() == 2048 * 4
    del other


def test_a_range_is_used_again_and_much_idle_memory_is_given_back() -> None:
    user = made()
    first = user.empty("uint8", (1 << 20,), "x")
    at = address_of(first)
    del first
    again = user.empty("uint8", (1 << 20,), "x")
    assert address_of(again) == at
    assert user.segment.populated_bytes() == 1 << 20
    large = user.empty("uint8", (KEPT_BYTES + PAGE,), "x")
    del large, again
    user.sweep()
    assert user.in_use() == 0
    assert user.segment.populated_bytes() <= KEPT_BYTES


def test_the_range_it_was_given_is_kept_to() -> None:
    user = made(1 << 20, start=1 << 19)
    arrays = [user.empty("uint8", (1 << 17,), "x") for _ in range(4)]
    assert min(user.segment.offset_of(array) or 0 for array in arrays) == 1 << 19
    with pytest.raises(OutOfMemoryError, match="'x' of y needs 131072 bytes; the largest gap") as caught:
        user.empty("uint8", (1 << 17,), "'x' of y")
    assert (caught.value.asked, caught.value.available) == (1 << 17, 0)


def test_short_memory_is_a_typed_error_and_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    user = made()
    monkeypatch.setattr(memory, "available_bytes", lambda: 100)
    with pytest.raises(OutOfMemoryError) as caught:
        user.empty("uint8", (1 << 20,), "x")
    assert (caught.value.value, caught.value.asked) == ("x", 1 << 20)
    assert user.in_use() == 0
    with pytest.raises(ValueError, match="negative"):
        user.empty("uint8", (-1,), "x")


def test_the_memory_of_the_process_lives_as_long_as_an_array() -> None:
    array = process_memory().empty("float32", (8,), "x")
    assert process_memory().segment.offset_of(array) is not None
    gone = weakref.ref(process_memory())
    assert gone() is not None
    del array
    gc.collect()
    assert gone() is None


def test_a_fork_has_a_memory_of_its_own() -> None:
    mine = process_memory()
    array = mine.empty("float32", (8,), "x")
    array[...] = 1
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            other = process_memory().empty("float32", (8,), "x")
            other[...] = 2
            code = 0 if (array == 1).all() and process_memory() is not mine else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (array == 1).all()


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3 * PAGE), st.integers(0, 9)), max_size=40))
def test_living_arrays_never_share_a_byte(steps: list[tuple[bool, int, int]]) -> None:
    user = made(1 << 16)
    held: list[tuple[np.ndarray[Any, Any], int]] = []
    for number, (allocate, nbytes, which) in enumerate(steps):
        if allocate:
            try:
                array = user.empty("uint8", (nbytes,), "x")
            except OutOfMemoryError:
                assert user.in_use() + nbytes > 1 << 12
                continue
            array[...] = number
            held.append((array, number))
        elif held:
            held.pop(which % len(held))
    for array, number in held:
        assert (array == number).all()
    array = None  # type: ignore[assignment]
    held.clear()
    assert user.in_use() == 0


def test_many_threads() -> None:
    user = made()
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(200):
            array = user.empty("int64", (50,), "x")
            array[...] = number
            if (array != number).any():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert user.in_use() == 0
