"""The items of `device_check.py`, as its two processes see them: `python -P device_items.py ROLE [SOCKET]`.

`<item> exporter` owns the memory or event, `<item> importer` opens it. The two talk in JSON over a SOCK_SEQPACKET pair,
which carries descriptors too, and print a figure a line, as JSON, as soon as they have it. All that is asked of the GPU
goes through `cupy.cuda.runtime`, or to the driver where CuPy lacks a call.
"""

from __future__ import annotations

import array
import ctypes
import importlib
import json
import mmap
import os
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
ROUNDS = 200
HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3  # cudaMemcpyKind
POSIX_FD = 1  # cudaMemHandleTypePosixFileDescriptor
INTERPROCESS = 2 | 4  # cudaEventDisableTiming, without which an event cannot be shared | cudaEventInterprocess


class Peer:
    """The other process of the item, at the end of a socket. EOFError when it is gone."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, item: Any, fds: Sequence[int] = ()) -> None:
        """One message, which JSON can hold."""
        socket.send_fds(self._socket, [json.dumps(item).encode()], list(fds))

    def receive(self) -> Any:
        """The next message; a descriptor that came with it is under 'fd'."""
        data, ancillary, _, _ = self._socket.recvmsg(64 * KIB, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        if not data:
            raise EOFError("the other process is gone")
        item = json.loads(data)
        for _, _, content in ancillary:
            (item["fd"],) = array.array("i", content[:4])
        return item


def tell(name: str, value: float | str, unit: str = "") -> None:
    """One figure of the item, for the process that watches."""
    print(json.dumps({"name": name, "value": value, "unit": unit}), flush=True)


def seconds(call: Callable[..., Any], *args: Any) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    call(*args)
    return time.perf_counter() - start


def outcome(name: str, call: Callable[..., Any], *args: Any) -> Any:
    """Call, and tell what came of it: 'ok' or the error."""
    try:
        result = call(*args)
    except RuntimeError as error:  # CUDARuntimeError is one
        tell(name, f"{type(error).__name__}: {error}")
        return None
    tell(name, "ok")
    return result


def runtime() -> Any:
    """`cupy.cuda.runtime`, with a context."""
    found = importlib.import_module("cupy").cuda.runtime
    found.setDevice(0)
    found.free(0)
    return found


def fitting(gpu: Any, *sizes: int) -> list[int]:
    """Those of the sizes that half of the free memory of the device holds."""
    free, _ = gpu.memGetInfo()
    return [size for size in sizes if size <= free // 2]


def name_of(nbytes: int) -> str:
    """'256 MiB'."""
    return f"{nbytes // GIB} GiB" if nbytes >= GIB else f"{nbytes // MIB} MiB"


def first_byte(gpu: Any, pointer: int) -> int:
    """Read one byte of device memory."""
    byte = ctypes.c_uint8()
    gpu.memcpy(ctypes.addressof(byte), pointer, 1, DEVICE_TO_HOST)
    return byte.value


# 1: opening ----------------------------------------------------------------------------------------------------------
def open_exporter(peer: Peer) -> None:
    """Memory of several sizes, kept until the other side has closed it."""
    gpu = runtime()
    for size in fitting(gpu, 2 * MIB, 256 * MIB, 8 * GIB):
        pointer = gpu.malloc(size)
        gpu.memset(pointer, 7, size)
        gpu.deviceSynchronize()
        peer.send({"size": size, "handle": bytes(gpu.ipcGetMemHandle(pointer)).hex()})
        peer.receive()
        gpu.free(pointer)
    peer.send({"size": 0})


def open_importer(peer: Peer) -> None:
    """Opens, opens what is open, closes, opens again."""
    gpu = runtime()
    while (found := peer.receive())["size"]:
        handle, label = bytes.fromhex(found["handle"]), name_of(found["size"])
        start = time.perf_counter()
        pointer = gpu.ipcOpenMemHandle(handle)
        tell(f"{label}, first open", (time.perf_counter() - start) * 1e6, "us")
        tell(f"{label}, first use", seconds(first_byte, gpu, pointer) * 1e6, "us")
        tell(f"{label}, opened while open", seconds(gpu.ipcOpenMemHandle, handle) * 1e6, "us")
        gpu.ipcCloseMemHandle(pointer)
        tell(f"{label}, last close", seconds(gpu.ipcCloseMemHandle, pointer) * 1e6, "us")
        start = time.perf_counter()
        pointer = gpu.ipcOpenMemHandle(handle)
        tell(f"{label}, opened again", (time.perf_counter() - start) * 1e6, "us")
        tell(f"{label}, contents", "right" if first_byte(gpu, pointer) == 7 else "WRONG")
        gpu.ipcCloseMemHandle(pointer)
        peer.send({})


# 2: pools ------------------------------------------------------------------------------------------------------------
def _driver(name: str, *args: Any) -> None:
    """A call of the driver that CuPy does not have. Raises RuntimeError with CUDA's number."""
    code = getattr(ctypes.CDLL("libcuda.so.1"), name)(*args)
    if code:
        raise RuntimeError(f"{name} gave CUresult {code}")


def pool_exporter(peer: Peer) -> None:
    """A pool that exports posix descriptors, and allocations from it."""
    gpu = runtime()
    pool = gpu.memPoolCreate(gpu.MemPoolProps(1, POSIX_FD, 1, 0))  # pinned memory, on device 0
    fd = ctypes.c_int(-1)
    _driver("cuMemPoolExportToShareableHandle", ctypes.byref(fd), ctypes.c_void_p(pool), POSIX_FD, ctypes.c_uint64(0))
    peer.send({"pool": True}, [fd.value])
    peer.receive()
    for size in fitting(gpu, 2 * MIB, 256 * MIB, 4 * GIB, 6 * GIB):  # above 5248 MiB an import has crashed elsewhere
        pointer = gpu.mallocFromPoolAsync(size, pool, 0)
        gpu.memset(pointer, 7, size)
        gpu.deviceSynchronize()
        data = ctypes.create_string_buffer(64)  # CUmemPoolPtrExportData
        _driver("cuMemPoolExportPointer", data, ctypes.c_uint64(pointer))
        peer.send({"size": size, "data": data.raw.hex()})
        peer.receive()
        gpu.freeAsync(pointer, 0)
        gpu.deviceSynchronize()
    peer.send({"size": 0})


def pool_importer(peer: Peer) -> None:
    """Imports the pool once, then pointers."""
    gpu = runtime()
    fd = peer.receive()["fd"]
    pool = ctypes.c_void_p()
    start = time.perf_counter()
    handle = ctypes.c_void_p(fd)
    _driver("cuMemPoolImportFromShareableHandle", ctypes.byref(pool), handle, POSIX_FD, ctypes.c_uint64(0))
    tell("pool imported", (time.perf_counter() - start) * 1e6, "us")
    peer.send({})
    while (found := peer.receive())["size"]:
        data = ctypes.create_string_buffer(bytes.fromhex(found["data"]), 64)
        pointer = ctypes.c_uint64()
        start = time.perf_counter()
        _driver("cuMemPoolImportPointer", ctypes.byref(pointer), pool, data)
        tell(f"{name_of(found['size'])}, pointer imported", (time.perf_counter() - start) * 1e6, "us")
        tell(f"{name_of(found['size'])}, contents", "right" if first_byte(gpu, pointer.value) == 7 else "WRONG")
        gpu.freeAsync(pointer.value, 0)  # the importer's part has to go first
        gpu.deviceSynchronize()
        peer.send({})


# 3: events -----------------------------------------------------------------------------------------------------------
def event_exporter(peer: Peer) -> None:
    """Records an event before each message."""
    gpu = runtime()
    event = gpu.eventCreateWithFlags(INTERPROCESS)
    peer.send({"event": bytes(gpu.ipcGetEventHandle(event)).hex()})
    memory = gpu.malloc(4 * KIB)
    peer.receive()
    for label in ("message alone", "with an event"):
        took, recorded = [], []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            if label == "with an event":
                gpu.memsetAsync(memory, 1, 4 * KIB, 0)
                gpu.eventRecord(event, 0)
                recorded.append(time.perf_counter() - start)
            peer.send({"wait": label == "with an event"})
            peer.receive()
            took.append(time.perf_counter() - start)
        tell(f"there and back, {label}", statistics.median(took) * 1e6, "us")
        if recorded:
            tell("memset and record", statistics.median(recorded) * 1e6, "us")
    peer.send({"wait": None})


def event_importer(peer: Peer) -> None:
    """Waits for the event on a stream of its own, and for that."""
    gpu = runtime()
    event = gpu.ipcOpenEventHandle(bytes.fromhex(peer.receive()["event"]))
    stream = gpu.streamCreate()
    peer.send({})
    took = []
    while (wait := peer.receive()["wait"]) is not None:
        if wait:
            start = time.perf_counter()
            gpu.streamWaitEvent(stream, event)
            gpu.streamSynchronize(stream)
            took.append(time.perf_counter() - start)
        peer.send({})
    tell("wait for the event on a stream, and for the stream", statistics.median(took) * 1e6, "us")


# 4 and 5: copies -----------------------------------------------------------------------------------------------------
def _rate(gpu: Any, target: int, source: int, size: int, kind: int) -> float:
    """GiB per second, the median of five copies."""

    def copy() -> None:
        gpu.memcpyAsync(target, source, size, kind, 0)
        gpu.deviceSynchronize()

    copy()
    return size / GIB / statistics.median(seconds(copy) for _ in range(5))


def host_exporter(peer: Peer) -> None:
    """Between a memfd and the device, before and after its pages are registered."""
    gpu = runtime()
    (size,) = fitting(gpu, GIB) or [256 * MIB]
    fd = os.memfd_create("device-check", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    mapping = mmap.mmap(fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    host = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    device = gpu.malloc(size)
    for label in ("pageable", "registered"):
        if label == "registered":
            tell("register", seconds(gpu.hostRegister, host, size, 1) / size * GIB, "s/GiB")  # 1: portable
        tell(f"to the device, {label}", _rate(gpu, device, host, size, HOST_TO_DEVICE), "GiB/s")
        tell(f"to the host, {label}", _rate(gpu, host, device, size, DEVICE_TO_HOST), "GiB/s")
    tell("unregister", seconds(gpu.hostUnregister, host) / size * GIB, "s/GiB")


def copy_exporter(peer: Peer) -> None:
    """The memory that the other side copies from."""
    gpu = runtime()
    pointer = gpu.malloc(256 * MIB)
    peer.send({"handle": bytes(gpu.ipcGetMemHandle(pointer)).hex()})
    peer.receive()


def copy_importer(peer: Peer) -> None:
    """On the device, from its own memory and from the other's."""
    gpu = runtime()
    size = 256 * MIB
    own, target = gpu.malloc(size), gpu.malloc(size)
    theirs = gpu.ipcOpenMemHandle(bytes.fromhex(peer.receive()["handle"]))
    for label, source in (("own memory", own), ("imported memory", theirs), ("own memory, again", own)):
        tell(f"on the device, from {label}", _rate(gpu, target, source, size, DEVICE_TO_DEVICE), "GiB/s")
    gpu.ipcCloseMemHandle(theirs)
    peer.send({})


# 6 and 7: deaths -----------------------------------------------------------------------------------------------------
def death_of_exporter_exporter(peer: Peer) -> None:
    """Dies while the other side has its memory open."""
    gpu = runtime()
    pointer = gpu.malloc(64 * MIB)
    gpu.memset(pointer, 7, 64 * MIB)
    gpu.deviceSynchronize()
    peer.send({"handle": bytes(gpu.ipcGetMemHandle(pointer)).hex()})
    peer.receive()
    os.kill(os.getpid(), signal.SIGKILL)


def death_of_exporter_importer(peer: Peer) -> None:
    """What the memory, and this process's context, are good for after that."""
    gpu = runtime()
    handle = bytes.fromhex(peer.receive()["handle"])
    theirs = gpu.ipcOpenMemHandle(handle)
    peer.send({})
    _until_gone(peer)
    value = outcome("read the memory of the dead", first_byte, gpu, theirs)
    tell("contents", "none" if value is None else "right" if value == 7 else "WRONG")
    outcome("synchronize", gpu.deviceSynchronize)
    outcome("close it", gpu.ipcCloseMemHandle, theirs)
    outcome("open it again", gpu.ipcOpenMemHandle, handle)
    _context_lives(gpu)


def death_of_importer_exporter(peer: Peer) -> None:
    """Whether memory that the dead had open can be freed, and the next export opened."""
    gpu = runtime()
    pointer = gpu.malloc(64 * MIB)
    before, _ = gpu.memGetInfo()
    peer.send({"handle": bytes(gpu.ipcGetMemHandle(pointer)).hex()})
    peer.receive()
    _until_gone(peer)
    outcome("free what the dead had open", gpu.free, pointer)
    outcome("synchronize", gpu.deviceSynchronize)
    tell("memory given back", (gpu.memGetInfo()[0] - before) / MIB, "MiB")
    _context_lives(gpu)


def death_of_importer_importer(peer: Peer) -> None:
    """Dies with the memory open."""
    gpu = runtime()
    theirs = gpu.ipcOpenMemHandle(bytes.fromhex(peer.receive()["handle"]))
    gpu.memset(theirs, 1, 64 * MIB)
    gpu.deviceSynchronize()
    peer.send({})
    os.kill(os.getpid(), signal.SIGKILL)


def _until_gone(peer: Peer) -> None:
    try:
        while True:
            peer.receive()
    except (EOFError, ConnectionResetError):
        pass


def _context_lives(gpu: Any) -> None:
    def use() -> None:
        pointer = gpu.malloc(2 * MIB)
        gpu.memset(pointer, 3, 2 * MIB)
        if first_byte(gpu, pointer) != 3:
            raise RuntimeError("the memory does not hold what was written")
        gpu.free(pointer)

    outcome("the context lives on", use)


# 8: ONNX Runtime -----------------------------------------------------------------------------------------------------
def add_model(count: int) -> bytes:
    """An ONNX model `y = x + x` of `count` floats, written out by hand."""

    def varint(number: int) -> bytes:
        return bytes([number & 127 | 128]) + varint(number >> 7) if number > 127 else bytes([number])

    def part(field: int, content: bytes | str | int) -> bytes:
        if isinstance(content, int):
            return varint(field << 3) + varint(content)
        data = content.encode() if isinstance(content, str) else content
        return varint(field << 3 | 2) + varint(len(data)) + data

    kind = part(1, part(1, 1) + part(2, part(1, part(1, count))))  # tensor of float, [count]
    node = part(1, "x") + part(1, "x") + part(2, "y") + part(4, "Add")
    values = [part(11 + i, part(1, name) + part(2, kind)) for i, name in enumerate("xy")]
    graph = part(1, node) + part(2, "g") + b"".join(values)
    return part(1, 8) + part(7, graph) + part(8, part(1, "") + part(2, 17))


def ort_exporter(peer: Peer) -> None:
    """Fills its memory anew for each run, and records an event behind that."""
    numpy = importlib.import_module("numpy")
    gpu = runtime()
    count = 16 * MIB
    pointer = gpu.malloc(4 * count)
    event = gpu.eventCreateWithFlags(INTERPROCESS)
    handles = {"memory": gpu.ipcGetMemHandle(pointer), "event": gpu.ipcGetEventHandle(event)}
    peer.send({"count": count, **{name: bytes(handle).hex() for name, handle in handles.items()}})
    while (number := peer.receive()["round"]) >= 0:
        items = numpy.full(count, number, numpy.float32)
        gpu.memcpyAsync(pointer, items.ctypes.data, items.nbytes, HOST_TO_DEVICE, 0)
        gpu.eventRecord(event, 0)
        peer.send({})


def ort_importer(peer: Peer) -> None:
    """Runs ONNX Runtime on the other's memory, on a stream that waits for the other's event."""
    numpy = importlib.import_module("numpy")
    onnxruntime = importlib.import_module("onnxruntime")
    gpu = runtime()
    found = peer.receive()
    count = found["count"]
    theirs = gpu.ipcOpenMemHandle(bytes.fromhex(found["memory"]))
    event = gpu.ipcOpenEventHandle(bytes.fromhex(found["event"]))
    stream, own = gpu.streamCreate(), gpu.malloc(4 * count)
    cuda = ("CUDAExecutionProvider", {"device_id": "0", "user_compute_stream": str(stream)})
    session = onnxruntime.InferenceSession(add_model(count), providers=[cuda])
    binding = session.io_binding()
    binding.bind_input("x", "cuda", 0, numpy.float32, [count], theirs)
    binding.bind_output("y", "cuda", 0, numpy.float32, [count], own)
    result = numpy.empty(count, numpy.float32)
    right, took = 0, []
    for number in range(20):
        peer.send({"round": number})
        peer.receive()
        start = time.perf_counter()
        gpu.streamWaitEvent(stream, event)
        session.run_with_iobinding(binding)
        gpu.streamSynchronize(stream)
        took.append(time.perf_counter() - start)
        gpu.memcpy(result.ctypes.data, own, result.nbytes, DEVICE_TO_HOST)
        right += bool((result == 2 * number).all())
    peer.send({"round": -1})
    tell("right results on imported memory, behind an event", f"{right} of 20")
    tell("run of 64 MiB", statistics.median(took) * 1e6, "us")


def ort_missing() -> str:
    """Why there is nothing to measure, '' when there is."""
    try:
        providers = importlib.import_module("onnxruntime").get_available_providers()
    except ImportError as error:
        return f"onnxruntime does not import: {error}"
    return "" if "CUDAExecutionProvider" in providers else "this onnxruntime has no CUDAExecutionProvider"


# 9: start ------------------------------------------------------------------------------------------------------------
def start_exporter(peer: Peer) -> None:
    """What a worker does before it is ready."""
    tell("process started", time.monotonic() - float(os.environ["DEVICE_CHECK_BORN"]), "s")
    start = time.perf_counter()
    gpu = importlib.import_module("cupy").cuda.runtime
    tell("CuPy imported", time.perf_counter() - start, "s")
    tell("context made", seconds(runtime), "s")
    pointer = gpu.malloc(2 * MIB)
    tell("first use", seconds(first_byte, gpu, pointer), "s")
    tell("ready after", time.monotonic() - float(os.environ["DEVICE_CHECK_BORN"]), "s")


# Roles ---------------------------------------------------------------------------------------------------------------
def probe() -> None:
    """Tell what there is, as figures called 'missing', 'device' and so on."""
    cupy = importlib.import_module("cupy")
    gpu = cupy.cuda.runtime
    found = gpu.getDeviceProperties(0)
    name = found["name"]
    tell("device", name.decode() if isinstance(name, bytes) else str(name))
    tell("device memory", found["totalGlobalMem"] / GIB, "GiB")
    tell("CuPy", cupy.__version__)
    tell("CUDA runtime", gpu.runtimeGetVersion())
    tell("CUDA driver", gpu.driverGetVersion())
    tell("no ONNX Runtime", ort_missing())


ROLES: dict[str, Callable[[Peer], None]] = {
    "open exporter": open_exporter,
    "open importer": open_importer,
    "pool exporter": pool_exporter,
    "pool importer": pool_importer,
    "event exporter": event_exporter,
    "event importer": event_importer,
    "host exporter": host_exporter,
    "copy exporter": copy_exporter,
    "copy importer": copy_importer,
    "exporter's death exporter": death_of_exporter_exporter,
    "exporter's death importer": death_of_exporter_importer,
    "importer's death exporter": death_of_importer_exporter,
    "importer's death importer": death_of_importer_importer,
    "ort exporter": ort_exporter,
    "ort importer": ort_importer,
    "start exporter": start_exporter,
}

if __name__ == "__main__":
    if sys.argv[1] == "probe":
        probe()
    else:
        ROLES[sys.argv[1]](Peer(socket.socket(fileno=int(sys.argv[2]))))
