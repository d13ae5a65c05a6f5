"""Places of values: buffers shared by edges, growth in place, moves that are told only to whom they concern."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.shm.board import LAYOUTS_PER_EDGE, TENSOR, BoardWriter, Layout
from outrider.shm.errors import OutOfMemoryError
from outrider.shm.places import DISCARD_BYTES, MANY_BUFFERS, Places
from outrider.shm.segment import PAGE, Segment, create_segment

pytestmark = pytest.mark.fast
SLOTS = 2
BYTES = np.dtype(np.uint8)


def made(edges: int, buffers: dict[int, int] | None = None, nbytes: int = 1 << 30) -> Places:
    fd = create_segment("places", nbytes)
    segment = Segment(fd, writable=True)
    os.close(fd)
    return Places(segment, BoardWriter(segment, edges, SLOTS, 1), edges, SLOTS, buffers)


def state(places: Places, slot: int) -> tuple[list[int], int]:
    return places.stamps[slot::SLOTS], places.changes[slot]


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    st.lists(st.integers(0, 3), min_size=4, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, SLOTS - 1), st.integers(0, 40_000)), max_size=40),
    st.sampled_from([1 << 20, 1 << 30]),
)
def test_the_last_value_of_every_buffer_stays_whole(buffer_of: list[int], steps: list[Any], nbytes: int) -> None:
    """Each value is filled with its own byte; after each step the latest one of every buffer and slot is there."""
    places = made(4, dict(enumerate(buffer_of)), nbytes)
    latest: dict[tuple[int, int], tuple[int, int, int]] = {}  # (buffer, slot) -> offset, bytes, filling
    for step, (edge, slot, size) in enumerate(steps):
        buffer, index = buffer_of[edge], places.stamp_index(edge, slot)
        stamp, changes = places.stamps[index], places.changes[slot]
        offset = places.offset(edge, slot, size, "value")
        moved = (buffer, slot) in latest and latest[buffer, slot][0] != offset
        assert (places.stamps[index] != stamp) == (places.changes[slot] != changes) == moved
        places.segment.view[offset : offset + size] = bytes([step]) * size
        latest[buffer, slot] = (offset, size, step)
        for at, count, filling in latest.values():
            assert bytes(places.segment.view[at : at + count]) == bytes([filling]) * count
        assert places.allocated_bytes >= sum(count for _, count, _ in latest.values())


def test_edges_of_one_buffer_lie_at_one_place_and_slots_apart() -> None:
    places = made(3, {0: 0, 1: 1, 2: 0})
    first = [places.offset(edge, slot, 100, "value") for slot in range(SLOTS) for edge in range(3)]
    assert first[0] == first[2] and first[3] == first[5]
    assert len(set(first)) == 4
    assert (places.allocated_bytes, places.unshared_bytes) == (4 * PAGE, 6 * PAGE)
    with pytest.raises(KeyError):
        places.stamp_index(3, 0)


def test_a_value_that_grows_stays_where_it_is_while_its_room_lasts() -> None:
    places = made(2)
    places.offset(1, 0, 8, "other")
    first = places.offset(0, 0, PAGE, "value")
    before = state(places, 0)
    for size in range(PAGE, 200 * PAGE, 3 * PAGE):
        assert places.offset(0, 0, size, "value") == first
    assert state(places, 0) == before
    assert 200 * PAGE <= places.allocated_bytes + 3 * PAGE <= 303 * PAGE  # at least half as much again each time


def test_a_move_is_told_by_one_stamp_and_returns_what_was_there() -> None:
    places = made(4, nbytes=1 << 26)
    offsets = [places.offset(edge, slot, DISCARD_BYTES, "value") for edge in range(3) for slot in range(SLOTS)]
    before = [state(places, slot) for slot in range(SLOTS)]
    populated = places.segment.populated_bytes()
    assert places.offset(0, 1, 8 * DISCARD_BYTES, "value") != offsets[1]
    assert state(places, 0) == before[0]
    assert state(places, 1) == ([before[1][0][0] + 1, *before[1][0][1:]], before[1][1] + 1)
    assert places.segment.populated_bytes() <= populated + 7 * DISCARD_BYTES + 2 * PAGE
    assert not places.segment.view[offsets[1] + PAGE]
    places.offset(3, 0, 1, "value")
    others = [places.offset(edge, slot, DISCARD_BYTES, "value") for edge in range(3) for slot in range(SLOTS)]
    assert others[0] == offsets[0] and others[2:] == offsets[2:]


def test_addresses_kept_for_growth_are_no_reason_to_refuse_a_value() -> None:
    places = made(2, nbytes=1 << 24)
    places.offset(0, 0, PAGE, "small")
    places.offset(0, 1, PAGE, "small")
    assert places.offset(1, 0, 11 << 20, "large")
    with pytest.raises(OutOfMemoryError, match="'too large'") as caught:
        places.offset(1, 1, 11 << 20, "too large")
    assert (caught.value.value, caught.value.asked) == ("too large", 11 << 20)
    assert places.offset(1, 1, PAGE, "small")


def test_small_values_among_very_many_lie_close_together() -> None:
    places = made(MANY_BUFFERS)
    for edge in range(MANY_BUFFERS):
        places.offset(edge, 0, 8, "value")
    assert places.segment.populated_bytes() < 3 << 20


def test_a_redefined_number_is_told_to_its_slot() -> None:
    places = made(2)
    for count in range(LAYOUTS_PER_EDGE):
        places.tensor(0, 1, 2, BYTES, (count,), "value")
    first = places.number(0, 1, Layout(TENSOR, 2, 1, (5,), places.offset(0, 1, 5, "value"), 5))
    record = places.board.version_at(0, 1, first)
    before = [state(places, slot) for slot in range(SLOTS)]
    for count in range(LAYOUTS_PER_EDGE - 1):
        places.tensor(0, 1, 2, BYTES, (1, count), "value")
    assert places.board.version_at(0, 1, first) == record
    assert state(places, 1) == (before[1][0], before[1][1] + LAYOUTS_PER_EDGE - 1)
    places.tensor(0, 1, 2, BYTES, (2, 2), "value")
    assert places.board.version_at(0, 1, first) != record
    assert state(places, 0) == before[0]
