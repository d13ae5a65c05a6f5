"""Segments: sealed, sparse shared memory with one writer.

A segment is a memfd of fixed, large size that costs nothing until it is touched. It is sealed against shrinking and
growing, so that no access within its size can fault in a process that has mapped it. The coordinator makes it; its
writer maps it writable; everyone else gets a descriptor reopened read-only, through which it cannot be mapped writable.

A mapping lives as long as anything refers to it. Nobody calls `mmap.close()`, and the one memoryview of a mapping is
never released: arrays built on it stay valid after all else is dropped.
"""

from __future__ import annotations

import errno
import fcntl
import math
import mmap
import os
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.shm import memory
from outrider.shm.errors import LayoutError, OutOfMemoryError
from outrider.shm.ranges import Intervals


def _segment_bytes(memory: int) -> int:
    """A power of two of at least twice the machine's memory, 64 GiB to 1 TiB.

    No larger, as a process has 128 TiB of addresses and a session maps three segments and more.
    """
    return min(max(1 << (2 * memory - 1).bit_length(), 1 << 36), 1 << 40)


SEGMENT_BYTES = _segment_bytes(os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE)
PAGE = mmap.PAGESIZE
ALIGN = 64
"""Places of tensors start at multiples of this many bytes."""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
ALL_SEALS = SEALS | fcntl.F_SEAL_WRITE

_MAP_NORESERVE = 0x4000  # asm-generic; the mmap module has it from 3.13
_MADV_REMOVE = 9
_MADV_POPULATE_WRITE = 23  # Linux 5.14


def create_segment(name: str, nbytes: int = SEGMENT_BYTES) -> int:
    """A new segment of `nbytes` (rounded up to whole pages), sealed; returns its descriptor (close-on-exec, yours).

    `name` shows in `/proc/<pid>/maps`; it need not be unique.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, page_up(max(nbytes, 1)))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def sealed(name: str, data: bytes) -> int:
    """A memfd that holds these bytes and can never change (close-on-exec, yours)."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, ALL_SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_only(fd: int) -> int:
    """A second descriptor of the same segment through which it can only be read (close-on-exec, yours)."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def address_of(array: npt.NDArray[Any]) -> int:
    """The address of an array's first element."""
    return int(array.__array_interface__["data"][0])


def extent_of(array: npt.NDArray[Any]) -> tuple[int, int]:
    """The addresses of the first byte of an array that is not empty, whatever its strides, and behind its last one."""
    low = high = address_of(array)
    for dim, stride in zip(array.shape, array.strides, strict=True):
        reach = (dim - 1) * stride
        low, high = low + min(reach, 0), high + max(reach, 0)
    return low, high + array.itemsize


def page_up(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


class Segment:
    """One mapping of a segment. The descriptor stays the caller's and may be closed afterwards.

    `nbytes` and `writable` say what was mapped, `address` where; `view` is the one memoryview (bytes) of the mapping,
    `words` the same as unsigned 64-bit integers. Raises LayoutError if the descriptor is not a sealed segment, or is
    read-only and `writable` was asked for; OutOfMemoryError if the address space of the process is too small.
    """

    def __init__(self, fd: int, *, writable: bool) -> None:
        self.nbytes = _checked_size(fd)
        self.writable = writable
        try:
            self._map = mmap.mmap(
                fd,
                self.nbytes,
                flags=mmap.MAP_SHARED | _MAP_NORESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ,
            )
        except PermissionError as error:
            raise LayoutError(
                "this segment was received read-only and cannot be mapped writable: only its writer may", what="segment"
            ) from error
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            raise OutOfMemoryError(
                f"no address space for a segment of {self.nbytes} bytes; raise the limit (ulimit -v)",
                value="segment",
                asked=self.nbytes,
                available=memory.available_bytes(),
            ) from error
        self.view = memoryview(self._map)
        self.words = self.view.cast("Q")
        self.address = address_of(np.frombuffer(self.view, np.uint8))
        self._populated = Intervals()
        self._lock = threading.Lock()

    def offset_of(self, array: npt.NDArray[Any]) -> int | None:
        """The offset at which all of a C-contiguous array lies in this mapping; None for any other array."""
        offset = address_of(array) - self.address
        if offset < 0 or offset + array.nbytes > self.nbytes or not array.flags.c_contiguous:
            return None
        return offset

    def holds(self, array: npt.NDArray[Any]) -> bool:
        """Whether an array of any strides lies in this mapping."""
        return 0 <= address_of(array) - self.address < self.nbytes

    def array(self, offset: int, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """C-contiguous array of `shape` at byte `offset`, writable if the mapping is; keeps the mapping alive.

        Raises LayoutError if it does not lie within the segment or is misaligned for `dtype`.
        """
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        if dtype.hasobject or min(shape, default=0) < 0:
            raise LayoutError(f"no array of {dtype} and shape {shape} can lie in shared memory", what="array")
        if offset < 0 or offset + nbytes > self.nbytes or offset % dtype.alignment:
            raise LayoutError(
                f"an array of {dtype} and shape {shape} at byte {offset} is misaligned or leaves the segment of "
                f"{self.nbytes} bytes",
                what="array",
                offset=offset,
                nbytes=nbytes,
                limit=self.nbytes,
            )
        # Directly on the memoryview: any other way of building it lets derived arrays outlive a weakref on this one.
        return np.ndarray(shape, dtype, buffer=self.view, offset=offset)

    def populate(self, offset: int, nbytes: int, value: str) -> None:
        """Back the pages of `[offset, offset + nbytes)` with memory, contents unchanged; a no-op where that was done.

        Raises OutOfMemoryError, naming `value`, if they lie beyond the segment or memory is short; the caller must not
        touch them then.
        """
        end = offset + nbytes
        if offset < 0 or end > self.nbytes:
            raise OutOfMemoryError(
                f"{value} needs {nbytes} bytes at offset {offset} of a segment of {self.nbytes} bytes",
                value=value,
                asked=nbytes,
                available=min(memory.available_bytes(), max(0, self.nbytes - offset)),
            )
        if not self.writable:
            raise ValueError("only the writer of a segment populates it")
        with self._lock:
            if self._populated.covers(offset, end):
                return
            gaps = self._populated.missing(offset // PAGE * PAGE, page_up(end))
            memory.check(value, sum(stop - start for start, stop in gaps))
            for start, stop in gaps:
                self._populate_pages(start, stop, value)
                self._populated.add(start, stop)

    def discard(self, offset: int, nbytes: int) -> None:
        """Return the memory of the whole pages within `[offset, offset + nbytes)`; they read as zeros afterwards."""
        start, stop = page_up(offset), (offset + nbytes) // PAGE * PAGE
        if start >= stop:
            return
        with self._lock:
            self._map.madvise(_MADV_REMOVE, start, stop - start)
            self._populated.remove(start, stop)

    def populated_bytes(self) -> int:
        """Bytes that this mapping has populated and not discarded."""
        with self._lock:
            return self._populated.total()

    def _populate_pages(self, start: int, stop: int, value: str) -> None:
        try:
            self._map.madvise(_MADV_POPULATE_WRITE, start, stop - start)
        except OSError as error:
            if error.errno in (errno.ENOMEM, errno.EFAULT):
                raise OutOfMemoryError(
                    f"{value} needs {stop - start} more bytes, which the system refused ({error.strerror})",
                    value=value,
                    asked=stop - start,
                    available=memory.available_bytes(),
                ) from error
            if error.errno != errno.EINVAL:
                raise
            for page in range(start, stop, PAGE):  # before Linux 5.14
                self.view[page] = self.view[page]


def _checked_size(fd: int) -> int:
    """Bytes of the segment behind `fd`; LayoutError unless it is sealed and of whole pages."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise LayoutError(f"descriptor {fd} is no memfd", what="segment") from error
    nbytes = os.fstat(fd).st_size
    if seals & SEALS != SEALS or nbytes == 0 or nbytes % PAGE:
        raise LayoutError(
            f"descriptor {fd} is no segment: {nbytes} bytes with seals {seals:#x}, expected whole pages and {SEALS:#x}",
            what="segment",
            nbytes=nbytes,
        )
    return nbytes
