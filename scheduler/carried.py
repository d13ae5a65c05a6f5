"""The zip in which a worker in another environment finds Outrider: `outrider/{providers, shm}`, and msgpack's Python.

It lies in a sealed memfd, which the worker inherits and puts on its `sys.path` as `/proc/self/fd/<number>`: nothing is
written to a disk, and nothing is left behind. It holds one top-level name only, `outrider`, so that all other packages
are those of the environment.
"""

from __future__ import annotations

import fcntl
import io
import os
import zipfile
from collections.abc import Iterator
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

_PACKAGES = ("providers", "shm")
_MSGPACK = ("__init__", "exceptions", "ext", "fallback")
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def carried() -> int:
    """A new descriptor of the zip (close-on-exec, yours)."""
    fd = os.memfd_create("outrider-worker", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(_zip())
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


@cache
def _zip() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:  # not compressed: an interpreter may have no zlib
        archive.writestr("outrider/__init__.py", (resources.files("outrider") / "__init__.py").read_bytes())
        for package in _PACKAGES:
            for name, file in _python_files(resources.files(f"outrider.{package}"), package):
                archive.writestr(f"outrider/{name}", file.read_bytes())
        archive.writestr("outrider/carried/__init__.py", '"""Packages of others that a worker needs."""\n')
        for part in _MSGPACK:
            file = resources.files("msgpack") / f"{part}.py"
            archive.writestr(f"outrider/carried/msgpack/{part}.py", file.read_bytes())
        # A library cannot be loaded out of a zip: `build.py` finds those of this install by their folder.
        native = resources.files("outrider.providers") / "cpu" / "native"
        archive.writestr("outrider/providers/cpu/native/installed", str(native))
    return made.getvalue()


def _python_files(folder: Traversable, name: str) -> Iterator[tuple[str, Traversable]]:
    """(path in the zip, file) of all modules of a package, and of the packages in it."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir() and (entry / "__init__.py").is_file():
            yield from _python_files(entry, f"{name}/{entry.name}")
        elif entry.name.endswith(".py"):
            yield f"{name}/{entry.name}", entry
