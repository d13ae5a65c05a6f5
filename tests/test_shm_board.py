"""Boards: round trips, redefinition, checked import, and a writer in another process."""

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.shm.board import (
    ENCODED,
    LAYOUTS_PER_EDGE,
    MAX_RANK,
    NONE,
    OWN,
    TENSOR,
    VOID,
    BoardReader,
    BoardWriter,
    Layout,
    arena_start,
    number_of,
    run_of,
    word,
)
from outrider.shm.doorbell import Doorbell
from outrider.shm.errors import LayoutError
from outrider.shm.segment import PAGE, Segment, create_segment, read_only
from tests.interrupts import interrupted

pytestmark = pytest.mark.fast
EDGES, SLOTS, GENERATION = 3, 2, 7
ARENA = arena_start(EDGES, SLOTS)
LIMIT = 1 << 30
POOL, USER = 2, 0xFFFF


def make_board():
    fd, pool_fd = create_segment("board", LIMIT), create_segment("pool", LIMIT)
    shared = read_only(fd)
    writer, reader = Segment(fd, writable=True), Segment(shared, writable=False)
    pool = Segment(pool_fd, writable=False)
    for each in (fd, pool_fd, shared):
        os.close(each)
    return (
        writer,
        BoardWriter(writer, EDGES, SLOTS, GENERATION),
        BoardReader(reader, EDGES, SLOTS, GENERATION, {POOL: pool, USER: pool}),
    )


@st.composite
def layouts(draw):
    kind = draw(st.sampled_from([TENSOR, ENCODED, NONE]))
    dtype = draw(st.integers(0, 40))
    if kind == NONE:
        return Layout(NONE, dtype, draw(st.sampled_from([0, 4])), (), 0, 0)
    itemsize = draw(st.sampled_from([1, 2, 4, 8, 16]))
    shape = tuple(draw(st.one_of(st.lists(st.integers(0, 5), max_size=6), st.lists(st.just(1), max_size=MAX_RANK))))
    nbytes = draw(st.integers(0, 999))
    if kind == TENSOR:
        nbytes = itemsize
        for dim in shape:
            nbytes *= dim
    memory = draw(st.sampled_from([OWN, POOL, USER]))
    block = None if memory == OWN else draw(st.one_of(st.none(), st.integers(0, 9)))
    first = ARENA if memory == OWN else 0
    offset = first + 64 * draw(st.integers(0, (LIMIT - first - nbytes) // 64))
    return Layout(kind, dtype, itemsize, shape, offset, nbytes, block, memory)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.lists(layouts(), min_size=1, max_size=25).flatmap(
        lambda pool: st.lists(
            st.tuples(st.integers(0, EDGES - 1), st.integers(0, SLOTS - 1), st.sampled_from([None, *pool])),
            max_size=60,
        )
    )
)
def test_what_is_published_is_what_is_read(steps):
    _, writer, reader = make_board()
    last = {}
    for run, (edge, slot, layout) in enumerate(steps, 1):
        if layout is None:
            writer.void(edge, slot, run)
        else:
            number = writer.number(edge, slot, layout)
            assert 1 <= number <= LAYOUTS_PER_EDGE
            assert writer.number(edge, slot, layout) == number
            writer.publish(edge, slot, run, number)
        last[edge, slot] = (run, layout)
        for (edge, slot), (run, layout) in last.items():
            found = reader.word(edge, slot)
            assert run_of(found) == run
            if layout is None:
                assert number_of(found) == VOID
            else:
                assert reader.layout(edge, slot, number_of(found)) == layout
    for edge in range(EDGES):
        for slot in range(SLOTS):
            if (edge, slot) not in last:
                assert reader.word(edge, slot) == 0


def test_words_hold_48_bits_of_run_and_16_of_number():
    biggest = word((1 << 48) - 1, 65535)
    assert biggest == (1 << 64) - 1 and run_of(biggest) == (1 << 48) - 1 and number_of(biggest) == 65535
    _, writer, reader = make_board()
    writer.publish(2, 1, (1 << 48) - 1, 3)
    assert reader.word(2, 1) == word((1 << 48) - 1, 3)
    assert reader.word(2, 0) == reader.word(1, 1) == 0


def numbered(index):
    return Layout(TENSOR, 1, 4, (index,), ARENA, 4 * index)


def test_the_least_recently_used_number_is_redefined():
    _, writer, reader = make_board()
    numbers = [writer.number(0, 0, numbered(index)) for index in range(LAYOUTS_PER_EDGE)]
    assert sorted(numbers) == list(range(1, LAYOUTS_PER_EDGE + 1))
    assert reader.layout(0, 0, numbers[1]) == numbered(1)
    writer.number(0, 0, numbered(0))
    assert writer.number(0, 0, numbered(99)) == numbers[1]
    assert reader.layout(0, 0, numbers[1]) == numbered(99)
    assert reader.layout(0, 0, numbers[0]) == numbered(0)
    assert writer.number(0, 1, numbered(5)) == 1


def test_a_repeated_layout_is_parsed_once_and_the_result_shared():
    _, writer, reader = make_board()
    number = writer.number(1, 1, numbered(3))
    assert reader.layout(1, 1, number) is reader.layout(1, 1, number)


RECORD_OF_FIRST = 32  # words: header and done words take less than one record here
FIELD = {"version": 0, "kind": 1, "itemsize": 3, "offset": 4, "nbytes": 5, "where": 6, "rank": 7, "dim": 8}


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("version", 0, "not complete"),
        ("kind", 0, "kind 0"),
        ("kind", 4, "kind 4"),
        ("kind", NONE, "no place"),
        ("itemsize", 0, "0-byte items"),
        ("itemsize", 8, "is not 48 bytes"),
        ("offset", ARENA + 4, "multiple of 64"),
        ("offset", ARENA - 64, "outside"),
        ("offset", LIMIT - 0, "outside"),
        ("offset", (1 << 64) - 64, "outside"),
        ("nbytes", 49, "is not 49 bytes"),
        ("nbytes", 1 << 63, "is not"),
        ("rank", 25, "rank 25"),
        ("rank", (1 << 64) - 1, "rank"),
        ("rank", 1, "is not 48 bytes"),
        ("dim", 4, "is not 48 bytes"),
        ("dim", 1 << 63, "dimension"),
    ],
)
def test_malformed_records_are_refused(field, value, reason):
    segment, writer, reader = make_board()
    number = writer.number(0, 0, Layout(TENSOR, 1, 4, (3, 4), ARENA, 48))
    at = RECORD_OF_FIRST
    assert reader.layout(0, 0, number).shape == (3, 4)
    segment.words[at + FIELD[field]] = value
    if field != "version":
        segment.words[at] += 1
    with pytest.raises(LayoutError, match=reason) as refused:
        reader.layout(0, 0, number)
    assert refused.value.what == "edge 0"


@pytest.mark.parametrize("number", [0, LAYOUTS_PER_EDGE + 1, 65535])
def test_numbers_beyond_the_board_are_refused(number):
    _, _, reader = make_board()
    with pytest.raises(LayoutError, match="numbers are 1 to"):
        reader.layout(0, 0, number)


def test_places_in_another_memory_need_that_memory_and_fit_into_it():
    segment, writer, reader = make_board()
    number = writer.number(0, 0, Layout(TENSOR, 1, 1, (64,), LIMIT - 64, 64, 2, POOL))
    found = reader.layout(0, 0, number)
    assert (found.block, found.memory) == (2, POOL)
    assert reader.memory_of(found) is not segment
    here = writer.number(0, 0, Layout(TENSOR, 1, 1, (64,), LIMIT - 64, 64))
    assert reader.memory_of(reader.layout(0, 0, here)) is reader.segment
    beyond = writer.number(0, 0, Layout(TENSOR, 1, 1, (65,), LIMIT - 64, 65, 2, POOL))
    with pytest.raises(LayoutError, match="outside"):
        reader.layout(0, 0, beyond)
    elsewhere = writer.number(0, 1, Layout(TENSOR, 1, 1, (64,), 0, 64, None, USER + 1))
    with pytest.raises(LayoutError, match=f"memory {USER + 1} is not mapped"):
        reader.layout(0, 1, elsewhere)
    nowhere = writer.number(0, 1, Layout(TENSOR, 1, 1, (64,), ARENA, 64, block=0))
    with pytest.raises(LayoutError, match="no output pool"):
        reader.layout(0, 1, nowhere)


def test_another_generation_or_another_size_is_refused():
    fd = create_segment("board", LIMIT)
    segment = Segment(fd, writable=True)
    os.close(fd)
    early = BoardReader(segment, EDGES, SLOTS, GENERATION)  # before there is a header
    assert early.word(0, 0) == 0
    number = BoardWriter(segment, EDGES, SLOTS, GENERATION).number(0, 0, numbered(2))
    assert early.layout(0, 0, number) == numbered(2)
    for edges, slots, generation in ((EDGES, SLOTS, 8), (EDGES + 1, SLOTS, GENERATION), (EDGES, 1, GENERATION)):
        with pytest.raises(LayoutError, match="header"):
            BoardReader(segment, edges, slots, generation).layout(0, 0, number)


def test_a_rank_that_no_record_holds_is_refused_and_nothing_is_lost():
    _, writer, reader = make_board()
    deep = Layout(TENSOR, 1, 1, (1,) * (MAX_RANK + 1), ARENA, 1)
    with pytest.raises(LayoutError, match="rank 25"):
        writer.number(0, 0, deep)
    number = writer.number(0, 0, numbered(2))
    assert reader.layout(0, 0, number) == numbered(2)


def test_a_large_board_costs_what_it_uses():
    fd = create_segment("board")
    segment = Segment(fd, writable=True)
    edges = 20_000
    writer = BoardWriter(segment, edges, 2, 1)
    place = arena_start(edges, 2)
    assert place % PAGE == 0
    for edge in range(0, edges, 100):
        writer.number(edge, 0, Layout(TENSOR, 1, 4, (1,), place, 4))
    assert os.fstat(fd).st_blocks * 512 < 24 << 20
    os.close(fd)


WRITER = """
import sys
import numpy as np
from outrider.shm.board import BoardWriter, Layout, TENSOR, arena_start
from outrider.shm.doorbell import Doorbell
from outrider.shm.segment import Segment
segment, there, back = Segment(int(sys.argv[1]), writable=True), Doorbell(int(sys.argv[2])), Doorbell(int(sys.argv[3]))
board = BoardWriter(segment, 1, 1, 7)
place = arena_start(1, 1)
segment.populate(place, 1 << 16, "x")
for run in range(1, 301):
    there.wait()
    array = segment.array(place, np.int64, (run,))
    array[:] = run
    board.publish(0, 0, run, board.number(0, 0, Layout(TENSOR, 7, 8, (run,), place, 8 * run)))
    back.ring()
"""


def test_runs_between_two_processes():
    """300 runs, each of another shape, so that every number is redefined many times."""
    fd, there, back = create_segment("board"), Doorbell(), Doorbell()
    shared = read_only(fd)
    segment = Segment(shared, writable=False)
    os.close(shared)
    reader = BoardReader(segment, 1, 1, 7)
    fds = [fd, there.fileno(), back.fileno()]
    child = subprocess.Popen([sys.executable, "-c", WRITER, *map(str, fds)], pass_fds=fds)
    try:
        for run in range(1, 301):
            there.ring()
            assert back.wait(60), "the writer does not answer"
            found = reader.word(0, 0)
            assert run_of(found) == run
            layout = reader.layout(0, 0, number_of(found))
            assert layout.shape == (run,)
            assert (segment.array(layout.offset, "int64", layout.shape) == run).all()
        assert child.wait(60) == 0
    finally:
        child.kill()
        child.wait()
        there.close()
        back.close()
        os.close(fd)


@pytest.mark.parametrize("before", [3, LAYOUTS_PER_EDGE])
@pytest.mark.parametrize("known", [True, False])
def test_an_interrupted_definition_gives_no_number_two_meanings(before, known):
    """Whoever keeps a number either finds its record as it was, or is told by `changes`."""
    shapes = [Layout(TENSOR, 1, 4, (n,), ARENA, 4 * n, None) for n in range(40)]
    moment, ended = -1, False
    while not ended:
        moment += 1
        _, writer, reader = make_board()
        kept = {}
        for layout in shapes[:before]:
            number = writer.number(0, 1, layout)
            kept[layout] = (number, writer.version_at(0, 1, number), writer.changes[1])
        try:
            with interrupted("board.py", moment):
                writer.number(0, 1, shapes[1 if known else 30])
                ended = True
        except KeyboardInterrupt:
            pass
        for layout in (*shapes[20:24], *shapes[:before]):
            assert reader.layout(0, 1, writer.number(0, 1, layout)) == layout
            for number, (at, version), changes in kept.values():
                assert writer.changes[1] != changes or writer.version_at(0, 1, number) == (at, version)
            if writer.changes[1] != changes:  # they look, and keep what is still good
                kept = {
                    layout: (number, (at, version), writer.changes[1])
                    for layout, (number, (at, version), _) in kept.items()
                    if writer.version_at(0, 1, number) == (at, version)
                }
    assert moment > 0
