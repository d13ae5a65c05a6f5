"""Compiled state of units, kept between processes for providers that define `save` and `load`.

A state lies in the cache folder under a key made of all that it may depend on: the files and names of the provider's
class and its bases, its `version`, options, device and threads; the interpreter, NumPy and the CPU; the unit with the
contents of its constants, the optimization level, and the dtypes and shapes that it was compiled for. A damaged file
counts as not there. While a state is loaded a marker beside it names the process: if that is gone, it died of it, and
the state is dropped. At most `MOST` states and `MOST_BYTES` are kept, those used last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import hashlib
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np

from outrider.providers.contract import Provider, Unit
from outrider.providers.wire import lasting

MOST = 512
MOST_BYTES = 2 << 30

log = logging.getLogger("outrider.worker")


class States:
    """The states of one provider."""

    def __init__(self, folder: str, identity: bytes) -> None:
        self._folder = folder
        self._identity = identity

    def key(self, whole: bytes, unit: Unit) -> str:
        """`whole`: the digest of the unit that `unit` is, or is a signature of."""
        digest = hashlib.blake2b(self._identity + whole, digest_size=16)
        _feed(digest.update, [unit.inputs, unit.outputs, unit.optimization])
        return digest.hexdigest()

    @contextmanager
    def reading(self, key: str) -> Iterator[memoryview | None]:
        """The state under a key while it is loaded, or None. One whose loading raises is dropped."""
        path = self._path(key)
        for marker in glob.glob(f"{glob.escape(path)}.*"):
            if not _lives(marker.rpartition(".")[2]):
                log.warning("a compiled state is dropped: a worker died while it loaded %s", path)
                lasting.remove(marker)
                lasting.remove(path)
        state = lasting.read_checked(path)
        if state is None:
            yield None
            return
        marker = f"{path}.{os.getpid()}"
        lasting.write_bytes(marker, b"")
        try:
            yield state
            with contextlib.suppress(OSError):  # another process may have dropped it for newer ones
                os.utime(path)
        except BaseException:
            lasting.remove(path)
            raise
        finally:
            lasting.remove(marker)

    def write(self, key: str, state: bytes) -> bool:
        """Keep a state, at the cost of older ones; False where that is impossible."""
        if len(state) > MOST_BYTES:
            log.warning("a compiled state of %d bytes is not kept: %d are the most", len(state), MOST_BYTES)
            return False
        kept = lasting.write_checked(self._path(key), state)
        if kept:
            lasting.bound(self._folder, ".state", MOST, MOST_BYTES)
        return kept

    def _path(self, key: str) -> str:
        return os.path.join(self._folder, f"{key}.state")


def states_of(provider: Provider, context: Mapping[str, Any]) -> States | None:
    """Where a provider's states are; None where there is no cache folder. `context`: what it was set up with."""
    folder = lasting.cache_folder()
    if folder is None:
        return None
    made_of = []
    for kind in type(provider).__mro__[:-1]:
        file = getattr(sys.modules.get(kind.__module__), "__file__", None)
        made_of += [kind.__module__, kind.__qualname__, None if file is None else lasting.read_bytes(file)]
    machine = [sys.version, np.__version__, platform.machine(), _cpu()]
    digest = hashlib.blake2b()
    _feed(digest.update, [made_of, provider.version, dict(context), machine])
    return States(os.path.join(folder, "compiled"), digest.digest())


def digest_of(unit: Unit) -> bytes:
    """A digest of what a unit is: nodes, constants and their contents."""
    digest = hashlib.blake2b()
    constants = {name: unit.constants[name] for name in sorted(unit.constants)}
    _feed(digest.update, [unit.nodes, unit.constant_nodes, dict(unit.opsets), constants])
    return digest.digest()


def _feed(update: Callable[[Any], None], item: Any) -> None:
    """Hash plain data, arrays and what the plain graph is made of, such that no two items look the same."""
    if isinstance(item, np.ndarray):
        update(f"array {item.dtype} {item.shape} ".encode())
        if item.dtype == object:
            _feed(update, item.tolist())
        elif item.size:
            update(np.ascontiguousarray(item).reshape(-1).view(np.uint8).data)
    elif isinstance(item, Mapping):
        update(f"map {len(item)} ".encode())
        for key in sorted(item, key=repr):
            _feed(update, key)
            _feed(update, item[key])
    elif isinstance(item, (list, tuple)):
        update(f"list {len(item)} ".encode())
        for one in item:
            _feed(update, one)
    elif dataclasses.is_dataclass(item):
        _feed(update, [type(item).__name__, *(getattr(item, one.name) for one in dataclasses.fields(item))])
    else:
        data = item if isinstance(item, bytes) else repr(item).encode(errors="backslashreplace")
        update(f"{type(item).__name__} {len(data)} ".encode() + data)


def _lives(process: str) -> bool:
    return not process.isdecimal() or os.path.exists(f"/proc/{process}")


@lru_cache(1)
def _cpu() -> str:
    """What the CPU can do, as far as the system tells."""
    told = lasting.read_bytes("/proc/cpuinfo") or b""
    kept = (b"flags", b"Features", b"model name")
    lines = {line for line in told.splitlines() if line.startswith(kept)}
    return hashlib.blake2b(b"\n".join(sorted(lines))).hexdigest()
