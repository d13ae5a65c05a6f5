"""A `cupy` whose device is this machine's memory, for `outrider.tools.device_items`: just the calls made there.

Memory is a memfd, its handle the process and descriptor, its pointer an address of this process. Copies are done at
once, so events have nothing to wait for. `FAKE_CUPY` changes it: 'none' has no device, 'hangs' never exports memory,
'fails' exports none.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import time
import types
from typing import Any

__version__ = "fake"
MODE = os.environ.get("FAKE_CUPY", "")

_memory: dict[int, tuple[int, mmap.mmap]] = {}
_names = iter(range(1, 1 << 30))
_opened: dict[bytes, list[int]] = {}  # handle -> [pointer, how often]


class CUDARuntimeError(RuntimeError):
    """As CuPy's."""


def _map(fd: int, size: int) -> int:
    mapping = mmap.mmap(fd, size)
    pointer = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    _memory[pointer] = (fd, mapping)
    return pointer


def malloc(size: int) -> int:
    """cudaMalloc."""
    fd = os.memfd_create("fake")
    os.ftruncate(fd, size)
    return _map(fd, size)


def free(pointer: int) -> None:
    """cudaFree."""
    if pointer:
        fd, _ = _memory.pop(pointer)
        os.close(fd)


def ipc_get_mem_handle(pointer: int) -> bytes:
    """cudaIpcGetMemHandle."""
    if MODE == "hangs":
        time.sleep(600)
    if MODE == "fails":
        raise CUDARuntimeError("cudaErrorMapBufferObjectFailed: no handle")
    fd, mapping = _memory[pointer]
    return struct.pack("3q", os.getpid(), fd, len(mapping)).ljust(64, b"\0")


def ipc_open_mem_handle(handle: bytes) -> int:
    """cudaIpcOpenMemHandle: counted, as there."""
    if handle not in _opened:
        pid, fd, size = struct.unpack("3q", handle[:24])
        try:
            own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        except OSError as error:
            raise CUDARuntimeError(f"cudaErrorInvalidResourceHandle: {error}") from error
        _opened[handle] = [_map(own, size), 0]
    _opened[handle][1] += 1
    return _opened[handle][0]


def ipc_close_mem_handle(pointer: int) -> None:
    """cudaIpcCloseMemHandle."""
    (handle,) = [handle for handle, entry in _opened.items() if entry[0] == pointer]
    _opened[handle][1] -= 1
    if not _opened[handle][1]:
        del _opened[handle]
        free(pointer)


def get_device_properties(device: int) -> dict[str, Any]:
    """cudaGetDeviceProperties."""
    if MODE == "none":
        raise CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
    return {"name": b"memory", "totalGlobalMem": 1 << 30}


def _done(*args: Any) -> None:
    """A call that has nothing to do."""


cuda = types.SimpleNamespace(
    runtime=types.SimpleNamespace(
        setDevice=_done,
        deviceSynchronize=_done,
        memGetInfo=lambda: (64 << 20, 1 << 30),
        malloc=malloc,
        free=free,
        memset=lambda pointer, value, size: ctypes.memset(pointer, value, size) and None,
        memsetAsync=lambda pointer, value, size, stream: ctypes.memset(pointer, value, size) and None,
        memcpy=lambda target, source, size, kind: ctypes.memmove(target, source, size) and None,
        memcpyAsync=lambda target, source, size, kind, stream: ctypes.memmove(target, source, size) and None,
        hostRegister=_done,
        hostUnregister=_done,
        ipcGetMemHandle=ipc_get_mem_handle,
        ipcOpenMemHandle=ipc_open_mem_handle,
        ipcCloseMemHandle=ipc_close_mem_handle,
        eventCreateWithFlags=lambda flags: next(_names),
        ipcGetEventHandle=lambda event: bytes(64),
        ipcOpenEventHandle=lambda handle: next(_names),
        eventRecord=_done,
        streamCreate=lambda: next(_names),
        streamWaitEvent=_done,
        streamSynchronize=_done,
        getDeviceProperties=get_device_properties,
        runtimeGetVersion=lambda: 0,
        driverGetVersion=lambda: 0,
    )
)
