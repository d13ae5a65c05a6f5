"""Segments: seals, protection, bounds, population and refusal."""

import gc
import os
import subprocess
import sys
import tempfile

import numpy as np
import pytest

from outrider.shm import memory, segment
from outrider.shm.errors import LayoutError, OutOfMemoryError
from outrider.shm.segment import PAGE, SEGMENT_BYTES, Segment, create_segment, extent_of, page_up, read_only

pytestmark = pytest.mark.fast


@pytest.fixture
def fd():
    fd = create_segment("test")
    yield fd
    os.close(fd)


def backed_bytes(fd):
    return os.fstat(fd).st_blocks * 512


def test_a_fresh_segment_is_large_and_costs_nothing(fd):
    assert os.fstat(fd).st_size == SEGMENT_BYTES
    assert not os.get_inheritable(fd)
    Segment(fd, writable=True)
    assert backed_bytes(fd) == 0


def test_reader_sees_what_the_writer_wrote_and_cannot_write(fd):
    other = read_only(fd)
    reader = Segment(other, writable=False)
    os.close(other)
    writer = Segment(fd, writable=True)
    writer.populate(PAGE, 4096, "x")
    writer.array(PAGE, np.float32, (4, 8))[:] = np.arange(32).reshape(4, 8)
    seen = reader.array(PAGE, np.float32, (4, 8))
    assert seen.sum() == 496 and not seen.flags.writeable and reader.view.readonly
    with pytest.raises(ValueError):
        seen[0] = 1
    with pytest.raises(ValueError):
        seen.flags.writeable = True
    with pytest.raises(TypeError):
        reader.words[0] = 1
    with pytest.raises(ValueError, match="only the writer"):
        reader.populate(0, 8, "x")


IMPORTER = """
import errno, mmap, os, sys
from outrider.shm.errors import LayoutError
from outrider.shm.segment import Segment
fd, writable = int(sys.argv[1]), int(sys.argv[2])
for size in (0, 4096, 1 << 41):
    try:
        os.ftruncate(fd, size)
    except OSError as error:
        print(errno.errorcode[error.errno])
try:
    mmap.mmap(fd, 4096, prot=mmap.PROT_WRITE)
except OSError as error:
    print(errno.errorcode[error.errno])
try:
    Segment(fd, writable=True)
except LayoutError as error:
    print("LayoutError")
view = Segment(fd, writable=False).view
print(view[0], view[-1])
"""


def test_another_process_can_neither_write_nor_resize(fd):
    writer = Segment(fd, writable=True)
    writer.view[0] = 7
    for given, expected in (
        (fd, ["EPERM", "EPERM", "EPERM", "7", "0"]),
        (read_only(fd), ["EINVAL", "EINVAL", "EINVAL", "EACCES", "LayoutError", "7", "0"]),
    ):
        done = subprocess.run(
            [sys.executable, "-c", IMPORTER, str(given), "0"], pass_fds=[given], capture_output=True, text=True
        )
        assert (done.stdout.split(), done.returncode) == (expected, 0), done.stderr
        if given != fd:
            os.close(given)


def test_what_is_no_sealed_segment_is_refused():
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, PAGE)
    with tempfile.TemporaryFile() as file:
        file.truncate(PAGE)
        for given in (unsealed, file.fileno()):
            with pytest.raises(LayoutError):
                Segment(given, writable=False)
    os.close(unsealed)


@pytest.mark.parametrize(
    ("offset", "dtype", "shape"),
    [
        (-64, "float32", (1,)),
        (2 * PAGE, "uint8", (1,)),
        (0, "uint8", (2 * PAGE + 1,)),
        (2 * PAGE - 64, "float32", (4, 5)),
        (2, "float32", (1,)),
        (0, "float64", (2**62, 2**62)),
        (0, "float32", (-1,)),
        (0, "object", (1,)),
    ],
)
def test_arrays_outside_or_misaligned_are_refused(offset, dtype, shape):
    fd = create_segment("small", 2 * PAGE)
    small = Segment(fd, writable=True)
    os.close(fd)
    assert small.nbytes == 2 * PAGE and page_up(2 * PAGE - 1) == 2 * PAGE
    assert small.array(0, "uint8", (2 * PAGE,)).nbytes == 2 * PAGE
    assert small.array(2 * PAGE, "float32", (0, 3)).size == 0
    with pytest.raises(LayoutError):
        small.array(offset, dtype, shape)


def test_populate_backs_pages_once_and_discard_gives_them_back(fd, monkeypatch):
    writer = Segment(fd, writable=True)
    checked = []
    monkeypatch.setattr(memory, "check", lambda value, asked: checked.append((value, asked)))
    writer.populate(100, PAGE, "x")
    assert backed_bytes(fd) == writer.populated_bytes() == 2 * PAGE
    writer.view[100] = 5
    writer.populate(0, 4 * PAGE, "y")
    writer.populate(PAGE, 3 * PAGE, "z")
    assert checked == [("x", 2 * PAGE), ("y", 2 * PAGE)]
    assert writer.view[100] == 5 and backed_bytes(fd) == 4 * PAGE
    writer.discard(1, 3 * PAGE)  # only whole pages
    assert backed_bytes(fd) == writer.populated_bytes() == 2 * PAGE
    assert writer.view[100] == 5
    writer.populate(0, 4 * PAGE, "x")
    assert checked[2:] == [("x", 2 * PAGE)]


def test_kernels_without_populate_get_the_same_pages(fd, monkeypatch):
    monkeypatch.setattr(segment, "_MADV_POPULATE_WRITE", 9999)  # an advice that no kernel knows: EINVAL
    writer = Segment(fd, writable=True)
    writer.view[3] = 9
    writer.populate(0, 3 * PAGE, "x")
    assert backed_bytes(fd) == 3 * PAGE and writer.view[3] == 9


def test_beyond_the_segment_is_out_of_memory(fd):
    writer = Segment(fd, writable=True)
    with pytest.raises(OutOfMemoryError) as refused:
        writer.populate(SEGMENT_BYTES - PAGE, 2 * PAGE, "edge y")
    assert (refused.value.value, refused.value.asked, refused.value.available) == ("edge y", 2 * PAGE, PAGE)
    assert backed_bytes(fd) == 0


GREEDY = """
import resource
from outrider.shm.errors import OutOfMemoryError
from outrider.shm.segment import Segment, create_segment
writer = Segment(create_segment("greedy"), writable=True)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    writer.populate(0, 1 << 40, "edge y")
except OutOfMemoryError as error:
    print(error.value, error.asked, error.available > 0)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8192)
"""


def test_a_tebibyte_is_refused_and_memory_stays_flat():
    done = subprocess.run([sys.executable, "-c", GREEDY], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == (f"edge y {1 << 40} True\nTrue\n", 0), done.stderr


LIMITED = """
import resource
from outrider.shm.errors import OutOfMemoryError
from outrider.shm.segment import Segment, create_segment
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
try:
    Segment(create_segment("limited"), writable=True)
except OutOfMemoryError as error:
    print(error)
"""


def test_too_little_address_space_says_so():
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True)
    assert "ulimit -v" in done.stdout and done.returncode == 0, done.stderr


HOLE = """
import ctypes
from outrider.shm.errors import OutOfMemoryError
from outrider.shm.segment import PAGE, Segment, create_segment
writer = Segment(create_segment("hole"), writable=True)
address = writer.array(PAGE, "uint8", (1,)).ctypes.data
assert ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(PAGE)) == 0
try:
    writer.populate(0, 3 * PAGE, "edge y")
except OutOfMemoryError as error:
    print(error.value, writer.populated_bytes())
"""


def test_refused_by_the_system_is_typed():
    done = subprocess.run([sys.executable, "-c", HOLE], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("edge y 0\n", 0), done.stderr


def test_descriptors_and_mappings_go_with_the_last_array():
    def mapped():
        return sum("memfd:passing" in line for line in open("/proc/self/maps"))

    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    fd = create_segment("passing")
    array = Segment(fd, writable=True).array(0, np.int64, (3,))
    os.close(fd)
    gc.collect()
    array[:] = 4
    assert mapped() == 1 and array.sum() == 12
    del array
    gc.collect()
    assert mapped() == 0 and len(os.listdir("/proc/self/fd")) == before


def test_the_extent_of_an_array_is_that_of_numpy():
    whole = np.zeros((4, 5, 6), np.float32)
    for array in (whole, whole[::-1], whole[1:3, ::2, ::-2], whole.T, whole[2, 3], whole[1, 1, 1:2].reshape(())):
        assert extent_of(array) == np.lib.array_utils.byte_bounds(array)
    assert extent_of(np.broadcast_to(whole[:1], (9, 4, 5, 6))) == extent_of(whole[:1])
