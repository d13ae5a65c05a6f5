"""Weights: written once, then read by whoever uses them, without copies.

Inline weights are gathered in an append-only memfd, written with `pwrite` (a writable mapping would forbid the write
seal) and sealed; external weight files are mapped where they lie. Both are mapped read-only and only when first asked
for, so a worker maps nothing that its nodes do not read.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.shm import memory
from outrider.shm.errors import LayoutError, WeightFileChangedError
from outrider.shm.segment import ALIGN, ALL_SEALS, PAGE, address_of, extent_of, page_up

_CHUNK = 8 << 20


class WeightWriter:
    """Collects weights in a new memfd called `name`; `seal` ends it. One thread."""

    def __init__(self, name: str) -> None:
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.nbytes = 0
        """Where the next weight goes at the earliest."""

    def append(self, buffer: bytes | memoryview | npt.NDArray[Any], value: str = "weight") -> tuple[int, int]:
        """Write one weight, 64-byte aligned; returns its (offset, nbytes).

        `buffer`: anything contiguous with the buffer protocol, or an array of any dtype but objects. Raises
        OutOfMemoryError, naming `value`, before a byte is written if memory is short.
        """
        if isinstance(buffer, np.ndarray):
            if buffer.dtype.hasobject:
                raise TypeError(f"{value} is an array of objects, which have no bytes to share")
            # As bytes: the buffer protocol has no codes for bfloat16 and its like.
            buffer = np.ascontiguousarray(buffer).reshape(-1).view(np.uint8).data
        data = memoryview(buffer).cast("B")
        offset = -(-self.nbytes // ALIGN) * ALIGN
        memory.check(value, data.nbytes)
        done = 0
        while done < data.nbytes:
            done += os.pwrite(self._fd, data[done : done + _CHUNK], offset + done)
        self.nbytes = offset + data.nbytes
        return offset, data.nbytes

    def seal(self) -> int:
        """Make the segment immutable and return its descriptor (close-on-exec, yours)."""
        os.ftruncate(self._fd, max(self.nbytes, PAGE))
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, ALL_SEALS)
        fd, self._fd = self._fd, -1
        return fd

    def close(self) -> None:
        """Drop what was written, unless it was sealed."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class WeightMap:
    """Read-only views of weight segments and weight files, each mapped whole, once, at first use.

    Views stay valid after this object is dropped. One thread.
    """

    def __init__(self) -> None:
        self._segments: dict[tuple[int, int], memoryview] = {}
        self._files: dict[tuple[str, int, int], memoryview] = {}

    def segment_view(self, fd: int, offset: int, nbytes: int) -> memoryview:
        """Bytes of a sealed weight segment. Once a segment was viewed, its descriptor may be closed for later reuse.

        Raises LayoutError if `fd` is not sealed or the bytes lie outside.
        """
        status = os.fstat(fd)
        key = (status.st_dev, status.st_ino)
        view = self._segments.get(key)
        if view is None:
            wanted = ALL_SEALS
            try:
                seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            except OSError as error:
                raise LayoutError(f"descriptor {fd} is no memfd", what="weights") from error
            if seals & wanted != wanted:
                raise LayoutError(f"weights with seals {seals:#x} could change; expected {wanted:#x}", what="weights")
            view = self._segments[key] = memoryview(
                mmap.mmap(fd, status.st_size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            )
        if offset < 0 or nbytes < 0 or offset + nbytes > view.nbytes:
            raise LayoutError(
                f"bytes {offset} to {offset + nbytes} lie outside weights of {view.nbytes} bytes",
                what="weights",
                offset=offset,
                nbytes=nbytes,
                limit=view.nbytes,
            )
        return view[offset : offset + nbytes]

    def file_view(self, path: str, offset: int, nbytes: int, size: int, mtime_ns: int) -> memoryview:
        """Bytes of an external weight file that had `size` and `mtime_ns` when the model was loaded.

        A file cannot be sealed: whoever cuts it short while it is mapped ends the processes that read it. So it is
        looked at anew in each call. Raises WeightFileChangedError if it is missing, no plain file, changed, or too
        short.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise _changed(path, f"it cannot be opened: {error.strerror}", (size, mtime_ns), None) from error
        try:
            status = os.fstat(fd)
            found = (status.st_size, status.st_mtime_ns)
            if not stat.S_ISREG(status.st_mode):
                raise _changed(path, "it is not a plain file", (size, mtime_ns), found)
            if found != (size, mtime_ns):
                raise _changed(path, "size or time of last change differ", (size, mtime_ns), found)
            if offset < 0 or nbytes < 0 or offset + nbytes > size:
                raise _changed(path, f"bytes {offset} to {offset + nbytes} lie outside it", (size, mtime_ns), found)
            if nbytes == 0:
                return memoryview(b"")
            key = (path, size, mtime_ns)
            view = self._files.get(key)
            if view is None:
                view = self._files[key] = memoryview(mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))
        finally:
            os.close(fd)
        return view[offset : offset + nbytes]


def mapping_of(array: npt.NDArray[Any]) -> mmap.mmap | None:
    """The read-only mapping in which an array of a WeightMap's bytes lies; None for any other array."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return base if isinstance(base, mmap.mmap) and memoryview(base).readonly else None


def let_go(array: npt.NDArray[Any]) -> None:
    """Take the pages of an array in a WeightMap out of this process's resident memory; of any other array, nothing.

    The bytes stay where the mapping has them from: who reads the array again finds them.
    """
    mapping = mapping_of(array)
    if mapping is None or not array.size:
        return
    low, high = extent_of(array)
    start = address_of(np.frombuffer(mapping, np.uint8))
    first, last = (low - start) // PAGE * PAGE, min(page_up(high - start), len(mapping))
    mapping.madvise(mmap.MADV_DONTNEED, first, last - first)


def _changed(
    path: str, reason: str, expected: tuple[int, int], found: tuple[int, int] | None
) -> WeightFileChangedError:
    seen = "" if found is None else f"; now {found[0]} bytes, changed at {found[1]} ns"
    return WeightFileChangedError(
        f"weight file {path} cannot be used: {reason} (at load: {expected[0]} bytes, changed at {expected[1]} ns"
        f"{seen}); load the model again",
        path=path,
        reason=reason,
        expected=expected,
        found=found,
    )
