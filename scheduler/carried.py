"""The zip in which a worker in another environment finds Outrider: `outrider/{providers, shm}`, and msgpack's Python.

It lies in a sealed memfd, which the worker inherits and puts on its `sys.path` as `/proc/self/fd/<number>`: nothing is
left behind. It holds one top-level name only, `outrider`, so that all other packages are those of the environment.

Python does not keep what it compiles out of a zip, and compiling the `cpu` provider takes longer than starting it. So
each version of Python compiles a zip once, which is kept in the cache folder; where it cannot be, workers compile.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

from outrider.providers.wire.lasting import bound, cache_folder, read_checked, write_checked
from outrider.shm.segment import sealed

log = logging.getLogger("outrider.cache")

_PACKAGES = ("providers", "shm")
_MSGPACK = ("__init__", "exceptions", "ext", "fallback")
MOST = 8  # zips that are kept
# For the interpreter elsewhere. Flag 1: bytecode that is not compared with its source, which cannot change.
_COMPILE = """
import marshal, struct, sys, zipfile
from importlib.util import MAGIC_NUMBER
with zipfile.ZipFile(sys.argv[1]) as source, open(int(sys.argv[2]), "wb") as file, zipfile.ZipFile(file, "w") as made:
    for name in source.namelist():
        text = source.read(name)
        made.writestr(source.getinfo(name), text)
        if name.endswith(".py"):
            code = compile(text, name, "exec", dont_inherit=True)
            made.writestr(name + "c", MAGIC_NUMBER + struct.pack("<L8x", 1) + marshal.dumps(code))
"""


def carried(python: str) -> int:
    """A new descriptor of the zip for an interpreter (close-on-exec, yours)."""
    return sealed("outrider-worker", _compiled.get(_magic.get(python, "")) or _zip())


def prepare(python: str, magic: str, run: Callable[[list[str], list[int]], tuple[int, str, str]]) -> None:
    """Have a zip with bytecode of this magic number, an interpreter's, if there is a place to keep it.

    `run` runs the interpreter with arguments, and descriptors that it inherits: exit code, output, errors.
    """
    _magic[python] = magic
    folder = cache_folder()
    if magic in _compiled or folder is None:
        return
    path = os.path.join(folder, "carried", f"{hashlib.sha256(_zip()).hexdigest()[:24]}-{magic}.zip")
    found = bytes(read_checked(path) or b"")
    if not found:
        found = _compile(run)
        if not found or not write_checked(path, found):
            return
        bound(os.path.dirname(path), ".zip", MOST)
    _compiled[magic] = found


def _compile(run: Callable[[list[str], list[int]], tuple[int, str, str]]) -> bytes:
    """The zip with bytecode, as the interpreter makes it; nothing if it does not."""
    with contextlib.ExitStack() as opened:
        source = sealed("outrider-worker", _zip())
        opened.callback(os.close, source)
        made = os.memfd_create("outrider-bytecode", os.MFD_CLOEXEC)
        opened.callback(os.close, made)
        code, out, error_out = run(["-c", _COMPILE, f"/proc/self/fd/{source}", str(made)], [source, made])
        if code:
            log.info("Outrider is not compiled: %s", (error_out or out).strip()[-500:])
            return b""
        os.lseek(made, 0, os.SEEK_SET)
        with open(made, "rb", closefd=False) as file:
            return file.read()


_magic: dict[str, str] = {}  # interpreter -> the magic number of its bytecode
_compiled: dict[str, bytes] = {}  # that -> the zip with bytecode


@cache
def _zip() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:  # not compressed: an interpreter may have no zlib
        for name, content in _contents():
            archive.writestr(zipfile.ZipInfo(name), content)  # without a time: the same files give the same bytes
    return made.getvalue()


def _contents() -> Iterator[tuple[str, bytes]]:
    yield "outrider/__init__.py", (resources.files("outrider") / "__init__.py").read_bytes()
    for package in _PACKAGES:
        for name, file in _python_files(resources.files(f"outrider.{package}"), package):
            yield f"outrider/{name}", file.read_bytes()
    yield "outrider/carried/__init__.py", b""
    for part in _MSGPACK:
        yield f"outrider/carried/msgpack/{part}.py", (resources.files("msgpack") / f"{part}.py").read_bytes()
    # A library cannot be loaded out of a zip: `build.py` finds those of this install by their folder.
    native = resources.files("outrider.providers") / "cpu" / "native"
    yield "outrider/providers/cpu/native/installed", str(native).encode()


def _python_files(folder: Traversable, name: str) -> Iterator[tuple[str, Traversable]]:
    """(path in the zip, file) of all modules of a package, and of the packages in it."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir() and (entry / "__init__.py").is_file():
            yield from _python_files(entry, f"{name}/{entry.name}")
        elif entry.name.endswith(".py"):
            yield f"{name}/{entry.name}", entry
