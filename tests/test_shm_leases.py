"""Leases: blocks come back when, and only when, nothing derived from a result is left."""

import copy
import ctypes
import gc
import os
import pickle
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.shm.board import TENSOR, Layout
from outrider.shm.errors import LayoutError, OutOfMemoryError
from outrider.shm.leases import Leases, PoolWriter
from outrider.shm.segment import PAGE, SEGMENT_BYTES, Segment, create_segment, page_up

pytestmark = pytest.mark.fast
BASE, BLOCKS, POOL = 16, 4, 7
SHAPE = (32, 64)
NBYTES = 32 * 64 * 4


class Sides:
    """Worker and coordinator over the same two segments, each with a mapping of its own, as in two processes."""

    def __init__(self, limit=None, blocks=BLOCKS):
        own_fd, pool_fd = create_segment("coordinator"), create_segment("pool")
        self.words = Segment(own_fd, writable=True).words
        self.worker_pool = Segment(pool_fd, writable=True)
        released = Segment(own_fd, writable=False).words
        self.worker = PoolWriter(self.worker_pool, released, BASE, blocks, limit, memory=POOL)
        self.leases = Leases(Segment(pool_fd, writable=True), self.words, BASE, blocks)
        os.close(own_fd)
        os.close(pool_fd)

    def result(self, start=0):
        """A leased float32 array of SHAPE that counts from `start`."""
        block, offset = self.worker.take(NBYTES)
        self.worker_pool.array(offset, "float32", SHAPE)[:] = np.arange(start, start + 2048).reshape(SHAPE)
        return self.leases.lease(Layout(TENSOR, 1, 4, SHAPE, offset, NBYTES, block, POOL), "float32")


DERIVED = {
    "slice": lambda a: a[3:20],
    "slice of slice": lambda a: a[3:20][2:5, 1:],
    "reshape": lambda a: a.reshape(64, 32),
    "transpose": lambda a: a.T,
    "swapaxes": lambda a: a.swapaxes(0, 1),
    "view": lambda a: a.view(),
    "view as integers": lambda a: a.view(np.uint32),
    "ravel": lambda a: a.ravel(),
    "flat": lambda a: a.flat,
    "squeeze": lambda a: a[None].squeeze(0),
    "asarray": lambda a: np.asarray(a),
    "asarray of slice": lambda a: np.asarray(a[1:]),
    "empty tuple index": lambda a: a[()],
    "diagonal": lambda a: np.diagonal(a),
    "real": lambda a: a.real,
    "memoryview": lambda a: memoryview(a),
    "memoryview of slice": lambda a: memoryview(a[5:]),
    "frombuffer": lambda a: np.frombuffer(a, np.float32),
    "broadcast_to": lambda a: np.broadcast_to(a, (2, *SHAPE)),
    "sliding windows": lambda a: np.lib.stride_tricks.sliding_window_view(a, 3, axis=0),
    "as_strided": lambda a: np.lib.stride_tricks.as_strided(a, (4,), (4,)),
    "DLPack": lambda a: np.from_dlpack(a),
    "DLPack capsule": lambda a: a.__dlpack__(),
    "list of rows": lambda a: list(a),
    "masked": lambda a: np.ma.masked_array(a, copy=False),
    "matrix": lambda a: a.view(np.matrix),
    "nditer": lambda a: np.nditer(a),
    "PickleBuffer": lambda a: pickle.PickleBuffer(a),
    "out-of-band pickle": lambda a: out_of_band(a),
    "ctypes array": lambda a: (ctypes.c_char * a.nbytes).from_buffer(a),
    "ctypes pointer": lambda a: a.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
    "record array": lambda a: np.rec.array(a, copy=False),
}


def out_of_band(array):
    buffers = []
    text = pickle.dumps(array, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(text, buffers=buffers)


@pytest.mark.parametrize("name", DERIVED)
def test_whatever_shares_a_result_keeps_its_block(name):
    sides = Sides()
    result = sides.result()
    address = result.ctypes.data
    derived = DERIVED[name](result)
    del result
    gc.collect()
    assert sides.leases.held() == 1
    # A worker that goes on never gets this block.
    others = [sides.result(9000) for _ in range(BLOCKS - 1)]
    assert sides.worker.take(NBYTES) is None
    assert ctypes.c_float.from_address(address + 4).value == 1
    del derived
    gc.collect()
    assert sides.leases.held() == BLOCKS - 1
    assert sides.result(5).ctypes.data == address
    del others


@pytest.mark.parametrize(
    "make",
    [np.copy, copy.copy, copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a)), lambda a: a + 0, np.ndarray.tolist],
)
def test_copies_let_the_block_go(make):
    sides = Sides()
    result = sides.result(7)
    other = make(result)
    del result
    gc.collect()
    assert sides.leases.held() == 0
    sides.result(500)
    assert other[0][1] == 8


def test_a_result_is_writable_contiguous_and_the_callers_own():
    sides = Sides()
    first = sides.result(1)
    assert first.flags.writeable and first.flags.c_contiguous and first.ctypes.data % 64 == 0
    assert type(first) is np.ndarray and first.shape == SHAPE
    first[0, 0] = -5
    second = sides.result(100)
    assert first[0, 0] == -5 and first[0, 1] == 2 and second[0, 0] == 100


def test_a_cycle_gives_its_block_back_at_collection():
    sides = Sides()
    cycle = [sides.result()]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert sides.leases.held() == 0


def test_results_outlive_everything_else():
    def mapped():
        return sum("memfd:pool" in line for line in open("/proc/self/maps"))

    gc.collect()
    before = len(os.listdir("/proc/self/fd")), mapped()
    sides = Sides()
    result = sides.result(3)
    gone = weakref.ref(sides.leases)
    view = result[1:]
    del sides, result
    gc.collect()
    assert gone() is None and mapped() == before[1] + 1
    view[0] += 1
    assert view[0, 0] == 3 + 64 + 1 and view[-1, -1] == 3 + 2047
    del view
    gc.collect()
    assert (len(os.listdir("/proc/self/fd")), mapped()) == before


def test_dropping_takes_no_lock_and_may_happen_in_any_thread():
    """The weak reference fires while the dropping thread is inside the code that sweeps."""
    sides = Sides(blocks=64)
    results = [sides.result(index) for index in range(64)]
    threads = [threading.Thread(target=results.clear)] + [threading.Thread(target=sides.leases.sweep) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sides.leases.held() == 0
    assert [sides.words[BASE + block] for block in range(64)] == [1] * 64


def test_copied_and_unwanted_results_are_given_back():
    sides = Sides()
    for _ in range(3):
        block, _ = sides.worker.take(NBYTES)
        sides.leases.release_now(block)
    block, _ = sides.worker.take(NBYTES)
    sides.worker.give_back(block)
    assert sides.worker.take(NBYTES)[0] == block
    assert sides.worker.pooled_bytes() == 2 * PAGE


def test_what_a_worker_may_not_say_is_refused():
    sides = Sides()
    result = sides.result()
    layout = Layout(TENSOR, 1, 4, SHAPE, 0, NBYTES, 0)
    with pytest.raises(LayoutError, match="earlier result"):
        sides.leases.lease(layout, "float32")
    with pytest.raises(LayoutError, match="not to be released"):
        sides.leases.release_now(0)
    for block in (None, BLOCKS):
        with pytest.raises(LayoutError, match="pool of 4"):
            sides.leases.lease(Layout(TENSOR, 1, 4, SHAPE, 0, NBYTES, block), "float32")
    with pytest.raises(LayoutError, match="leaves"):
        sides.leases.lease(Layout(TENSOR, 1, 4, SHAPE, (1 << 40) - 64, NBYTES, 1), "float32")
    assert sides.leases.held() == 1 and result[0, 1] == 1


def test_the_limit_is_kept_and_free_blocks_make_room():
    sides = Sides(limit=6 * PAGE, blocks=8)
    small = [sides.worker.take(PAGE)[0] for _ in range(4)]
    assert sides.worker.take(3 * PAGE) is None
    for block in small[:2]:
        sides.leases.release_now(block)
    assert sides.worker.take(4 * PAGE + 1) is None
    assert sides.worker.pooled_bytes() == 4 * PAGE, "free blocks are kept when dropping them does not help"
    assert sides.worker.take(3 * PAGE) is not None
    assert sides.worker_pool.populated_bytes() == sides.worker.pooled_bytes() <= 6 * PAGE
    assert sides.worker.take(7 * PAGE) is None


def test_a_block_of_more_than_twice_the_size_is_not_wasted():
    sides = Sides()
    big, _ = sides.worker.take(5 * PAGE)
    sides.leases.release_now(big)
    assert sides.worker.take(2 * PAGE)[0] != big
    assert sides.worker.take(3 * PAGE)[0] == big


def test_short_memory_is_typed_and_nothing_is_taken():
    sides = Sides()
    with pytest.raises(OutOfMemoryError) as refused:
        sides.worker.take(SEGMENT_BYTES // 2 - PAGE, "output y")
    assert refused.value.value == "output y"
    assert sides.worker.pooled_bytes() == 0
    assert sides.worker.take(100) is not None


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(st.one_of(st.integers(1, 9 * PAGE), st.integers(-6, -1)), max_size=60))
def test_blocks_in_use_never_overlap_and_keep_their_contents(steps):
    """Positive steps take that many bytes, negative ones release the (-step)th oldest."""
    sides = Sides(limit=24 * PAGE, blocks=5)
    live = {}
    for count, step in enumerate(steps):
        if step > 0:
            taken = sides.worker.take(step)
            if taken is None:
                # A block may be twice as large as what lies in it.
                at_most = 2 * sum(page_up(size) for _, size, _ in live.values()) + page_up(step)
                assert len(live) == 5 or at_most > 24 * PAGE
                continue
            block, offset = taken
            assert block not in live
            sides.worker_pool.array(offset, "uint8", (step,))[:] = count % 256
            live[block] = (offset, step, count % 256)
        elif live:
            block = list(live)[(-step - 1) % len(live)]
            del live[block]
            sides.leases.release_now(block)
        for offset, size, mark in live.values():
            assert (sides.worker_pool.array(offset, "uint8", (size,)) == mark).all()
        assert sides.worker_pool.populated_bytes() <= 24 * PAGE


WORKER = """
import sys
from outrider.shm.leases import PoolWriter
from outrider.shm.segment import Segment
pool = Segment(int(sys.argv[1]), writable=True)
writer = PoolWriter(pool, Segment(int(sys.argv[2]), writable=False).words, 16, 2, memory=7)
for line in sys.stdin:
    taken = writer.take(100_000)
    if taken:
        pool.array(taken[1], "int32", (25_000,))[:] = int(line)
    print(*taken or (-1, -1), flush=True)
"""


def test_a_result_of_another_process_survives_its_death():
    own_fd, pool_fd = create_segment("coordinator"), create_segment("pool")
    leases = Leases(Segment(pool_fd, writable=True), Segment(own_fd, writable=True).words, 16, 2)
    child = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(pool_fd), str(own_fd)],
        pass_fds=[pool_fd, own_fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    os.close(own_fd)
    os.close(pool_fd)

    def run(number):
        child.stdin.write(f"{number}\n")
        child.stdin.flush()
        block, offset = map(int, child.stdout.readline().split())
        if block < 0:
            return None
        return leases.lease(Layout(TENSOR, 6, 4, (25_000,), offset, 100_000, block), "int32")

    first, second = run(1), run(2)
    assert run(3) is None
    address = second.ctypes.data
    del second
    assert leases.held() == 1
    fourth = run(4)
    assert fourth.ctypes.data == address and (fourth == 4).all()
    child.kill()
    child.communicate()
    assert (first == 1).all() and (fourth == 4).all()
    first += 1
    assert (first == 2).all()
