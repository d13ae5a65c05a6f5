"""Free lists against plain sets of integers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.shm.errors import RangesFullError
from outrider.shm.ranges import Intervals, Ranges

pytestmark = pytest.mark.fast
spans = st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(["add", "remove"]), spans), max_size=25), spans)
def test_intervals_are_a_set_of_integers(steps, probe):
    ours, oracle = Intervals(), set()
    for action, (start, end) in steps:
        getattr(ours, action)(start, end)
        oracle = oracle | set(range(start, end)) if action == "add" else oracle - set(range(start, end))
        parts = list(ours)
        assert {number for start, end in parts for number in range(start, end)} == oracle
        assert all(start < end for start, end in parts)
        assert all(left[1] < right[0] for left, right in zip(parts, parts[1:], strict=False))
        assert ours.total() == len(oracle)
    wanted = set(range(*probe)) - oracle
    gaps = ours.missing(*probe)
    assert {number for start, end in gaps for number in range(start, end)} == wanted
    assert all(start < end for start, end in gaps)
    assert ours.covers(*probe) == (not wanted)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.lists(st.one_of(st.integers(0, 700), st.integers(-20, -1)), max_size=60))
def test_ranges_are_disjoint_aligned_and_join_again(steps):
    """Non-negative steps allocate that many bytes, negative ones free the (-step)th oldest range."""
    ranges = Ranges(100, 4000, align=64)
    live: dict[int, int] = {}
    for step in steps:
        if step >= 0:
            size = max(64, -(-step // 64) * 64)
            taken = sorted((offset, offset + length) for offset, length in live.items())
            edges = [128, *(edge for span in taken for edge in span), 3968]
            gaps = {start: stop - start for start, stop in zip(edges[::2], edges[1::2], strict=True)}
            largest = max(gaps.values())
            if size > largest:
                with pytest.raises(RangesFullError) as refused:
                    ranges.allocate(step)
                assert refused.value.largest == largest
                continue
            offset = ranges.allocate(step)
            assert offset % 64 == 0 and offset >= 128 and offset + size <= 3968
            assert all(offset + size <= start or offset >= stop for start, stop in taken)
            assert gaps[offset] == min(gap for gap in gaps.values() if gap >= size)
            live[offset] = size
        elif live:
            offset = list(live)[(-step - 1) % len(live)]
            ranges.free(offset)
            del live[offset]
        assert ranges.in_use == sum(live.values())
    for offset in live:
        ranges.free(offset)
    assert ranges.allocate(3968 - 128) == 128


def test_wrong_uses_are_refused():
    ranges = Ranges(0, 256)
    offset = ranges.allocate(1)
    ranges.free(offset)
    with pytest.raises(ValueError, match="not in use"):
        ranges.free(offset)
    with pytest.raises(ValueError):
        ranges.allocate(-1)
    with pytest.raises(ValueError, match="power of two"):
        Ranges(0, 256, align=48)
