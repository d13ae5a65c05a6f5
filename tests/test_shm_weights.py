"""Weights: one writer, sealed segments, files mapped where they lie."""

import gc
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.shm import memory
from outrider.shm.errors import LayoutError, OutOfMemoryError, WeightFileChangedError
from outrider.shm.segment import read_only
from outrider.shm.weights import WeightMap, WeightWriter, let_go, mapping_of

pytestmark = pytest.mark.fast


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.lists(st.binary(max_size=300), max_size=20))
def test_what_was_appended_is_what_is_read(buffers):
    writer = WeightWriter("weights")
    places = [writer.append(buffer) for buffer in buffers]
    fd = writer.seal()
    weights = WeightMap()
    views = [weights.segment_view(fd, *place) for place in places]
    os.close(fd)
    assert [bytes(view) for view in views] == buffers
    assert all(offset % 64 == 0 for offset, _ in places)
    assert all(left[0] + left[1] <= right[0] for left, right in zip(places, places[1:], strict=False))


def test_arrays_of_any_dtype_order_and_rank():
    arrays = [
        np.asfortranarray(np.arange(12, dtype=np.float32).reshape(3, 4)),
        np.arange(20)[::-3],
        np.array(2.5),
        np.zeros((0, 3)),
        np.array([1.5, -2], ml_dtypes.bfloat16),
    ]
    writer = WeightWriter("weights")
    places = [writer.append(array) for array in arrays]
    fd = writer.seal()
    weights = WeightMap()
    for array, place in zip(arrays, places, strict=True):
        again = np.frombuffer(weights.segment_view(fd, *place), array.dtype).reshape(array.shape)
        assert (again == array).all() and again.dtype == array.dtype and not again.flags.writeable
    os.close(fd)
    refusing = WeightWriter("weights")
    with pytest.raises(TypeError, match="labels"):
        refusing.append(np.array(["a"], object), "labels")
    refusing.close()


def test_a_large_weight_is_written_whole_and_never_copied_in_reading():
    large = np.arange(5 << 20, dtype=np.uint32)  # 20 MiB: more than one chunk
    writer = WeightWriter("weights")
    place = writer.append(large)
    fd = writer.seal()
    weights = WeightMap()
    first, second = (np.frombuffer(weights.segment_view(fd, *place), np.uint32) for _ in range(2))
    assert (first == large).all()
    assert first.ctypes.data == second.ctypes.data
    os.close(fd)


SPOILER = """
import errno, mmap, os, sys
fd = int(sys.argv[1])
for attempt in (
    lambda: os.pwrite(fd, b"x", 0),
    lambda: os.ftruncate(fd, 0),
    lambda: os.ftruncate(fd, 1 << 20),
    lambda: mmap.mmap(fd, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE),
):
    try:
        attempt()
    except OSError as error:
        print(errno.errorcode[error.errno])
"""


def test_nobody_can_change_sealed_weights():
    writer = WeightWriter("weights")
    writer.append(b"weight")
    fd = writer.seal()
    done = subprocess.run([sys.executable, "-c", SPOILER, str(fd)], pass_fds=[fd], capture_output=True, text=True)
    assert done.stdout.split() == ["EPERM"] * 4, done.stderr
    os.close(fd)


def test_weights_that_could_change_or_lie_outside_are_refused():
    writer = WeightWriter("weights")
    writer.append(b"weight")
    weights = WeightMap()
    with pytest.raises(LayoutError, match="could change"):
        weights.segment_view(writer._fd, 0, 6)
    fd = writer.seal()
    for offset, nbytes in ((-1, 2), (0, 4097), (4096, 1), (1 << 63, 1), (0, -1)):
        with pytest.raises(LayoutError, match="outside"):
            weights.segment_view(fd, offset, nbytes)
    with pytest.raises(LayoutError, match="no memfd"):
        weights.segment_view(0, 0, 1)
    os.close(fd)


def test_short_memory_is_typed_before_a_byte_is_written(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 999)
    writer = WeightWriter("weights")
    writer.append(bytes(999), "small")
    with pytest.raises(OutOfMemoryError) as refused:
        writer.append(bytes(1000), "large")
    assert (refused.value.value, refused.value.asked, refused.value.available) == ("large", 1000, 999)
    assert os.fstat(writer._fd).st_size == writer.nbytes == 999
    writer.close()
    writer.close()


def test_nothing_is_mapped_before_it_is_asked_for_and_all_goes_with_the_views(tmp_path):
    def mapped():
        return sum("memfd:lazy" in line or "lazy.bin" in line for line in open("/proc/self/maps"))

    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    writer = WeightWriter("lazy")
    place = writer.append(b"weight")
    fd = writer.seal()
    path, size, mtime_ns = make_file(tmp_path / "lazy.bin", b"0123456789")
    weights = WeightMap()
    assert mapped() == 0
    inline = weights.segment_view(fd, *place)
    assert mapped() == 1
    external = weights.file_view(path, 2, 3, size, mtime_ns)
    weights.file_view(path, 0, 10, size, mtime_ns)
    assert mapped() == 2
    os.close(fd)
    del weights
    gc.collect()
    assert bytes(inline) == b"weight" and bytes(external) == b"234"
    del inline, external
    gc.collect()
    assert mapped() == 0 and len(os.listdir("/proc/self/fd")) == before


def make_file(path, content):
    path.write_bytes(content)
    status = path.stat()
    return str(path), status.st_size, status.st_mtime_ns


def test_a_sparse_file_of_3_gb_is_viewed_at_any_offset(tmp_path):
    path = tmp_path / "weights.bin"
    with open(path, "wb") as file:
        file.truncate(3 << 30)
        file.seek((3 << 30) - 12)
        file.write(b"end of file.")
    status = path.stat()
    weights = WeightMap()
    view = weights.file_view(str(path), (3 << 30) - 12, 12, status.st_size, status.st_mtime_ns)
    assert bytes(view) == b"end of file." and view.readonly
    with open(f"/proc/{os.getpid()}/status") as file:
        resident = next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
    assert resident < 1 << 20  # KiB


def test_changed_missing_and_strange_files_are_refused(tmp_path):
    path, size, mtime_ns = make_file(tmp_path / "weights.bin", b"0123456789")
    weights = WeightMap()
    assert bytes(weights.file_view(path, 0, 10, size, mtime_ns)) == b"0123456789"
    assert weights.file_view(path, 10, 0, size, mtime_ns).nbytes == 0
    for offset, nbytes in ((0, 11), (10, 1), (-1, 1), (0, -1)):
        with pytest.raises(WeightFileChangedError, match="outside"):
            weights.file_view(path, offset, nbytes, size, mtime_ns)
    os.utime(path, ns=(mtime_ns + 1, mtime_ns + 1))
    with pytest.raises(WeightFileChangedError, match="differ") as changed:
        weights.file_view(path, 0, 10, size, mtime_ns)
    assert changed.value.expected == (size, mtime_ns) and changed.value.found == (size, mtime_ns + 1)
    assert isinstance(changed.value, OSError) and path in str(changed.value)
    with open(path, "ab") as file:
        file.write(b"more")
    os.utime(path, ns=(mtime_ns, mtime_ns))
    with pytest.raises(WeightFileChangedError, match="differ"):
        weights.file_view(path, 0, 10, size, mtime_ns)
    os.unlink(path)
    with pytest.raises(WeightFileChangedError, match="No such file"):
        weights.file_view(path, 0, 10, size, mtime_ns)
    os.mkfifo(path)
    with pytest.raises(WeightFileChangedError, match="plain file"):
        weights.file_view(path, 0, 10, size, mtime_ns)


def test_a_reopened_segment_is_the_same_mapping():
    writer = WeightWriter("weights")
    place = writer.append(b"weight")
    fd = writer.seal()
    other = read_only(fd)
    weights = WeightMap()
    left, right = (np.frombuffer(weights.segment_view(each, *place), np.uint8) for each in (fd, other))
    assert left.ctypes.data == right.ctypes.data
    os.close(fd)
    os.close(other)


def test_what_is_let_go_leaves_resident_memory_and_reads_the_same():
    writer = WeightWriter("weights")
    small, large = writer.append(b"before"), writer.append(np.arange(6 << 20, dtype=np.uint32))  # 24 MiB
    fd = writer.seal()
    weights = WeightMap()
    array = np.frombuffer(weights.segment_view(fd, *large), np.uint32)[3:].reshape(-1, 1)[:, ::-1]
    assert mapping_of(array) is mapping_of(np.frombuffer(weights.segment_view(fd, *small), np.uint8))
    os.close(fd)
    total = int(array.sum(dtype=np.uint64))

    def shared():
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("RssShmem")) << 10

    before = shared()
    let_go(array)
    assert before - shared() > 20 << 20
    assert int(array.sum(dtype=np.uint64)) == total
    own = np.arange(5)
    assert mapping_of(own) is None
    let_go(own)
    assert own.tolist() == [0, 1, 2, 3, 4]
